package rpc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// tokens is a Verifier for tokens of the form user/org/project, whose user has the role project:viewer there, and for
// the token admin of an administrator.
type tokens struct {
	verified atomic.Int64
	forCalls atomic.Int64 // verifications of new calls, without the repeated ones of open streams
	ended    atomic.Bool
	moved    atomic.Bool // all users now have their role in the project "elsewhere" instead
}

func (v *tokens) Verify(ctx context.Context, token string) (*cloud.Caller, error) {
	v.verified.Add(1)
	if _, call := metadata.FromIncomingContext(ctx); call {
		v.forCalls.Add(1)
	}
	if v.ended.Load() {
		return nil, fault.New(fault.Unauthenticated, "the token has ended")
	}
	c := &cloud.Caller{User: cloud.UserID(token), Proof: cloud.ProofPassword}
	if token == "admin" {
		c.Bindings = []cloud.Binding{{Role: cloud.SystemAdmin}}
		return c, nil
	}
	parts := strings.Split(token, "/")
	c.User = cloud.UserID(parts[0])
	if v.moved.Load() {
		parts[2] = "elsewhere"
	}
	c.Bindings = []cloud.Binding{{Role: cloud.ProjectViewer, Org: cloud.OrgID(parts[1]), Project: cloud.ProjectID(parts[2])}}
	return c, nil
}

// sender implements WatchVm: it sends one message if the VM ID is "one", and messages without end otherwise. Each has a
// name of the given number of bytes.
type sender struct {
	vmv1.UnimplementedVmServiceServer
	bytes int
	made  atomic.Int64
}

func (h *sender) WatchVm(in *vmv1.WatchVmRequest, s grpc.ServerStreamingServer[vmv1.VmEvent]) error {
	if _, err := auth.Admit(s.Context(), "/vmcontroller.v1.VmService/WatchVm", in.GetOrgId(), in.GetProjectId()); err != nil {
		return err
	}
	for n := 0; n == 0 || in.GetVmId() != "one"; n++ {
		err := s.SendMsg(Lazy(func() (*Encoded, error) {
			h.made.Add(1)
			return Encode(&vmv1.VmEvent{VmId: fmt.Sprint(n), Vm: &vmv1.VirtualMachine{Name: strings.Repeat("x", h.bytes)}})
		}))
		if err != nil {
			return err
		}
	}
	<-s.Context().Done()
	return s.Context().Err()
}

// member is a gRPC server on loopback with its Streams and its tokens.
type member struct {
	t       *testing.T
	address string
	server  *Server
	tokens  *tokens
	streams *Streams
}

func newMember(t *testing.T, h vmv1.VmServiceServer) *member {
	m := &member{t: t, tokens: &tokens{}, streams: NewStreams()}
	s, _ := New(Options{
		Verifier: m.tokens, Log: slog.New(slog.DiscardHandler), Metrics: grpcprom.NewServerMetrics(), Public: true, Streams: m.streams,
	})
	vmv1.RegisterVmServiceServer(s, h)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m.address, m.server = listener.Addr().String(), s
	var serving sync.WaitGroup
	serving.Go(func() { s.Serve(listener) })
	t.Cleanup(func() { s.Stop(); serving.Wait() })
	return m
}

// dial returns a client that accepts 64 KiB of unread bytes per stream.
func (m *member) dial() vmv1.VmServiceClient {
	conn, err := grpc.NewClient(m.address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(1<<30))
	require.NoError(m.t, err)
	m.t.Cleanup(func() { conn.Close() })
	return vmv1.NewVmServiceClient(conn)
}

// incomplete returns the prefix of a message of the given length, without the message itself.
func incomplete(length uint32) []byte { return binary.BigEndian.AppendUint32([]byte{0}, length) }

type watch = grpc.ServerStreamingClient[vmv1.VmEvent]

// watch opens a stream of WatchVm. If token is empty, the call has no token.
func (m *member) watch(ctx context.Context, c vmv1.VmServiceClient, token string, in *vmv1.WatchVmRequest) watch {
	if token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	s, err := c.WatchVm(ctx, in)
	require.NoError(m.t, err)
	return s
}

// TestStreamsAreBounded opens streams up to each limit. The next stream must be refused with an error that names the
// limit; streams of others must be admitted. Streams that have ended must not count.
func TestStreamsAreBounded(t *testing.T) {
	m := newMember(t, &sender{bytes: 1})
	clients := map[string]vmv1.VmServiceClient{} // by token, since a connection has at most MaxStreams streams
	ctx, cancelCall := context.WithCancel(t.Context())
	open := func(token string) error {
		if clients[token] == nil {
			clients[token] = m.dial()
		}
		s := m.watch(ctx, clients[token], token, &vmv1.WatchVmRequest{VmId: "one"})
		_, err := s.Recv()
		return err
	}
	refused := func(token, text string) {
		t.Helper()
		err := open(token)
		require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
		require.ErrorContains(t, err, text)
		require.Equal(t, "TOO_MANY_STREAMS", FaultOf(err).Reason)
	}
	fill := func(user int, place string, n int) {
		t.Helper()
		for ; n > 0; user, n = user+1, n-MaxPrincipalStreams {
			for range min(n, MaxPrincipalStreams) {
				require.NoError(t, open(fmt.Sprint("user-", user, "/", place)))
			}
		}
	}
	fill(0, "acme/web", MaxPrincipalStreams)
	refused("user-0/acme/web", "principal user-0 has 128 streams open")
	refused("user-0/acme/shop", "principal user-0 has")
	fill(1, "acme/web", MaxProjectStreams-MaxPrincipalStreams)
	refused("user-9/acme/web", "project acme/web has 256 streams open")
	for i, project := range []string{"acme/b", "acme/c", "acme/d"} {
		fill(10*(i+1), project, MaxProjectStreams)
	}
	refused("user-9/acme/e", "org acme has 1024 streams open")
	require.NoError(t, open("user-9/rival/lab"), "another org must have its own limit")
	require.Equal(t, 1, m.streams.open(scope{"principal", "user-9", MaxPrincipalStreams}), "a refused stream must not be counted")

	cancelCall()
	require.Eventually(t, func() bool {
		m.streams.mu.Lock()
		defer m.streams.mu.Unlock()
		return len(m.streams.counts) == 0 && len(m.streams.unsent.flows) == 0 && len(m.streams.unsent.orgs) == 0 && m.streams.unsent.all.used == 0
	}, 10*time.Second, time.Millisecond)
	ctx = t.Context()
	require.NoError(t, open("user-0/acme/web"))
}

// TestStreamsOfAMemberAreBounded checks the limit of all tenants' streams on a member, and the limits of
// unauthenticated streams per address and in total. Operators must be able to open streams when these limits are
// reached.
func TestStreamsOfAMemberAreBounded(t *testing.T) {
	s := NewStreams()
	tenant := func(i int) *cloud.Caller {
		return &cloud.Caller{User: cloud.UserID(fmt.Sprint(i)), Proof: cloud.ProofPassword}
	}
	admin := &cloud.Caller{User: "admin", Proof: cloud.ProofHostKey, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}
	scoped := &cloud.Caller{User: "admin", Proof: cloud.ProofHostKey, Bindings: admin.Bindings, Scope: cloud.Tenant{Org: "acme"}}
	for i := range MaxMemberStreams {
		require.NoError(t, s.take(callerScopes(t.Context(), tenant(i))))
	}
	for _, c := range []*cloud.Caller{tenant(MaxMemberStreams), scoped} {
		err := s.take(callerScopes(t.Context(), c))
		require.True(t, fault.Is(err, fault.ResourceExhausted))
		require.ErrorContains(t, err, "all tenants together have 8192 streams open")
	}
	require.NoError(t, s.take(callerScopes(t.Context(), admin)))
	for _, caller := range []*cloud.Caller{nil, {User: "ada", Proof: cloud.ProofNone}} {
		require.NoError(t, s.take(callerScopes(t.Context(), caller)))
	}
	s = NewStreams()
	from := func(i int) []scope {
		return []scope{{"address", fmt.Sprint("192.0.2.", i), MaxAddressStreams}, callerScopes(t.Context(), nil)[1]}
	}
	for i := range MaxOpenStreams {
		require.NoError(t, s.take(from(i/MaxAddressStreams)))
	}
	require.ErrorContains(t, s.take(from(0)), "address 192.0.2.0 has 32 streams")
	require.ErrorContains(t, s.take(from(99)), "all unauthenticated callers together have 512 streams")
}

// TestUnauthenticatedStreamsAreBounded checks the limit of open streams without a token. Streams of methods that need a
// token must be refused at once, so that they do not count.
func TestUnauthenticatedStreamsAreBounded(t *testing.T) {
	m := newMember(t, &sender{bytes: 1})
	conn := dial(t, m.address)
	health, vms := healthv1.NewHealthClient(conn), vmv1.NewVmServiceClient(conn)
	for range 2 * MaxAddressStreams {
		_, err := m.watch(t.Context(), vms, "", &vmv1.WatchVmRequest{}).Recv()
		require.Equal(t, codes.Unauthenticated, status.Code(err), "%v", err)
	}
	open := func() error {
		s, err := health.Watch(t.Context(), &healthv1.HealthCheckRequest{})
		require.NoError(t, err)
		_, err = s.Recv()
		return err
	}
	for range MaxAddressStreams {
		require.NoError(t, open())
	}
	err := open()
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	_, err = m.watch(t.Context(), vms, "", &vmv1.WatchVmRequest{}).Recv()
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	_, err = m.watch(t.Context(), vms, "ada/acme/web", &vmv1.WatchVmRequest{VmId: "one"}).Recv()
	require.NoError(t, err)
}

// TestUnfinishedStreamEndsWithItsToken checks that a stream whose request is incomplete also ends when its token
// becomes invalid.
func TestUnfinishedStreamEndsWithItsToken(t *testing.T) {
	m := newMember(t, &sender{bytes: 1})
	m.server.intake.time = time.Hour
	r := connect(t, m.address)
	var streams []uint32
	for _, part := range [][]byte{nil, incomplete(1), incomplete(small + 1)} {
		stream, err := r.Call(watchVM, "authorization", "Bearer mallory/acme/web")
		require.NoError(t, err)
		require.NoError(t, r.Data(stream, false, part, nil))
		streams = append(streams, stream)
	}
	mallory := scope{"principal", "mallory", MaxPrincipalStreams}
	require.Eventually(t, func() bool { return m.streams.open(mallory) == len(streams) }, patience, time.Millisecond)
	m.tokens.ended.Store(true)
	for _, stream := range streams {
		ends(t, r, stream, codes.Unauthenticated, "the token has ended")
	}
	require.Eventually(t, func() bool { return m.streams.open(mallory) == 0 }, patience, time.Millisecond)
}

// TestCallersAreVerifiedOnce checks that the token of a call is verified once and the stream counted once, although
// both the intake and an interceptor need the caller.
func TestCallersAreVerifiedOnce(t *testing.T) {
	var who atomic.Pointer[cloud.Caller]
	h := &handlers{get: func(ctx context.Context) error { who.Store(auth.CallerOf(ctx)); <-ctx.Done(); return ctx.Err() }}
	m := newMember(t, h)
	c := vmv1.NewVmServiceClient(dial(t, m.address))
	ada := scope{"principal", "ada", MaxPrincipalStreams}
	seen := func() bool { return who.Load() != nil }

	ctx, cancelCall := context.WithCancel(metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer ada/acme/web"))
	var calls sync.WaitGroup
	calls.Go(func() { c.GetVm(ctx, &vmv1.GetVmRequest{}) })
	require.Eventually(t, seen, patience, time.Millisecond)
	require.Equal(t, cloud.UserID("ada"), who.Load().User)
	require.Equal(t, int64(1), m.tokens.forCalls.Load())
	require.Zero(t, m.streams.open(ada), "a unary call must not count as a stream")
	cancelCall()
	calls.Wait()

	who.Store(nil)
	_, err := m.watch(t.Context(), c, "ada/acme/web", &vmv1.WatchVmRequest{}).Recv()
	require.NoError(t, err)
	require.Eventually(t, seen, patience, time.Millisecond)
	require.Equal(t, cloud.UserID("ada"), who.Load().User)
	require.Equal(t, int64(2), m.tokens.forCalls.Load())
	require.Equal(t, 1, m.streams.open(ada))
}

// TestSlowReadersAreEnded opens streams whose clients do not read. Each must have at most one message in memory. When
// they use all bytes of their org, they must be ended, and the streams of clients that read must get every message in
// order.
func TestSlowReadersAreEnded(t *testing.T) {
	const bytes = 1 << 20
	h := &sender{bytes: bytes}
	m := newMember(t, h)
	slow, c := m.dial(), m.dial()
	var stuck []watch
	const n = 2 * MaxOrgUnsent / bytes
	for range n {
		stuck = append(stuck, m.watch(t.Context(), slow, "mallory/acme/web", &vmv1.WatchVmRequest{}))
	}
	full := func() bool { return m.used() >= MaxOrgUnsent }
	require.Eventually(t, full, 10*time.Second, time.Millisecond)
	require.LessOrEqual(t, h.made.Load(), int64(n), "a stream must make its next message only after the client has read the previous one")

	read := func(token string) {
		s := m.watch(t.Context(), c, token, &vmv1.WatchVmRequest{})
		for i := range 20 {
			e, err := s.Recv()
			require.NoError(t, err)
			require.Equal(t, fmt.Sprint(i), e.GetVmId())
		}
	}
	read("bob/rival/lab")
	read("ada/acme/web")
	ended := 0
	for _, s := range stuck {
		for {
			_, err := s.Recv()
			if err == nil {
				continue
			}
			require.Contains(t, []codes.Code{codes.ResourceExhausted, codes.Unavailable}, status.Code(err), "%v", err)
			if ended++; status.Code(err) == codes.ResourceExhausted {
				require.ErrorContains(t, err, "its client has read nothing")
			}
			break
		}
	}
	require.Equal(t, n, ended)
}

// TestBlockedStreamEndsWithItsToken checks that a stream that waits for its client ends when its token becomes invalid.
// Its unread bytes must count until the connection is closed.
func TestBlockedStreamEndsWithItsToken(t *testing.T) {
	h := &sender{bytes: 1 << 20}
	m := newMember(t, h)
	conn, err := grpc.NewClient(m.address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithStaticStreamWindowSize(64<<10))
	require.NoError(t, err)
	s := m.watch(t.Context(), vmv1.NewVmServiceClient(conn), "mallory/acme/web", &vmv1.WatchVmRequest{})
	require.Eventually(t, func() bool { return m.used() > 0 }, 10*time.Second, time.Millisecond)
	m.tokens.ended.Store(true)
	require.Eventually(t, func() bool { return m.streams.open(scope{"principal", "mallory", MaxPrincipalStreams}) == 0 }, 10*time.Second, time.Millisecond)
	require.Positive(t, m.used())
	require.NoError(t, conn.Close())
	require.Eventually(t, func() bool { return m.used() == 0 }, 10*time.Second, time.Millisecond)
	_, err = s.Recv()
	require.Error(t, err)
}

func (m *member) used() int64 { return m.streams.Unsent() }

// TestTokenIsVerifiedOnceForItsStreams checks that all streams of one token share each verification, and that all end
// when the token becomes invalid.
func TestTokenIsVerifiedOnceForItsStreams(t *testing.T) {
	m := newMember(t, &sender{bytes: 1})
	c := m.dial()
	const n = 100
	var streams []watch
	for range n {
		s := m.watch(t.Context(), c, "ada/acme/web", &vmv1.WatchVmRequest{VmId: "one"})
		_, err := s.Recv()
		require.NoError(t, err)
		streams = append(streams, s)
	}
	opened := m.tokens.verified.Load()
	require.GreaterOrEqual(t, opened, int64(n))
	require.Eventually(t, func() bool { return m.tokens.verified.Load() >= opened+2 }, 10*time.Second, time.Millisecond)
	require.Less(t, m.tokens.verified.Load(), opened+n)
	m.tokens.ended.Store(true)
	for _, s := range streams {
		_, err := s.Recv()
		require.Equal(t, codes.Unauthenticated, status.Code(err), "%v", err)
	}
	require.Eventually(t, func() bool { return m.streams.open(scope{"principal", "ada", MaxPrincipalStreams}) == 0 }, 10*time.Second, time.Millisecond)
}

// TestStreamEndsWithItsRole removes the roles with which streams were admitted, while the tokens stay valid. Those
// streams must end; the stream of an administrator must continue.
func TestStreamEndsWithItsRole(t *testing.T) {
	m := newMember(t, &sender{bytes: 1})
	c := m.dial()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	open := func(token string) watch {
		s := m.watch(ctx, c, token, &vmv1.WatchVmRequest{OrgId: "acme", ProjectId: "web", VmId: "one"})
		_, err := s.Recv()
		require.NoError(t, err)
		return s
	}
	ada, admin := open("ada/acme/web"), open("admin")
	before := m.tokens.verified.Load()
	require.Eventually(t, func() bool { return m.tokens.verified.Load() >= before+2 }, patience, time.Millisecond)
	require.Equal(t, 1, m.streams.open(scope{"principal", "ada", MaxPrincipalStreams}), "the stream must stay open when its token is verified again")
	m.tokens.moved.Store(true)
	_, err := ada.Recv()
	require.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
	require.Eventually(t, func() bool { return m.streams.open(scope{"principal", "ada", MaxPrincipalStreams}) == 0 }, patience, time.Millisecond)
	require.Equal(t, 1, m.streams.open(scope{"principal", "admin", MaxPrincipalStreams}))
	require.NoError(t, admin.CloseSend())
}

// TestLazyMessageFails checks that SendMsg returns the error of a Lazy and counts no bytes for it.
func TestLazyMessageFails(t *testing.T) {
	s := NewStreams()
	_, end := context.WithCancelCause(t.Context())
	f := s.newFlow(t.Context(), end)
	broken := errors.New("broken")
	require.ErrorIs(t, (&stream{ctx: t.Context(), flow: f}).SendMsg(Lazy(func() (*Encoded, error) { return nil, broken })), broken)
	require.ErrorIs(t, (&stream{ctx: t.Context()}).SendMsg(Lazy(func() (*Encoded, error) { return nil, broken })), broken)
	f.close()
	require.Empty(t, s.unsent.flows)
	require.Zero(t, s.unsent.all.used)
}

// TestPanicInLazyDoesNotBlockOtherStreams checks that the next waiting stream may send if a Lazy panics.
func TestPanicInLazyDoesNotBlockOtherStreams(t *testing.T) {
	s := NewStreams()
	ctx, end := context.WithCancelCause(t.Context())
	defer end(nil)
	full, first, second := s.newFlow(ctx, end), s.newFlow(ctx, end), s.newFlow(ctx, end)
	full.hold(MaxOrgUnsent)
	sent := make(chan error, 2)
	send := func(f *flow, make Lazy) {
		defer func() {
			if recover() != nil {
				sent <- nil
			}
		}()
		sent <- (&stream{ctx: ctx, flow: f}).SendMsg(make)
	}
	broken := errors.New("broken")
	waiting := func(n int) func() bool {
		return func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(full.gate.queue) == n
		}
	}
	go send(first, func() (*Encoded, error) { panic("broken") })
	require.Eventually(t, waiting(1), patience, time.Millisecond)
	go send(second, func() (*Encoded, error) { return nil, broken })
	require.Eventually(t, waiting(2), patience, time.Millisecond)
	full.release(1) // lets one stream build a message; the other one waits until the first has ended
	for _, want := range []error{nil, broken} {
		select {
		case err := <-sent:
			require.Equal(t, want, err)
		case <-time.After(patience):
			require.Fail(t, "the second stream still waits")
		}
	}
	require.EqualValues(t, MaxOrgUnsent-1, s.Unsent(), "no reserved bytes may be left")
}

// TestStreamsThatBuildMessagesAtOnceRespectTheLimit checks that bytes are reserved before a stream builds a message.
// Otherwise all streams that build messages at the same time could pass the check of the limit together.
func TestStreamsThatBuildMessagesAtOnceRespectTheLimit(t *testing.T) {
	const most = MaxOrgUnsent / reservation
	s := NewStreams()
	ctx, end := context.WithCancelCause(t.Context())
	building, finish := make(chan struct{}, 2*most), make(chan struct{})
	sent := make(chan error, 2*most)
	broken := errors.New("broken")
	org := s.newFlow(ctx, end).gate
	for range 2 * most {
		f := s.newFlow(ctx, end)
		go func() {
			sent <- (&stream{ctx: ctx, flow: f}).SendMsg(Lazy(func() (*Encoded, error) {
				building <- struct{}{}
				<-finish
				return nil, broken
			}))
		}()
	}
	for range most {
		<-building
	}
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(org.queue) == most
	}, patience, time.Millisecond)
	require.Empty(t, building)
	require.EqualValues(t, MaxOrgUnsent, s.Unsent())

	end(nil) // the waiting streams give up
	for range most {
		require.ErrorIs(t, <-sent, context.Canceled)
	}
	close(finish)
	for range most {
		require.ErrorIs(t, <-sent, broken)
	}
	require.Zero(t, s.Unsent(), "no reserved bytes may be left")
}
