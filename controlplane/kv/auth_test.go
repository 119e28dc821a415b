package kv

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/kv/users"
)

// TestAuthAdministration enables Auth and checks that the service then requires a user with permission for each
// request, until Auth is disabled. The rules of permissions are tested in package users.
func TestAuthAdministration(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	_, err := w.AuthEnable(ctx, &pb.AuthEnableRequest{})
	require.Equal(t, rpctypes.ErrGRPCRootUserNotExist, err)
	_, err = w.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "root", Password: "p"})
	require.NoError(t, err)
	_, err = w.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "root", Password: "p"})
	require.Equal(t, rpctypes.ErrGRPCUserAlreadyExist, err)
	_, err = w.RoleAdd(ctx, &pb.AuthRoleAddRequest{Name: "root"})
	require.NoError(t, err)
	_, err = w.UserGrantRole(ctx, &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
	require.NoError(t, err)
	_, err = w.Authenticate(ctx, &pb.AuthenticateRequest{Name: "root", Password: "p"})
	require.Equal(t, rpctypes.ErrGRPCAuthNotEnabled, err)
	_, err = w.AuthEnable(ctx, &pb.AuthEnableRequest{})
	require.NoError(t, err)
	require.True(t, w.AuthEnabled())

	_, err = w.Put(ctx, &pb.PutRequest{Key: []byte("a")})
	require.Equal(t, rpctypes.ErrGRPCUserEmpty, err)
	_, err = w.Put(As(ctx, "rest"), &pb.PutRequest{Key: []byte("a")})
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, err)
	_, err = w.Put(As(ctx, users.Root), &pb.PutRequest{Key: []byte("a")})
	require.NoError(t, err)
	_, err = w.Status(ctx, &pb.StatusRequest{})
	require.Equal(t, rpctypes.ErrGRPCUserEmpty, err)
	_, err = w.Compact(As(ctx, "rest"), &pb.CompactionRequest{Revision: 1})
	require.Equal(t, rpctypes.ErrGRPCUserNotFound, err)
	state, err := w.AuthStatus(ctx, &pb.AuthStatusRequest{})
	require.NoError(t, err)
	require.True(t, state.Enabled)
	_, err = w.AuthDisable(As(ctx, users.Root), &pb.AuthDisableRequest{})
	require.NoError(t, err)
	require.False(t, w.AuthEnabled())
}

// TestLeasePermissions checks that revoking or renewing a lease, and reading its keys, requires permission on all its
// keys.
func TestLeasePermissions(t *testing.T) {
	ctx := t.Context()
	root := As(ctx, users.Root)
	w := newWorld(t)
	w.run(t)
	w.waitForLessor(t, 2)
	for _, f := range []func() error{
		func() error {
			_, err := w.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "root", Password: "p"})
			return err
		},
		func() error {
			_, err := w.UserGrantRole(ctx, &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
			return err
		},
		func() error { _, err := w.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "u", Password: "p"}); return err },
		func() error { _, err := w.AuthEnable(ctx, &pb.AuthEnableRequest{}); return err },
		func() error { _, err := w.LeaseGrant(root, &pb.LeaseGrantRequest{ID: 7, TTL: 60}); return err },
		func() error { _, err := w.Put(root, &pb.PutRequest{Key: []byte("a"), Lease: 7}); return err },
	} {
		require.NoError(t, f())
	}
	u := As(ctx, "u")
	_, err := w.LeaseRevoke(u, &pb.LeaseRevokeRequest{ID: 7})
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, err)
	_, err = w.LeaseKeepAlive(u, &pb.LeaseKeepAliveRequest{ID: 7})
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, err)
	_, err = w.LeaseTimeToLive(u, &pb.LeaseTimeToLiveRequest{ID: 7, Keys: true})
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, err)
	ttl, err := w.LeaseTimeToLive(u, &pb.LeaseTimeToLiveRequest{ID: 7})
	require.NoError(t, err, "the TTL needs no permission on the keys")
	require.EqualValues(t, 60, ttl.GrantedTTL)
	_, err = w.LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: 7})
	require.Equal(t, rpctypes.ErrGRPCUserEmpty, err)
	_, err = w.LeaseGrant(u, &pb.LeaseGrantRequest{ID: 8, TTL: 60})
	require.NoError(t, err)
	// The revocation must also be refused because of a key that was attached through another member and that this
	// member has not applied yet.
	w.raft.BeforeNextReadIndex(func() {
		_, err := w.Put(root, &pb.PutRequest{Key: []byte("b"), Lease: 8})
		require.NoError(t, err)
	})
	_, err = w.LeaseRevoke(u, &pb.LeaseRevokeRequest{ID: 8})
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, err)
	_, err = w.LeaseRevoke(root, &pb.LeaseRevokeRequest{ID: 8})
	require.NoError(t, err)
	_, err = w.LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: 9, TTL: 60})
	require.Equal(t, rpctypes.ErrGRPCUserEmpty, err)
}

// enableAuthWithUsers creates the users root and u, where u may read and write only the key "own", and enables Auth.
func (w *world) enableAuthWithUsers(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	for _, f := range []func() error{
		func() error {
			_, err := w.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "root", Password: "p"})
			return err
		},
		func() error {
			_, err := w.UserGrantRole(ctx, &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
			return err
		},
		func() error { _, err := w.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "u", Password: "p"}); return err },
		func() error { _, err := w.RoleAdd(ctx, &pb.AuthRoleAddRequest{Name: "own"}); return err },
		func() error {
			_, err := w.RoleGrantPermission(ctx, &pb.AuthRoleGrantPermissionRequest{
				Name: "own", Perm: &authpb.Permission{PermType: authpb.Permission_READWRITE, Key: []byte("own")},
			})
			return err
		},
		func() error {
			_, err := w.UserGrantRole(ctx, &pb.AuthUserGrantRoleRequest{User: "u", Role: "own"})
			return err
		},
		func() error { _, err := w.AuthEnable(ctx, &pb.AuthEnableRequest{}); return err },
	} {
		require.NoError(t, f())
	}
}

// TestPermissionRevokedDuringWrite checks that a put is refused if the user's role is revoked between the permission
// check of the put and its commit.
func TestPermissionRevokedDuringWrite(t *testing.T) {
	ctx := t.Context()
	root, u := As(ctx, users.Root), As(ctx, "u")
	w := newWorld(t)
	w.enableAuthWithUsers(t)
	put := func(value string) error {
		_, err := w.Put(u, &pb.PutRequest{Key: []byte("own"), Value: []byte(value)})
		return err
	}
	require.NoError(t, put("before"))
	w.raft.BeforeNextPropose(func() {
		_, err := w.UserRevokeRole(root, &pb.AuthUserRevokeRoleRequest{Name: "u", Role: "own"})
		require.NoError(t, err)
	})
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, put("after"))
	own, err := w.Range(root, &pb.RangeRequest{Key: []byte("own")})
	require.NoError(t, err)
	require.Equal(t, "before", string(own.Kvs[0].Value))
}

// TestKeyAttachedDuringRevoke attaches a key to a lease between the permission check of a revocation and its commit.
// The revocation must succeed only if the caller may write that key, too.
func TestKeyAttachedDuringRevoke(t *testing.T) {
	ctx := t.Context()
	root, u := As(ctx, users.Root), As(ctx, "u")
	w := newWorld(t)
	w.enableAuthWithUsers(t)
	_, err := w.LeaseGrant(u, &pb.LeaseGrantRequest{ID: 7, TTL: 60})
	require.NoError(t, err)
	putBeforePropose := func(key string, lease int64) {
		w.raft.BeforeNextPropose(func() {
			_, err := w.Put(root, &pb.PutRequest{Key: []byte(key), Lease: lease})
			require.NoError(t, err)
		})
	}
	putBeforePropose("theirs", 7)
	_, err = w.LeaseRevoke(u, &pb.LeaseRevokeRequest{ID: 7})
	require.Equal(t, rpctypes.ErrGRPCPermissionDenied, err)
	theirs, err := w.Range(root, &pb.RangeRequest{Key: []byte("theirs")})
	require.NoError(t, err)
	require.Len(t, theirs.Kvs, 1)

	_, err = w.LeaseGrant(u, &pb.LeaseGrantRequest{ID: 8, TTL: 60})
	require.NoError(t, err)
	putBeforePropose("own", 8)
	_, err = w.LeaseRevoke(u, &pb.LeaseRevokeRequest{ID: 8})
	require.NoError(t, err)
	own, err := w.Range(u, &pb.RangeRequest{Key: []byte("own")})
	require.NoError(t, err)
	require.Empty(t, own.Kvs)
	putBeforePropose("theirs", 0)
	_, err = w.LeaseRevoke(root, &pb.LeaseRevokeRequest{ID: 7})
	require.NoError(t, err)
}

// TestWatchOnStreamOpenedBeforeAuth checks that a stream that was opened while Auth was disabled needs a user for new
// watches once Auth is enabled, even if no other request has loaded the new records.
func TestWatchOnStreamOpenedBeforeAuth(t *testing.T) {
	w := newWorld(t)
	for _, f := range []func() error{
		func() error {
			_, err := w.UserAdd(t.Context(), &pb.AuthUserAddRequest{Name: "root", Password: "p"})
			return err
		},
		func() error {
			_, err := w.UserGrantRole(t.Context(), &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
			return err
		},
	} {
		require.NoError(t, f())
	}
	ctx, cancel := context.WithCancel(t.Context())
	requests, answers := make(chan *pb.WatchRequest), make(chan *pb.WatchResponse)
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := w.Watch(ctx, func() (*pb.WatchRequest, error) {
			select {
			case r := <-requests:
				return r, nil
			case <-ctx.Done():
				return nil, io.ErrUnexpectedEOF
			}
		}, func(make func() (*pb.WatchResponse, error)) error {
			r, err := make()
			if r == nil {
				return err
			}
			select {
			case answers <- r:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		if ctx.Err() == nil {
			t.Error(err)
		}
	}()
	defer func() { cancel(); <-done }()
	create := func() *pb.WatchResponse {
		requests <- &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: []byte("a")}}}
		return <-answers
	}
	require.False(t, create().Canceled)
	_, err := w.AuthEnable(t.Context(), &pb.AuthEnableRequest{})
	require.NoError(t, err)
	refused := create()
	require.True(t, refused.Canceled)
	require.Contains(t, refused.CancelReason, "user name is empty")
}

// TestPasswordHashingIsLimited checks that the requests that wait for a password hash are limited in number and in
// time, because unauthenticated callers can cause hashes.
func TestPasswordHashingIsLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Leases: &LeaseFeed{}})
		release := make(chan struct{})
		results := make(chan error)
		startHash := func(ctx context.Context) {
			go func() { results <- s.hash(ctx, func() error { <-release; return nil }) }()
			synctest.Wait()
		}
		for range maxHashing {
			startHash(t.Context())
		}
		canceled, cancel := context.WithCancel(t.Context())
		startHash(canceled)
		cancel()
		require.Error(t, <-results)
		began := time.Now()
		for range maxQueue {
			startHash(t.Context())
		}
		startHash(t.Context())
		require.Equal(t, rpctypes.ErrGRPCRequestTooManyRequests, <-results)
		require.Zero(t, time.Since(began), "the request must be refused without waiting")
		for range maxQueue {
			require.Equal(t, rpctypes.ErrGRPCRequestTooManyRequests, <-results)
		}
		require.Equal(t, hashTimeout, time.Since(began))
		close(release)
		for range maxHashing {
			require.NoError(t, <-results)
		}
		failed := errors.New("wrong")
		require.Equal(t, failed, s.hash(t.Context(), func() error { return failed }), "the limit is no longer reached")
	})
}
