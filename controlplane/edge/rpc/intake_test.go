package rpc

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
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
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc/rpctest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// tokenIssuer implements IssueToken and counts its calls in asked.
type tokenIssuer struct {
	identityv1.UnimplementedIdentityServiceServer
	asked atomic.Int64
}

func (s *tokenIssuer) IssueToken(context.Context, *identityv1.IssueTokenRequest) (*identityv1.IssueTokenResponse, error) {
	s.asked.Add(1)
	return &identityv1.IssueTokenResponse{}, nil
}

// listen starts a server on a TCP port, so that its calls have client addresses. receive replaces ReceiveTime.
func listen(t *testing.T, h *handlers, receive time.Duration) (address string, s *Server, issued *tokenIssuer) {
	t.Helper()
	s, health := New(Options{Verifier: newVerifier(), Log: slog.New(slog.DiscardHandler), Metrics: grpcprom.NewServerMetrics(), Public: true})
	s.intake.time = receive
	issued = &tokenIssuer{}
	vmv1.RegisterVmServiceServer(s, h)
	vmv1.RegisterImageServiceServer(s, h)
	identityv1.RegisterIdentityServiceServer(s, issued)
	health.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() { s.Serve(l) })
	t.Cleanup(func() { s.Stop(); serving.Wait() })
	return l.Addr().String(), s, issued
}

func dial(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

func connect(t *testing.T, address string) *rpctest.Raw {
	t.Helper()
	r, err := rpctest.Dial(address, nil)
	require.NoError(t, err)
	t.Cleanup(func() { r.Close() })
	return r
}

// ends checks that a call ends with the code want and a message that contains says. It waits long for the end, for up
// to patience.
func ends(t *testing.T, r *rpctest.Raw, stream uint32, want codes.Code, says string) {
	t.Helper()
	code, message, err := r.Status(stream, patience)
	require.NoError(t, err)
	require.Equal(t, strconv.Itoa(int(want)), code, message)
	require.Contains(t, message, says)
}

const (
	patience   = 30 * time.Second
	issue      = "/identity.v1.IdentityService/IssueToken"
	getVM      = "/vmcontroller.v1.VmService/GetVm"
	watchVM    = "/vmcontroller.v1.VmService/WatchVm"
	reflecting = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
)

func healthy(t *testing.T, conn *grpc.ClientConn) {
	t.Helper()
	_, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
}

// TestUnfinishedMessages sends calls without the last byte of their message. The client must be able to send only the
// first flow-control window of each, and must get the expected error.
func TestUnfinishedMessages(t *testing.T) {
	address, _, _ := listen(t, &handlers{get: func(context.Context) error { return nil }}, time.Hour)
	honest, r := dial(t, address), connect(t, address)
	for name, c := range map[string]struct {
		method string
		length int
		code   codes.Code
		says   string
		header []string
	}{
		"a call without a token":         {getVM, 16 << 20, codes.Unauthenticated, "no token", nil},
		"a stream without a token":       {watchVM, 16 << 20, codes.Unauthenticated, "no token", nil},
		"a bad token":                    {getVM, 16 << 20, codes.Unauthenticated, "not valid", []string{"authorization", "Bearer bad"}},
		"an image part without a token":  {uploadPart, 16 << 20, codes.Unauthenticated, "no token", nil},
		"an open method":                 {issue, 16 << 20, codes.InvalidArgument, "65535", nil},
		"the health service":             {"/grpc.health.v1.Health/Check", 1 << 20, codes.InvalidArgument, "65535", nil},
		"the reflection service":         {reflecting, 1 << 20, codes.InvalidArgument, "65535", nil},
		"a call with a token":            {getVM, MaxPlain + 1, codes.InvalidArgument, "1572864", []string{"authorization", "Bearer good"}},
		"an image part that is too long": {uploadPart, 1<<32 - 1, codes.ResourceExhausted, "larger than max", []string{"authorization", "Bearer good"}},
	} {
		t.Run(name, func(t *testing.T) {
			stream, err := r.Call(c.method, c.header...)
			require.NoError(t, err)
			sent, err := r.Stall(stream, c.length, patience)
			require.NoError(t, err)
			require.LessOrEqual(t, sent, rpctest.Window)
			ends(t, r, stream, c.code, c.says)
			healthy(t, honest)
		})
	}
}

// TestRefusedByHeaders checks that calls without a valid token, and calls with too long headers, are refused before
// their message is sent.
func TestRefusedByHeaders(t *testing.T) {
	address, _, issued := listen(t, &handlers{}, time.Hour)
	r := connect(t, address)
	for _, method := range []string{getVM, watchVM, uploadPart} {
		stream, err := r.Call(method)
		require.NoError(t, err)
		ends(t, r, stream, codes.Unauthenticated, "no token")
	}
	stream, err := r.Call(issue, "x", strings.Repeat("x", MaxHeaders))
	require.NoError(t, err)
	code, _, err := r.Status(stream, patience)
	require.NoError(t, err)
	require.Equal(t, "reset", code, "a call with headers that are too long must be reset")
	require.Zero(t, issued.asked.Load())
}

// TestLateMessages checks that a call ends with an error if its message does not arrive in time, but that a stream may
// be idle between two messages.
func TestLateMessages(t *testing.T) {
	address, s, issued := listen(t, &handlers{get: func(context.Context) error { return nil }}, 300*time.Millisecond)
	honest, r := dial(t, address), connect(t, address)
	info, err := reflectionv1.NewServerReflectionClient(honest).ServerReflectionInfo(t.Context())
	require.NoError(t, err)
	good := []string{"authorization", "Bearer good"}
	for name, send := range map[string]func(t *testing.T) uint32{
		"nothing but headers": func(t *testing.T) uint32 { return begin(t, r, issue, nil) },
		"half of a message":   func(t *testing.T) uint32 { return begin(t, r, issue, rpctest.Message(make([]byte, 100))[:50]) },
		"a message without the end of the stream": func(t *testing.T) uint32 {
			return begin(t, r, getVM, rpctest.Message(nil), good...)
		},
		"half of a large message": func(t *testing.T) uint32 {
			stream := begin(t, r, getVM, nil, good...)
			sent, err := r.Stall(stream, 1<<20, patience)
			require.NoError(t, err)
			require.Equal(t, 1<<20+4, sent, "the window must let an authenticated caller send a message of 1 MiB")
			return stream
		},
		"half of a stream's message": func(t *testing.T) uint32 {
			return begin(t, r, reflecting, rpctest.Message(make([]byte, 100))[:50])
		},
	} {
		t.Run(name, func(t *testing.T) { ends(t, r, send(t), codes.DeadlineExceeded, "did not arrive within") })
	}
	require.Zero(t, issued.asked.Load())
	require.NoError(t, info.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}))
	_, err = info.Recv()
	require.NoError(t, err, "a stream may be idle between two messages")
	require.NoError(t, info.CloseSend())
	for _, b := range []*budget{s.intake.unproven, s.intake.proven} {
		require.Eventually(t, func() bool { return b.idle() }, patience, time.Millisecond, "nothing may be counted after the calls have ended")
	}
}

// idle reports whether no calls, bytes or waiting messages are counted.
func (b *budget) idle() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all == use{} && len(b.of) == 0 && len(b.queue) == 0
}

// begin starts a call with the given headers, sends data if there is any, and leaves the call unfinished. It returns
// the stream ID.
func begin(t *testing.T, r *rpctest.Raw, method string, data []byte, headers ...string) uint32 {
	t.Helper()
	stream, err := r.Call(method, headers...)
	require.NoError(t, err)
	if len(data) > 0 {
		require.NoError(t, r.Data(stream, false, data, nil))
	}
	return stream
}

// TestUnfinishedCallsOfAnAddress checks that the limit of unfinished calls of one address applies to all of its
// connections together, and that further calls are served when these calls have ended.
func TestUnfinishedCallsOfAnAddress(t *testing.T) {
	address, s, issued := listen(t, &handlers{}, time.Hour)
	var all []*rpctest.Raw
	for n := range maxUnprovenOf {
		if n%(MaxStreams/2) == 0 {
			all = append(all, connect(t, address))
		}
		begin(t, all[len(all)-1], issue, rpctest.Message([]byte("x"))[:5])
	}
	require.Eventually(t, func() bool {
		s.intake.unproven.mu.Lock()
		defer s.intake.unproven.mu.Unlock()
		return s.intake.unproven.all.calls == maxUnprovenOf
	}, patience, time.Millisecond)
	ends(t, all[0], begin(t, all[0], issue, rpctest.Message([]byte("x"))[:5]), codes.ResourceExhausted, "512 unfinished calls from one address")
	for _, r := range all {
		require.NoError(t, r.Close())
	}
	require.Eventually(t, s.intake.unproven.idle, patience, time.Millisecond)
	before := issued.asked.Load()
	_, err := identityv1.NewIdentityServiceClient(dial(t, address)).IssueToken(t.Context(), &identityv1.IssueTokenRequest{})
	require.NoError(t, err)
	require.Equal(t, before+1, issued.asked.Load())
}

// TestUnauthenticatedTokensHaveTheLimitsOfNone checks that calls with an unauthenticated token, which every
// caller can get, have the same limits as calls without a token.
func TestUnauthenticatedTokensHaveTheLimitsOfNone(t *testing.T) {
	address, s, _ := listen(t, &handlers{get: func(context.Context) error { return nil }}, time.Hour)
	r := connect(t, address)
	authorization := []string{"authorization", "Bearer unproven"}
	for _, method := range []string{getVM, uploadPart, watchVM} {
		stream := begin(t, r, method, nil, authorization...)
		_, err := r.Stall(stream, MaxPlain, patience)
		require.NoError(t, err)
		ends(t, r, stream, codes.InvalidArgument, "larger than 65535 bytes")
	}
	begin(t, r, getVM, rpctest.Message([]byte("x"))[:5], authorization...)
	require.Eventually(t, func() bool {
		s.intake.unproven.mu.Lock()
		defer s.intake.unproven.mu.Unlock()
		return s.intake.unproven.all.calls == 1
	}, patience, time.Millisecond)
	require.True(t, s.intake.proven.idle())
	require.NoError(t, r.Close())
	require.Eventually(t, s.intake.unproven.idle, patience, time.Millisecond)
}

// TestUnauthenticatedCallsDoNotBlockAuthenticatedOnes checks that callers with a credential are served while
// unauthenticated callers have as many unfinished calls as they may.
func TestUnauthenticatedCallsDoNotBlockAuthenticatedOnes(t *testing.T) {
	address, s, _ := listen(t, &handlers{get: func(context.Context) error { return nil }}, time.Hour)
	s.intake.unproven.mu.Lock()
	s.intake.unproven.calls = 1
	s.intake.unproven.mu.Unlock()
	anonymous, tenant := connect(t, address), connect(t, address)
	begin(t, anonymous, issue, rpctest.Message([]byte("x"))[:5])
	require.Eventually(t, func() bool {
		s.intake.unproven.mu.Lock()
		defer s.intake.unproven.mu.Unlock()
		return s.intake.unproven.all.calls == 1
	}, patience, time.Millisecond)
	ends(t, anonymous, begin(t, anonymous, issue, rpctest.Message([]byte("x"))[:5]), codes.ResourceExhausted, "1 unfinished calls")
	call := begin(t, tenant, getVM, nil, "authorization", "Bearer good")
	require.Eventually(t, func() bool { return !s.intake.proven.idle() }, patience, time.Millisecond)
	require.NoError(t, tenant.Data(call, true, rpctest.Message(nil), nil))
	ends(t, tenant, call, codes.OK, "")
}

// TestLargeMessagesOfAHolder checks that a second unfinished large message of one holder is refused, even though the
// limit of the address is not reached.
func TestLargeMessagesOfAHolder(t *testing.T) {
	address, _, _ := listen(t, &handlers{}, time.Hour)
	one, two := connect(t, address), connect(t, address)
	first := begin(t, one, uploadPart, nil, "authorization", "Bearer good")
	_, err := one.Stall(first, MaxMessage, patience)
	require.NoError(t, err)
	second := begin(t, two, uploadPart, nil, "authorization", "Bearer good")
	_, err = two.Stall(second, small+1, patience)
	require.NoError(t, err)
	ends(t, two, second, codes.ResourceExhausted, "from one org, user or host")
}

// TestUnauthenticatedPassthroughCalls makes calls to methods of another protocol. Those of unauthenticated callers must
// count in the budget of all such callers, where one address has a limit. Those of other callers must count in a budget
// without a limit per address.
func TestUnauthenticatedPassthroughCalls(t *testing.T) {
	i := NewIntake(1, nil)
	from := netip.MustParseAddr("192.0.2.1")
	anonymous := &receiver{intake: i, from: from, Admission: Admission{Foreign: true}}
	known := &receiver{intake: i, from: from, Admission: Admission{Foreign: true, Proven: true}}
	for range maxUnprovenOf {
		_, err := anonymous.budget().enter(from, "")
		require.NoError(t, err)
	}
	_, err := anonymous.budget().enter(from, "")
	require.ErrorContains(t, err, "512 unfinished calls from one address")
	_, err = anonymous.budget().reserve(t.Context(), from, "", maxLarge/4)
	require.NoError(t, err)
	_, err = anonymous.budget().reserve(t.Context(), from, "", 1)
	require.ErrorContains(t, err, "16777216 bytes of unfinished messages from one address")
	other := netip.MustParseAddr("192.0.2.2")
	_, err = anonymous.budget().enter(other, "")
	require.NoError(t, err)
	_, err = anonymous.budget().reserve(t.Context(), other, "", maxLarge/4)
	require.NoError(t, err)

	for range maxProven {
		_, err := known.budget().enter(from, "")
		require.NoError(t, err)
	}
	_, err = known.budget().reserve(t.Context(), from, "", maxLarge)
	require.NoError(t, err)
}

// TestSharesOfAHolder checks that one org can use at most a quarter of the unfinished calls and bytes, from however
// many addresses it calls.
func TestSharesOfAHolder(t *testing.T) {
	b := newBudget(maxProven, maxProvenOf, maxLargeOf)
	from := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}) }
	evil := &cloud.Caller{User: "mallory", Proof: cloud.ProofPassword, Scope: cloud.Tenant{Org: "evil", Project: "p"}}
	mo := &cloud.Caller{User: "mo", Proof: cloud.ProofPassword, Defaults: cloud.Defaults{Org: "evil"}}
	require.Equal(t, holderOf(evil), holderOf(mo))
	var leave []func()
	for n := range maxProvenBy {
		done, err := b.enter(from(n), holderOf(evil))
		require.NoError(t, err)
		leave = append(leave, done)
	}
	_, err := b.enter(from(maxProvenBy), holderOf(mo))
	require.ErrorContains(t, err, "512 unfinished calls from one org, user or host")
	done, err := b.enter(from(maxProvenBy), "org acme")
	require.NoError(t, err)
	leave = append(leave, done)
	done, err = b.reserve(t.Context(), from(1), holderOf(evil), MaxMessage)
	require.NoError(t, err)
	leave = append(leave, done)
	_, err = b.reserve(t.Context(), from(2), holderOf(mo), 1)
	require.ErrorContains(t, err, "16777216 bytes of unfinished messages from one org, user or host")
	done, err = b.reserve(t.Context(), from(2), "org acme", MaxMessage)
	require.NoError(t, err)
	leave = append(leave, done)
	for _, l := range leave {
		l()
	}
	require.True(t, b.idle())
}

// TestFrames checks that calls succeed however the client splits a message into frames and pads them.
func TestFrames(t *testing.T) {
	address, s, _ := listen(t, &handlers{get: func(context.Context) error { return nil }}, time.Hour)
	body, err := proto.Marshal(&vmv1.GetVmRequest{VmId: strings.Repeat("v", 300)})
	require.NoError(t, err)
	message := rpctest.Message(body)
	for name, c := range map[string]struct {
		size, pad int
		apart     bool
	}{
		"in one frame": {size: len(message)}, "padded": {size: len(message), pad: 255}, "each byte in a frame": {size: 1},
		"each byte padded": {size: 1, pad: 7}, "the end in a separate frame": {size: 100, apart: true}, "frames of 3 bytes, which split the prefix": {size: 3},
	} {
		t.Run(name, func(t *testing.T) {
			r := connect(t, address)
			for range 3 {
				stream := begin(t, r, getVM, nil, "authorization", "Bearer good")
				for rest := message; len(rest) > 0; {
					n := min(len(rest), c.size)
					var pad []byte
					if c.pad > 0 {
						pad = make([]byte, c.pad)
					}
					require.NoError(t, r.Data(stream, n == len(rest) && !c.apart, rest[:n], pad))
					rest = rest[n:]
				}
				if c.apart {
					require.NoError(t, r.Data(stream, true, nil, nil))
				}
				ends(t, r, stream, codes.OK, "")
			}
		})
	}
	require.True(t, s.intake.proven.idle())
}

// TestMeterRemovesEndedCalls checks that a meter removes a call when it has ended, in whatever way, and that the intake
// removes a meter when its connection is closed.
func TestMeterRemovesEndedCalls(t *testing.T) {
	address, s, _ := listen(t, &handlers{get: func(context.Context) error { return nil }}, time.Hour)
	r := connect(t, address)
	for range 2 * MaxStreams {
		ends(t, r, begin(t, r, "/no.such/Method", nil), codes.Unimplemented, "")
		ends(t, r, begin(t, r, getVM, nil), codes.Unauthenticated, "")
	}
	calls := func() (n int) {
		s.intake.meters.Range(func(_, v any) bool {
			m := v.(*meter)
			m.mu.Lock()
			defer m.mu.Unlock()
			n += len(m.calls) + 1
			return true
		})
		return n
	}
	require.Eventually(t, func() bool { return calls() == 1 }, patience, time.Millisecond)
	require.NoError(t, r.Close())
	require.Eventually(t, func() bool { return calls() == 0 }, patience, time.Millisecond)
}

// TestConnectionsOfAnAddress checks that the number of connections of one address is limited, and that another is
// accepted after one was closed.
func TestConnectionsOfAnAddress(t *testing.T) {
	address, s, _ := listen(t, &handlers{}, time.Hour)
	s.intake.conns.mu.Lock()
	s.intake.conns.callsOf = 2
	s.intake.conns.mu.Unlock()
	one, two := connect(t, address), connect(t, address)
	ends(t, one, begin(t, one, getVM, nil), codes.Unauthenticated, "")
	ends(t, two, begin(t, two, getVM, nil), codes.Unauthenticated, "")
	third, err := rpctest.Dial(address, nil)
	if err == nil {
		defer third.Close()
		_, _, err = third.Status(1, patience)
	}
	require.Error(t, err)
	require.NoError(t, one.Close())
	require.Eventually(t, func() bool {
		s.intake.conns.mu.Lock()
		defer s.intake.conns.mu.Unlock()
		return s.intake.conns.all.calls == 1
	}, patience, time.Millisecond)
	fourth := connect(t, address)
	ends(t, fourth, begin(t, fourth, getVM, nil), codes.Unauthenticated, "")
}

func TestBudget(t *testing.T) {
	b := newBudget(3, 2, 100)
	b.all.bytes = maxLarge - 150
	one, two, three := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")
	var leave []func()
	for n, c := range []struct {
		from netip.Addr
		says string
	}{{one, ""}, {one, ""}, {one, "2 unfinished calls from one address"}, {two, ""}, {three, "3 unfinished calls"}} {
		done, err := b.enter(c.from, "")
		if c.says != "" {
			require.ErrorContains(t, err, c.says, n)
			require.Equal(t, codes.ResourceExhausted, status.Code(err))
			continue
		}
		require.NoError(t, err)
		leave = append(leave, done)
	}
	done, err := b.reserve(t.Context(), one, "", 100)
	require.NoError(t, err)
	leave = append(leave, done)
	_, err = b.reserve(t.Context(), one, "", 1)
	require.ErrorContains(t, err, "from one address")
	late, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err = b.reserve(late, two, "", 60)
	require.ErrorContains(t, err, "bytes of unfinished messages")
	for _, l := range leave {
		l()
	}
	b.all.bytes -= maxLarge - 150
	require.True(t, b.idle())
}

// TestNetworks checks that limits per address count an IPv6 network of 64 bits as one address, because a host usually
// has such a network.
func TestNetworks(t *testing.T) {
	for address, want := range map[string]string{
		"10.0.0.1": "10.0.0.1", "::ffff:10.0.0.1": "10.0.0.1", "2001:db8:1:2:3:4:5:6": "2001:db8:1:2::", "fe80::1%eth0": "fe80::",
	} {
		require.Equal(t, want, NetworkOf(net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(address), 1))).String())
	}
}
