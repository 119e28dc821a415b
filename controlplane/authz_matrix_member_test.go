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
	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/edge/openapi/openapitest"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// callTime is the timeout of a call in these tests, startTime that of waiting for an event, such as the start of a
// member.
const (
	callTime  = 20 * time.Second
	startTime = time.Minute
)

// Tenants of the tests. The requests act on resources of web. shop is another project of the same org, lab a project of
// another org.
var (
	web  = cloud.Tenant{Org: "acme", Project: "web"}
	shop = cloud.Tenant{Org: "acme", Project: "shop"}
	lab  = cloud.Tenant{Org: "rival", Project: "lab"}
)

// secret is the password of all users, wrongSecret one that no user has.
const (
	secret      = "correct-horse-7b1e"
	wrongSecret = "wrong-horse-93ac"
)

// testMember is a member that runs in the process of the test, with all its listeners.
type testMember struct {
	t         *testing.T
	config    config.Config
	key       *clusterkey.Key
	authority *mtls.Authority
	// public is a connection to the gRPC port that sends no token.
	public *grpc.ClientConn
	// resources maps the names of placeholders to the IDs of resources.
	resources map[string]string
	// host is the certificate of a host that has joined the cluster, outsider that of a host of another cluster.
	host, outsider mtls.Source

	// checkers holds the checker of the exchanges of each REST API, by listener.
	checkers map[string]*openapitest.Checker

	mu        sync.Mutex
	listeners []boundListener
}

// startMember starts a member and waits until its administrator exists and can make calls.
func startMember(t *testing.T) *testMember {
	h := &testMember{t: t, key: clusterkey.Generate(), resources: map[string]string{}}
	h.config = h.newConfig()
	var err error
	h.authority, err = h.key.Authority()
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- newSupervisor(h.config).supervise(func(f *supervisor) error { return run(ctx, h.config, f, h.addListener) })
	}()
	t.Cleanup(func() { stop(); require.NoError(t, <-ended) })
	h.public = h.dial(h.config.Address(h.config.Ports.GRPC), insecure.NewCredentials())
	// The first task of the leader creates the administrator. It runs only after all listeners were opened.
	admin := identityv1.NewIdentityServiceClient(h.public)
	h.waitFor(func() bool {
		_, err := admin.WhoAmI(h.adminContext(), &identityv1.WhoAmIRequest{})
		return err == nil || len(ended) > 0
	})
	require.Empty(t, ended, "the member has ended")
	return h
}

// newConfig returns the configuration of a member on a random loopback address, with every kind of listener enabled.
func (h *testMember) newConfig() config.Config {
	c := config.Default()
	var part [3]byte
	rand.Read(part[:])
	c.Listen = fmt.Sprintf("127.%d.%d.%d", part[0]|1, part[1], part[2]&0xfe|1)
	dir := h.t.TempDir()
	c.DataDir, c.ClusterKey, c.Tick = filepath.Join(dir, "data"), filepath.Join(dir, "cluster.key"), 20*time.Millisecond
	require.NoError(h.t, os.WriteFile(c.ClusterKey, []byte(h.key.Encode()), 0o600))
	var free []uint16
	for range 12 {
		l, err := net.Listen("tcp", c.Listen+":0")
		require.NoError(h.t, err)
		defer l.Close()
		free = append(free, uint16(l.Addr().(*net.TCPAddr).Port))
	}
	c.Ports = config.Ports{
		KV: free[0], Identity: free[1], VM: free[2], GRPC: free[3], Credit: free[4], CreditGRPC: free[5], Agents: free[6], Peers: free[7],
		Network: free[10], NetworkGRPC: free[11],
	}
	c.KV.EtcdListen, c.MetricsListen = []string{c.Address(free[8])}, c.Address(free[9])
	c.KV.BcryptCost = users.MinCost
	require.NoError(h.t, c.Validate())
	return c
}

func (h *testMember) addListener(d boundListener) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.listeners = append(h.listeners, d)
}

func (h *testMember) dial(address string, c credentials.TransportCredentials) *grpc.ClientConn {
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(c))
	require.NoError(h.t, err)
	h.t.Cleanup(func() { conn.Close() })
	return conn
}

// callContext returns a context for one call, with the timeout callTime.
func (h *testMember) callContext() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	h.t.Cleanup(cancel)
	return ctx
}

// contextWithToken returns a context for one call that sends the given bearer token.
func (h *testMember) contextWithToken(token string) context.Context {
	return metadata.AppendToOutgoingContext(h.callContext(), "authorization", "Bearer "+token)
}

func (h *testMember) hostToken(scope cloud.Tenant, at time.Time, ttl time.Duration) string {
	text, err := identity.HostToken(h.key, scope, at, ttl)
	require.NoError(h.t, err)
	return text
}

// adminToken returns an administrator's token that is not limited to a tenant.
func (h *testMember) adminToken() string { return h.hostToken(cloud.Tenant{}, time.Now(), time.Hour) }

func (h *testMember) adminContext() context.Context { return h.contextWithToken(h.adminToken()) }

// mustCall makes a call as the administrator and fails the test if the call fails.
func mustCall[Q, A any](h *testMember, call func(context.Context, Q, ...grpc.CallOption) (A, error), q Q) A {
	h.t.Helper()
	a, err := call(h.adminContext(), q)
	require.NoError(h.t, err)
	return a
}

// createResources creates the tenants, their users, and one resource of each kind in project web. It stores their IDs
// in h.resources.
func (h *testMember) createResources() {
	h.resources["org"], h.resources["project"], h.resources["secret"] = string(web.Org), string(web.Project), secret
	who := identityv1.NewIdentityServiceClient(h.public)
	for _, p := range []cloud.Tenant{web, shop, lab} {
		if p != shop {
			mustCall(h, who.CreateOrg, &identityv1.CreateOrgRequest{Id: string(p.Org)})
		}
		mustCall(h, who.CreateProject, &identityv1.CreateProjectRequest{Id: string(p.Project), OrgId: string(p.Org)})
	}
	for _, p := range testUsers {
		mustCall(h, who.CreateUser, &identityv1.CreateUserRequest{Id: p.name})
		mustCall(h, who.SetPassword, &identityv1.SetPasswordRequest{UserId: p.name, Password: secret})
		if b := p.binding(); b != nil {
			mustCall(h, who.BindRole, &identityv1.BindRoleRequest{UserId: p.name, Binding: b})
		}
	}
	mustCall(h, who.CreateUser, &identityv1.CreateUserRequest{Id: "spare"})
	mustCall(h, who.SetPassword, &identityv1.SetPasswordRequest{UserId: "spare", Password: secret})
	account := mustCall(h, who.CreateServiceAccount, &identityv1.CreateServiceAccountRequest{
		OrgId: string(web.Org), ProjectId: string(web.Project), Name: serviceAccount.name, Roles: []string{string(serviceAccount.role)},
	})
	h.resources["account"], h.resources["key"] = account.GetAccount().GetId(), account.GetSecret()

	purse := creditv1.NewCreditServiceClient(h.public)
	mustCall(h, purse.CreateWallet, &creditv1.CreateWalletRequest{OrgId: string(web.Org), ProjectId: string(web.Project), InitialBalance: 1000})
	held := mustCall(h, purse.CreateReservation, &creditv1.CreateReservationRequest{OrgId: string(web.Org), ProjectId: string(web.Project), Amount: 10, TtlSeconds: 3600})
	h.resources["reservation"] = held.GetId()

	h.createNetworks()

	h.waitFor(func() bool {
		v, err := vmv1.NewVolumeServiceClient(h.public).CreateVolume(h.adminContext(), &vmv1.CreateVolumeRequest{
			Name: "data", OrgId: string(web.Org), ProjectId: string(web.Project), SizeGib: 1,
		})
		if status.Code(err) == codes.FailedPrecondition {
			return false // the first storage class does not exist yet
		}
		require.NoError(h.t, err)
		h.resources["volume"] = v.GetId()
		return true
	})

	// Only the administrator may import from the default import directory.
	picture := filepath.Join(h.config.DataDir, layout.ImportDir, "picture.raw")
	require.NoError(h.t, os.WriteFile(picture, bytes.Repeat([]byte{7}, 4096), 0o600))
	image := mustCall(h, vmv1.NewImageServiceClient(h.public).CreateImage, &vmv1.CreateImageRequest{
		Name: "picture", OrgId: string(web.Org), Visibility: vmv1.Visibility_VISIBILITY_PRIVATE, Format: vmv1.ImageFormat_IMAGE_FORMAT_RAW,
		SourceUrl: "file://" + picture,
	})
	h.resources["image"] = image.GetId()
	h.resources["node"] = h.joinHost()
	// The scheduler learns only after a delay that the host is ready.
	h.waitFor(func() bool {
		vm, err := vmv1.NewVmServiceClient(h.public).CreateVm(h.adminContext(), &vmv1.CreateVmRequest{
			Name: "db", OrgId: string(web.Org), ProjectId: string(web.Project), Spec: &vmv1.VmSpec{
				Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: 512},
				Disks: []*vmv1.DiskSpec{{Id: "root", SizeGib: 1, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}}},
			},
		})
		if status.Code(err) == codes.ResourceExhausted {
			return false
		}
		require.NoError(h.t, err)
		h.resources["vm"] = vm.GetId()
		return true
	})
}

// joinHost makes a host with free capacity join the cluster, and returns its ID.
func (h *testMember) joinHost() string {
	made := mustCall(h, operatorv1.NewOperatorServiceClient(h.public).CreateNodeToken, &operatorv1.CreateNodeTokenRequest{})
	_, private, err := ed25519.GenerateKey(nil)
	require.NoError(h.t, err)
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, private)
	require.NoError(h.t, err)
	agentAddress := h.config.Address(h.config.Ports.Agents)
	given, err := agentv1.NewAgentServiceClient(h.dial(agentAddress, h.memberTLS(nil))).Join(h.callContext(),
		&agentv1.JoinRequest{Protocol: 1, Token: made.GetToken(), Csr: csr, Name: "rack-1"})
	require.NoError(h.t, err)
	leaf, err := x509.ParseCertificate(given.GetCertificate())
	require.NoError(h.t, err)
	shown := &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: private, Leaf: leaf}
	h.host = func() (*tls.Certificate, error) { return shown, nil }
	agent := vmv1.NewNodeServiceClient(h.dial(agentAddress, h.memberTLS(h.host)))
	_, err = agent.HeartbeatNode(h.callContext(), h.heartbeat(given.GetNodeId()))
	require.NoError(h.t, err)
	h.resources["csr"], h.resources["sum"] = base64.StdEncoding.EncodeToString(csr), strings.Repeat("0", 64)
	h.resources["peer"] = "https://" + h.config.Address(h.config.Ports.Peers)
	h.resources["ticket"] = made.GetToken()
	beat, err := protojson.Marshal(h.heartbeat(given.GetNodeId()))
	require.NoError(h.t, err)
	h.resources["beat"] = string(beat)

	other, err := clusterkey.Generate().Authority()
	require.NoError(h.t, err)
	foreign, err := other.IssueFor(mtls.Node, given.GetNodeId(), time.Now(), time.Hour)
	require.NoError(h.t, err)
	h.outsider = func() (*tls.Certificate, error) { return foreign, nil }
	return given.GetNodeId()
}

func (h *testMember) heartbeat(id string) *vmv1.HeartbeatNodeRequest {
	room := &vmv1.NodeCapacity{Vcpus: 512, MemoryMib: 1 << 20, StorageGib: 10_000}
	return &vmv1.HeartbeatNodeRequest{
		NodeId: id, Name: "rack-1", State: vmv1.NodeState_NODE_STATE_READY, AgentVersion: "1.0", Capacity: room,
		Allocatable: proto.CloneOf(room), Hypervisors: []vmv1.HypervisorType{vmv1.HypervisorType_HYPERVISOR_TYPE_KVM},
	}
}

// memberTLS returns client credentials for a port whose server has a member's certificate. own, if not nil, is the
// client's certificate.
func (h *testMember) memberTLS(own mtls.Source) credentials.TransportCredentials {
	return credentials.NewTLS(mtls.Client(own, h.authority.Certificate(), mtls.OnlyKind(mtls.Member)))
}

// peerCertificate returns the source of the member's own certificate.
func (h *testMember) peerCertificate() mtls.Source {
	return testCertificate(h.authority, h.config.NodeID)
}
