package uplink

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

const wait = 30 * time.Second // longest time that a test waits for something; it elapses only if the test fails

// member is a fake member of the control plane with real mutual TLS. The test decides what it sends.
type member struct {
	agentv1.UnimplementedAgentServiceServer
	vmv1.UnimplementedNodeServiceServer

	addr      string
	authority *mtls.Authority
	server    *grpc.Server

	joins   chan *agentv1.JoinRequest
	watches chan *agentv1.WatchRequest
	reports chan *agentv1.ReportRequest
	beats   chan *vmv1.HeartbeatNodeRequest
	console chan *agentv1.SendConsoleRequest
	renewed chan *agentv1.RenewRequest
	denied  chan struct{} // gets a value for each watch that was refused
	// send contains the messages that the current watch sends; nil ends the watch. A test sends to it only after the
	// watch has begun, so that no earlier watch sends the message.
	send chan *agentv1.WatchResponse
	turn chan struct{} // capacity 1: only one watch runs at a time
	// networks contains the messages that the current SyncNetworks stream sends; nil ends the stream.
	networks chan *agentv1.SyncNetworksResponse
	hosts    chan *agentv1.SyncNetworksRequest // the agent's messages on the streams

	mu           sync.Mutex // guards the fields below
	leader       string     // address of the leader that watches are redirected to; "" if this member leads
	excluded     string     // reason with which watches are refused until the next Join; "" means accepted
	secret       string     // secret part of the only valid token
	forged       bool       // Join returns a credential with the ID of another node than the certificate
	joinErr      error      // returned once by Join after it has issued a certificate, as if the response was lost
	beatErr      error
	life         time.Duration // lifetime of certificates; 24 h unless the test sets it
	stale        bool          // Renew does not set life to 24 h
	images       map[string][]byte
	imageErr     error
	networksErr  error // returned by SyncNetworks
	issued       []*x509.Certificate
	otherMembers []string
}

func testAuthority(t *testing.T, seed byte) *mtls.Authority {
	a, err := mtls.NewAuthority("test", bytes.Repeat([]byte{seed}, ed25519.SeedSize))
	require.NoError(t, err)
	return a
}

func newMember(t *testing.T, a *mtls.Authority) *member {
	m := &member{
		authority: a, secret: "secret", life: 24 * time.Hour,
		joins: make(chan *agentv1.JoinRequest, 100), watches: make(chan *agentv1.WatchRequest, 100),
		reports: make(chan *agentv1.ReportRequest, 100), beats: make(chan *vmv1.HeartbeatNodeRequest, 100),
		console: make(chan *agentv1.SendConsoleRequest, 1000), renewed: make(chan *agentv1.RenewRequest, 100),
		denied: make(chan struct{}, 100), send: make(chan *agentv1.WatchResponse, 100), turn: make(chan struct{}, 1),
		networks: make(chan *agentv1.SyncNetworksResponse, 100), hosts: make(chan *agentv1.SyncNetworksRequest, 100),
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m.addr = listener.Addr().String()
	own, err := a.IssueFor(mtls.Member, "1", time.Now(), time.Hour)
	require.NoError(t, err)
	config := mtls.ServerOptional(func() (*tls.Certificate, error) { return mtls.WithAuthority(own, a.Certificate()), nil },
		a.Certificate(), mtls.OnlyKind(mtls.Node), time.Hour)
	m.server = grpc.NewServer(grpc.Creds(credentials.NewTLS(config)))
	agentv1.RegisterAgentServiceServer(m.server, m)
	vmv1.RegisterNodeServiceServer(m.server, m)
	var serving sync.WaitGroup
	serving.Go(func() { m.server.Serve(listener) })
	t.Cleanup(func() { m.server.Stop(); serving.Wait() })
	return m
}

func (m *member) token() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return "id." + m.secret + "." + mtls.Pin(m.authority.Certificate())
}

// refuse returns the error with which an excluded host is refused, or nil if excluded is empty.
func (m *member) refuse() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.excluded == "" {
		return nil
	}
	s, err := status.New(codes.PermissionDenied, "the host is excluded").WithDetails(&errdetails.ErrorInfo{Reason: m.excluded, Domain: "trivet"})
	if err != nil {
		return err
	}
	return s.Err()
}

func (m *member) set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

func (m *member) redirect() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.leader == "" {
		return nil
	}
	s, err := status.New(codes.FailedPrecondition, "this member does not lead").WithDetails(&errdetails.ErrorInfo{
		Reason: "NOT_LEADER", Domain: "trivet", Metadata: map[string]string{"leader": m.leader},
	})
	if err != nil {
		return err
	}
	return s.Err()
}

func (m *member) issue(csr []byte) (*agentv1.Credential, error) {
	request, err := x509.ParseCertificateRequest(csr)
	if err != nil || request.CheckSignature() != nil {
		return nil, status.Error(codes.InvalidArgument, "bad csr")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	cert, err := m.authority.Issue(mtls.Node, "n1", request.PublicKey, time.Now(), m.life)
	if err != nil {
		return nil, err
	}
	m.issued = append(m.issued, cert)
	fellows := m.otherMembers
	if fellows == nil {
		fellows = []string{m.addr}
	}
	return &agentv1.Credential{
		Certificate: cert.Raw, Authority: m.authority.Certificate().Raw, NodeId: "n1", Members: fellows,
	}, nil
}

func (m *member) Join(_ context.Context, r *agentv1.JoinRequest) (*agentv1.Credential, error) {
	m.joins <- r
	if r.GetToken() != m.token() {
		return nil, status.Error(codes.Unauthenticated, "the token is unknown or used up")
	}
	c, err := m.issue(r.GetCsr())
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.joinErr != nil {
		err, m.joinErr = m.joinErr, nil
		return nil, err
	}
	m.excluded = ""
	if m.forged {
		c.NodeId = "another"
	}
	return c, err
}

func (m *member) Renew(_ context.Context, r *agentv1.RenewRequest) (*agentv1.Credential, error) {
	m.set(func() {
		if !m.stale {
			m.life = 24 * time.Hour
		}
	})
	c, err := m.issue(r.GetCsr())
	m.renewed <- r
	return c, err
}

func (m *member) Watch(r *agentv1.WatchRequest, stream grpc.ServerStreamingServer[agentv1.WatchResponse]) error {
	if err := m.refuse(); err != nil {
		m.denied <- struct{}{}
		return err
	}
	if err := m.redirect(); err != nil {
		return err
	}
	p, _ := peer.FromContext(stream.Context())
	if id, ok := mtls.PeerID(p.AuthInfo.(credentials.TLSInfo).State); !ok || id.Name != "n1" {
		return status.Error(codes.Unauthenticated, "no certificate")
	}
	m.turn <- struct{}{}
	defer func() { <-m.turn }()
	m.watches <- r
	for {
		select {
		case message := <-m.send:
			if message == nil {
				return status.Error(codes.Unavailable, "stepping down")
			}
			if err := stream.Send(message); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (m *member) SyncNetworks(stream grpc.BidiStreamingServer[agentv1.SyncNetworksRequest, agentv1.SyncNetworksResponse]) error {
	m.mu.Lock()
	err := m.networksErr
	m.mu.Unlock()
	if err != nil {
		return err
	}
	go func() {
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			m.hosts <- r
		}
	}()
	for {
		select {
		case message := <-m.networks:
			if message == nil {
				return status.Error(codes.Unavailable, "stepping down")
			}
			if err := stream.Send(message); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (m *member) Report(stream grpc.ClientStreamingServer[agentv1.ReportRequest, agentv1.ReportResponse]) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		m.reports <- r
	}
}

func (m *member) HeartbeatNode(_ context.Context, r *vmv1.HeartbeatNodeRequest) (*vmv1.Node, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.beats <- r
	return &vmv1.Node{}, m.beatErr
}

func (m *member) ReadImage(r *agentv1.ReadImageRequest, stream grpc.ServerStreamingServer[agentv1.ReadImageResponse]) error {
	m.mu.Lock()
	data, ok := m.images[r.GetSha256()]
	broken := m.imageErr
	m.mu.Unlock()
	if !ok {
		return status.Error(codes.NotFound, "no such image here")
	}
	for piece := range slices.Chunk(data[r.GetOffset():], 1000) {
		if err := stream.Send(&agentv1.ReadImageResponse{Data: piece}); err != nil {
			return err
		}
		if broken != nil {
			return broken
		}
	}
	return nil
}

func (m *member) SendConsole(stream grpc.ClientStreamingServer[agentv1.SendConsoleRequest, agentv1.SendConsoleResponse]) error {
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			m.console <- nil
			return stream.SendAndClose(&agentv1.SendConsoleResponse{})
		}
		if err != nil {
			m.console <- nil
			return err
		}
		m.console <- r
	}
}

// agent is a Link under test, with the assignments that it delivered and the lines that it logged.
type agent struct {
	*Link
	assigned chan Assignment
	logged   chan string
	stop     func()
	done     chan error
}

// open opens a Link in the directory dir, with the addresses of members as its Seeds. The function change may modify
// the Options; it may be nil.
func open(t *testing.T, dir string, change func(*Options), members ...*member) *agent {
	a := &agent{assigned: make(chan Assignment, 100), logged: make(chan string, 1000), done: make(chan error, 1)}
	o := Options{
		Dir: dir, Name: "host1", Version: "v1", Facts: func() *agentv1.NodeFacts { return &agentv1.NodeFacts{BootId: "boot"} },
		Token: func() (string, error) { return members[0].token(), nil },
		Heartbeat: func() *vmv1.HeartbeatNodeRequest {
			return &vmv1.HeartbeatNodeRequest{State: vmv1.NodeState_NODE_STATE_READY}
		},
		Present: func() []cloud.VMID { return []cloud.VMID{"here"} },
		Assign:  func(x Assignment) { a.assigned <- x },
		Log:     slog.New(slog.NewTextHandler(lines{a.logged}, nil)),
	}
	for _, m := range members {
		o.Seeds = append(o.Seeds, m.addr)
	}
	if change != nil {
		change(&o)
	}
	link, err := Open(o)
	require.NoError(t, err)
	a.Link = link
	return a
}

func (a *agent) run(t *testing.T) *agent {
	ctx, cancel := context.WithCancel(t.Context())
	go func() { a.done <- a.Run(ctx) }()
	stopped := sync.OnceFunc(func() {
		cancel()
		<-a.done
	})
	a.stop = stopped
	t.Cleanup(stopped)
	return a
}

type lines struct{ to chan string }

func (l lines) Write(p []byte) (int, error) {
	select {
	case l.to <- string(p):
	default:
	}
	return len(p), nil
}

// next receives a value from the channel from. It fails the test if there is none within the duration wait.
func next[T any](t *testing.T, from chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(wait):
		require.FailNow(t, "no value arrived in time")
		panic("unreachable")
	}
}

func snapshot(term uint64, revision int64, ids ...string) *agentv1.WatchResponse {
	m := &agentv1.WatchResponse{Term: term, Revision: revision, Complete: true, LeaseSeconds: 30}
	for _, id := range ids {
		m.Vms = append(m.Vms, &agentv1.AssignedVm{VmId: id, Generation: 1})
	}
	return m
}
