package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// callTime bounds a call of these tests, startTime the time until a member works.
const (
	callTime  = 20 * time.Second
	startTime = time.Minute
)

// The tenants: web is whose resources are asked for, shop is its neighbour, lab is another org's.
var (
	web  = cloud.Tenant{Org: "acme", Project: "web"}
	shop = cloud.Tenant{Org: "acme", Project: "shop"}
	lab  = cloud.Tenant{Org: "rival", Project: "lab"}
)

// secret is the password of all users, wrongSecret what somebody tried.
const (
	secret      = "correct-horse-7b1e"
	wrongSecret = "wrong-horse-93ac"
)

// house is a whole member that runs in this process, with everything that it serves on sockets of its own.
type house struct {
	t         *testing.T
	config    Config
	key       *clusterkey.Key
	authority *mtls.Authority
	// public is port 50051 without a token.
	public *grpc.ClientConn
	// things are what placeholders of requests stand for.
	things map[string]string
	// host shows the certificate of a host that has joined, outsider that of another cluster's.
	host, outsider mtls.Source

	mu    sync.Mutex
	doors []door
}

// newHouse starts a member and waits until its administrator can act.
func newHouse(t *testing.T) *house {
	h := &house{t: t, key: clusterkey.Generate(), things: map[string]string{}}
	h.config = h.configure()
	var err error
	h.authority, err = h.key.Authority()
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- newFloor(h.config).carry(func(f *floor) error { return run(ctx, h.config, f, h.opened) })
	}()
	t.Cleanup(func() { stop(); require.NoError(t, <-ended) })
	h.public = h.dial(address(h.config, h.config.Ports.GRPC), insecure.NewCredentials())
	// The first task of the leader makes the administrator, and tasks begin when every listener is open.
	admin := identityv1.NewIdentityServiceClient(h.public)
	h.until(func() bool {
		_, err := admin.WhoAmI(h.admin(), &identityv1.WhoAmIRequest{})
		return err == nil || len(ended) > 0
	})
	require.Empty(t, ended, "the member has ended")
	return h
}

// configure is a member on a loopback address of its own, with every listener that can be had.
func (h *house) configure() Config {
	c := Default()
	var part [3]byte
	rand.Read(part[:])
	c.Listen = fmt.Sprintf("127.%d.%d.%d", part[0]|1, part[1], part[2]&0xfe|1)
	dir := h.t.TempDir()
	c.DataDir, c.ClusterKey, c.Tick = filepath.Join(dir, "data"), filepath.Join(dir, "cluster.key"), 20*time.Millisecond
	require.NoError(h.t, os.WriteFile(c.ClusterKey, []byte(h.key.Encode()), 0o600))
	var free []uint16
	for range 10 {
		l, err := net.Listen("tcp", c.Listen+":0")
		require.NoError(h.t, err)
		defer l.Close()
		free = append(free, uint16(l.Addr().(*net.TCPAddr).Port))
	}
	c.Ports = Ports{
		KV: free[0], Identity: free[1], VM: free[2], GRPC: free[3], Credit: free[4], CreditGRPC: free[5], Agents: free[6], Peers: free[7],
	}
	c.KV.EtcdListen, c.MetricsListen = []string{address(c, free[8])}, address(c, free[9])
	c.KV.BcryptCost = users.MinCost
	require.NoError(h.t, c.Validate())
	return c
}

func (h *house) opened(d door) { h.mu.Lock(); defer h.mu.Unlock(); h.doors = append(h.doors, d) }

func (h *house) dial(address string, c credentials.TransportCredentials) *grpc.ClientConn {
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(c))
	require.NoError(h.t, err)
	h.t.Cleanup(func() { conn.Close() })
	return conn
}

// limited is the context of a call.
func (h *house) limited() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	h.t.Cleanup(cancel)
	return ctx
}

// with is the context of a call that shows a token.
func (h *house) with(token string) context.Context {
	return metadata.AppendToOutgoingContext(h.limited(), "authorization", "Bearer "+token)
}

func (h *house) hostToken(scope cloud.Tenant, at time.Time, ttl time.Duration) string {
	text, err := identity.HostToken(h.key, scope, at, ttl)
	require.NoError(h.t, err)
	return text
}

// adminToken returns a token of the administrator without a scope.
func (h *house) adminToken() string { return h.hostToken(cloud.Tenant{}, time.Now(), time.Hour) }

func (h *house) admin() context.Context { return h.with(h.adminToken()) }

// do carries out a call that must succeed.
func do[Q, A any](h *house, call func(context.Context, Q, ...grpc.CallOption) (A, error), q Q) A {
	h.t.Helper()
	a, err := call(h.admin(), q)
	require.NoError(h.t, err)
	return a
}

// furnish makes tenants, people, and one of everything in project web.
func (h *house) furnish() {
	h.things["org"], h.things["project"], h.things["secret"] = string(web.Org), string(web.Project), secret
	who := identityv1.NewIdentityServiceClient(h.public)
	for _, p := range []cloud.Tenant{web, shop, lab} {
		if p != shop {
			do(h, who.CreateOrg, &identityv1.CreateOrgRequest{Id: string(p.Org)})
		}
		do(h, who.CreateProject, &identityv1.CreateProjectRequest{Id: string(p.Project), OrgId: string(p.Org)})
	}
	for _, p := range people {
		do(h, who.CreateUser, &identityv1.CreateUserRequest{Id: p.name})
		do(h, who.SetPassword, &identityv1.SetPasswordRequest{UserId: p.name, Password: secret})
		if b := p.binding(); b != nil {
			do(h, who.BindRole, &identityv1.BindRoleRequest{UserId: p.name, Binding: b})
		}
	}
	do(h, who.CreateUser, &identityv1.CreateUserRequest{Id: "spare"})
	do(h, who.SetPassword, &identityv1.SetPasswordRequest{UserId: "spare", Password: secret})
	account := do(h, who.CreateServiceAccount, &identityv1.CreateServiceAccountRequest{
		OrgId: string(web.Org), ProjectId: string(web.Project), Name: robot.name, Roles: []string{string(robot.role)},
	})
	h.things["account"], h.things["key"] = account.GetAccount().GetId(), account.GetSecret()

	purse := creditv1.NewCreditServiceClient(h.public)
	do(h, purse.CreateWallet, &creditv1.CreateWalletRequest{OrgId: string(web.Org), ProjectId: string(web.Project), InitialBalance: 1000})
	held := do(h, purse.CreateReservation, &creditv1.CreateReservationRequest{OrgId: string(web.Org), ProjectId: string(web.Project), Amount: 10, TtlSeconds: 3600})
	h.things["reservation"] = held.GetId()

	// The administrator's import directory.
	picture := filepath.Join(h.config.DataDir, "import", "picture.raw")
	require.NoError(h.t, os.WriteFile(picture, bytes.Repeat([]byte{7}, 4096), 0o600))
	image := do(h, vmv1.NewImageServiceClient(h.public).CreateImage, &vmv1.CreateImageRequest{
		Name: "picture", OrgId: string(web.Org), Visibility: vmv1.Visibility_VISIBILITY_PRIVATE, Format: vmv1.ImageFormat_IMAGE_FORMAT_RAW,
		SourceUrl: "file://" + picture,
	})
	h.things["image"] = image.GetId()
	h.things["node"] = h.join()
	// Who places VMs learns a moment later that the host is ready.
	h.until(func() bool {
		vm, err := vmv1.NewVmServiceClient(h.public).CreateVm(h.admin(), &vmv1.CreateVmRequest{
			Name: "db", OrgId: string(web.Org), ProjectId: string(web.Project), Spec: &vmv1.VmSpec{
				Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: 512},
				Disks: []*vmv1.DiskSpec{{Id: "root", SizeGib: 1, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}}},
			},
		})
		if status.Code(err) == codes.ResourceExhausted {
			return false
		}
		require.NoError(h.t, err)
		h.things["vm"] = vm.GetId()
		return true
	})
}

// join makes a host of the cluster, which says that it has room, and gives its id.
func (h *house) join() string {
	made := do(h, operatorv1.NewOperatorServiceClient(h.public).CreateNodeToken, &operatorv1.CreateNodeTokenRequest{})
	_, private, err := ed25519.GenerateKey(nil)
	require.NoError(h.t, err)
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, private)
	require.NoError(h.t, err)
	door := address(h.config, h.config.Ports.Agents)
	given, err := agentv1.NewAgentServiceClient(h.dial(door, h.memberTLS(nil))).Join(h.limited(),
		&agentv1.JoinRequest{Protocol: 1, Token: made.GetToken(), Csr: csr, Name: "rack-1"})
	require.NoError(h.t, err)
	leaf, err := x509.ParseCertificate(given.GetCertificate())
	require.NoError(h.t, err)
	shown := &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: private, Leaf: leaf}
	h.host = func() (*tls.Certificate, error) { return shown, nil }
	agent := vmv1.NewNodeServiceClient(h.dial(door, h.memberTLS(h.host)))
	_, err = agent.HeartbeatNode(h.limited(), h.beat(given.GetNodeId()))
	require.NoError(h.t, err)
	h.things["csr"], h.things["sum"] = base64.StdEncoding.EncodeToString(csr), strings.Repeat("0", 64)
	h.things["peer"] = "https://" + address(h.config, h.config.Ports.Peers)
	h.things["ticket"] = made.GetToken()
	beat, err := protojson.Marshal(h.beat(given.GetNodeId()))
	require.NoError(h.t, err)
	h.things["beat"] = string(beat)

	other, err := clusterkey.Generate().Authority()
	require.NoError(h.t, err)
	foreign, err := other.IssueFor(mtls.Node, given.GetNodeId(), time.Now(), time.Hour)
	require.NoError(h.t, err)
	h.outsider = func() (*tls.Certificate, error) { return foreign, nil }
	return given.GetNodeId()
}

func (h *house) beat(id string) *vmv1.HeartbeatNodeRequest {
	room := &vmv1.NodeCapacity{Vcpus: 512, MemoryMib: 1 << 20, StorageGib: 10_000}
	return &vmv1.HeartbeatNodeRequest{
		NodeId: id, Name: "rack-1", State: vmv1.NodeState_NODE_STATE_READY, AgentVersion: "1.0", Capacity: room,
		Allocatable: proto.CloneOf(room), Hypervisors: []vmv1.HypervisorType{vmv1.HypervisorType_HYPERVISOR_TYPE_KVM},
	}
}

// memberTLS dials a port that shows a member's certificate, with a certificate of the caller's or none.
func (h *house) memberTLS(own mtls.Source) credentials.TransportCredentials {
	return credentials.NewTLS(mtls.Client(own, h.authority.Certificate(), mtls.OnlyKind(mtls.Member)))
}

// peerCertificate is what this member itself shows.
func (h *house) peerCertificate() mtls.Source { return leaf(h.authority, h.config.NodeID, time.Now) }
