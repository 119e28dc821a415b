package etcdrpc_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/edge/split"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// countingVerifier counts how often tokens of calls are verified. It does not count the later checks of the tokens of
// open streams.
type countingVerifier struct{ calls atomic.Int64 }

func (v *countingVerifier) Verify(ctx context.Context, token string) (*cloud.Caller, error) {
	if _, call := metadata.FromIncomingContext(ctx); call {
		v.calls.Add(1)
	}
	return testVerifier{}.Verify(ctx, token)
}

// serveWithIntake serves s on loopback behind an Intake and returns a client connection to it.
func serveWithIntake(t *testing.T, s *etcdrpc.Server) *grpc.ClientConn {
	t.Helper()
	in := rpc.NewIntake(100, s.Intake(1<<20))
	g := rpc.NewServer(in, append(in.Settings(split.Credentials()), grpc.UnaryInterceptor(s.Unary), grpc.StreamInterceptor(s.Stream))...)
	s.Register(g)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() { defer close(done); g.Serve(l) }()
	t.Cleanup(func() { g.Stop(); <-done })
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// TestCallIsAuthorizedOnce checks that intake and interceptor share one authorization: the token of a call is verified
// once.
func TestCallIsAuthorizedOnce(t *testing.T) {
	w, v := newWorld(t), &countingVerifier{}
	conn := serveWithIntake(t, etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: v, Dir: t.TempDir()}))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	roles := pb.NewAuthClient(conn)
	for n, c := range []struct {
		token string
		want  codes.Code
	}{{"operator", codes.OK}, {"forged", codes.Unauthenticated}, {"tenant", codes.PermissionDenied}} {
		v.calls.Store(0)
		_, err := roles.RoleAdd(metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+c.token), &pb.AuthRoleAddRequest{Name: "r"})
		require.Equal(t, c.want, status.Code(err), "call %d: %v", n, err)
		require.Equal(t, int64(1), v.calls.Load(), "call %d", n)
	}
	v.calls.Store(0)
	stream, err := pb.NewMaintenanceClient(conn).Snapshot(metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer operator"), &pb.SnapshotRequest{})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	require.Equal(t, int64(1), v.calls.Load())
}

// TestAuthorizationIsForOneMethod checks that the authorization for one method, or of one server, is not reused for
// another.
func TestAuthorizationIsForOneMethod(t *testing.T) {
	w := newWorld(t)
	open := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: testVerifier{}, Open: true})
	closed := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: testVerifier{}})
	at := &net.TCPAddr{IP: net.ParseIP(remoteIP), Port: 1}
	ctx := metadata.NewIncomingContext(peer.NewContext(t.Context(), &peer.Peer{Addr: at, LocalAddr: at}), metadata.MD{})
	ctx, _, err := open.Admit(ctx, pb.KV_Range_FullMethodName)
	require.NoError(t, err)
	_, _, err = open.Admit(ctx, pb.Cluster_MemberAdd_FullMethodName)
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, err)
	_, _, err = closed.Admit(ctx, pb.KV_Range_FullMethodName)
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, err)
}

// TestIntakeDistinguishesAuthenticatedCallers checks that the intake marks callers on loopback or with a credential as
// Proven. All others share one memory budget.
func TestIntakeDistinguishesAuthenticatedCallers(t *testing.T) {
	w := newWorld(t)
	s := etcdrpc.New(etcdrpc.Options{Service: w.service, Verifier: testVerifier{}, Open: true})
	admit := s.Intake(1000)
	check := func(method, from string, proven bool, header ...string) {
		t.Helper()
		at := &net.TCPAddr{IP: net.ParseIP(from), Port: 1}
		ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: at, LocalAddr: at})
		_, a, err := admit(metadata.NewIncomingContext(ctx, metadata.Pairs(header...)), method)
		require.NoError(t, err)
		require.Equal(t, rpc.Admission{Foreign: true, Proven: proven, Limit: 1000}, a)
	}
	check(pb.KV_Put_FullMethodName, remoteIP, false)
	check(pb.KV_Put_FullMethodName, remoteIP, false, "token", "kv1.forged")
	check(pb.KV_Put_FullMethodName, remoteIP, false, "authorization", "Bearer tenant")
	check(pb.KV_Put_FullMethodName, remoteIP, true, "authorization", "Bearer operator")
	check(pb.KV_Put_FullMethodName, loopbackIP, true)
	check(pb.Cluster_MemberAdd_FullMethodName, remoteIP, true, "authorization", "Bearer operator")
	enableAuth(t, w.client(t))
	check(pb.KV_Put_FullMethodName, remoteIP, false, "token", w.token(t, "u", "word"))
	check(pb.KV_Put_FullMethodName, remoteIP, true, "authorization", "Bearer operator")
	check(pb.KV_Put_FullMethodName, loopbackIP, true)
	check(pb.Cluster_MemberAdd_FullMethodName, remoteIP, true, "token", w.token(t, "root", "secret"))
}
