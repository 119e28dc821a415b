package etcdrpc_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
)

// withClockAhead returns an option that sets the service's clock ahead by a duration in nanoseconds, which the test may
// change.
func withClockAhead(ahead *atomic.Int64) func(*settings) {
	return func(s *settings) {
		s.kv.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	}
}

func (w *world) token(t *testing.T, user, password string) string {
	t.Helper()
	r, err := w.service.Authenticate(t.Context(), &pb.AuthenticateRequest{Name: user, Password: password})
	require.NoError(t, err)
	return r.Token
}

// TestStreamOutlivesToken checks that requests on a stream are served after the stream's token has expired, until the
// token is revoked. etcd's client gets a new token for each stream, but not for requests on an open one.
func TestStreamOutlivesToken(t *testing.T) {
	var ahead atomic.Int64
	w := newWorld(t, withClockAhead(&ahead))
	c := w.client(t)
	lease, err := c.Grant(t.Context(), 1000)
	require.NoError(t, err)
	enableAuth(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	token := w.token(t, "u", "word")
	ctx = metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, token)
	watching, err := pb.NewWatchClient(c.ActiveConnection()).Watch(ctx)
	require.NoError(t, err)
	watch := func(key string) string {
		require.NoError(t, watching.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{
			CreateRequest: &pb.WatchCreateRequest{Key: []byte(key)},
		}}))
		r, err := watching.Recv()
		require.NoError(t, err)
		require.True(t, r.Created)
		require.Equal(t, r.Canceled, r.CancelReason != "")
		return r.CancelReason
	}
	renewing, err := pb.NewLeaseClient(c.ActiveConnection()).LeaseKeepAlive(ctx)
	require.NoError(t, err)
	renew := func() error {
		require.NoError(t, renewing.Send(&pb.LeaseKeepAliveRequest{ID: int64(lease.ID)}))
		_, err := renewing.Recv()
		return rpctypes.Error(err)
	}
	require.Empty(t, watch("/u/a"))
	require.NoError(t, renew())
	ahead.Add(int64(1000 * time.Hour))
	newCall := metadata.NewIncomingContext(t.Context(), metadata.Pairs(rpctypes.TokenFieldNameGRPC, token))
	_, err = w.service.Range(newCall, &pb.RangeRequest{Key: []byte("/u/a")})
	require.Equal(t, rpctypes.ErrGRPCInvalidAuthToken, err, "the token has expired for new calls")
	require.Empty(t, watch("/u/b"))
	require.Contains(t, watch("/other"), "permission denied")
	require.NoError(t, renew())

	root := w.client(t, func(c *clientv3.Config) { c.Username, c.Password = "root", "secret" })
	_, err = root.UserChangePassword(t.Context(), "u", "another")
	require.NoError(t, err)
	require.Contains(t, watch("/u/c"), "invalid auth token")
	require.Equal(t, rpctypes.ErrInvalidAuthToken, renew())
}

// TestExpiredTokenOfRootIsInvalid checks that a call with an expired token fails with ErrGRPCInvalidAuthToken, after
// which clients get a new token, and not with ErrGRPCPermissionDenied.
func TestExpiredTokenOfRootIsInvalid(t *testing.T) {
	var ahead atomic.Int64
	w := newWorld(t, withClockAhead(&ahead))
	enableAuth(t, w.client(t))
	s := etcdrpc.New(etcdrpc.Options{Service: w.service})
	root, user := w.token(t, "root", "secret"), w.token(t, "u", "word")
	for _, method := range []string{pb.Auth_UserList_FullMethodName, pb.Maintenance_Status_FullMethodName} {
		require.NoError(t, call(s, method, remoteIP, "token", root))
		require.Equal(t, rpctypes.ErrGRPCPermissionDenied, call(s, method, remoteIP, "token", user))
		require.Equal(t, rpctypes.ErrGRPCPermissionDenied, call(s, method, remoteIP))
	}
	ahead.Add(int64(1000 * time.Hour))
	for _, method := range []string{pb.Auth_UserList_FullMethodName, pb.Maintenance_Status_FullMethodName} {
		require.Equal(t, rpctypes.ErrGRPCInvalidAuthToken, call(s, method, remoteIP, "token", root))
		require.Equal(t, rpctypes.ErrGRPCPermissionDenied, call(s, method, remoteIP))
	}
}

// memberLister is a Members with one member that implements only List.
type memberLister struct{ etcdrpc.Members }

func (memberLister) List(context.Context, bool) ([]membership.Member, error) {
	return []membership.Member{{ID: 1, Name: "node-1", State: membership.Voting}}, nil
}

func TestMemberListNeedsUser(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, func(s *settings) { s.rpc.Members = memberLister{} })
	anonymous := w.client(t)
	all, err := anonymous.MemberList(ctx)
	require.NoError(t, err)
	require.Len(t, all.Members, 1)
	enableAuth(t, anonymous)
	_, err = anonymous.MemberList(ctx)
	require.Equal(t, rpctypes.ErrUserEmpty, err)
	_, err = w.client(t, func(c *clientv3.Config) { c.Username, c.Password = "u", "word" }).MemberList(ctx)
	require.NoError(t, err)
}

func TestLargestValueWithEtcdClient(t *testing.T) {
	ctx := t.Context()
	c := newWorld(t).client(t)
	_, err := c.Put(ctx, "a", strings.Repeat("x", kv.DefaultRequestBytes))
	require.NoError(t, err)
	_, err = c.Put(ctx, "a", strings.Repeat("x", kv.DefaultRequestBytes+1))
	require.Equal(t, rpctypes.ErrRequestTooLarge, err)
	got, err := c.Get(ctx, "a")
	require.NoError(t, err)
	require.Len(t, got.Kvs[0].Value, kv.DefaultRequestBytes)
}
