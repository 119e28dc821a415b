package etcdrpc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/kv/snapfile"
)

func TestEtcdClient(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	c := w.client(t)
	put, err := c.Put(ctx, "foo", "bar")
	require.NoError(t, err)
	require.EqualValues(t, 2, put.Header.Revision)
	require.EqualValues(t, 77, put.Header.ClusterId)
	got, err := c.Get(ctx, "foo")
	require.NoError(t, err)
	require.Equal(t, "bar", string(got.Kvs[0].Value))
	for i := range 20 {
		_, err := c.Put(ctx, fmt.Sprintf("k%02d", i), "v")
		require.NoError(t, err)
	}
	got, err = c.Get(ctx, "k", clientv3.WithPrefix(), clientv3.WithLimit(3), clientv3.WithSort(clientv3.SortByKey, clientv3.SortDescend))
	require.NoError(t, err)
	require.Equal(t, "k19", string(got.Kvs[0].Key))
	require.EqualValues(t, 20, got.Count)
	require.True(t, got.More)
	txn, err := c.Txn(ctx).If(clientv3.Compare(clientv3.Value("foo"), "=", "bar")).
		Then(clientv3.OpPut("foo", "baz"), clientv3.OpGet("foo")).Else(clientv3.OpDelete("foo")).Commit()
	require.NoError(t, err)
	require.True(t, txn.Succeeded)
	require.Equal(t, "baz", string(txn.Responses[1].GetResponseRange().Kvs[0].Value))
	del, err := c.Delete(ctx, "k", clientv3.WithPrefix(), clientv3.WithPrevKV())
	require.NoError(t, err)
	require.EqualValues(t, 20, del.Deleted)
	require.Len(t, del.PrevKvs, 20)
	status, err := c.Status(ctx, w.address)
	require.NoError(t, err)
	require.Equal(t, "3.7.3", status.Version)
	require.EqualValues(t, 1, status.Leader)
	hash, err := c.HashKV(ctx, w.address, 0)
	require.NoError(t, err)
	require.NotZero(t, hash.Hash)
	_, err = c.Compact(ctx, got.Header.Revision)
	require.NoError(t, err)
	_, err = c.Get(ctx, "foo", clientv3.WithRev(2))
	require.Equal(t, rpctypes.ErrCompacted, err)
}

func TestEtcdClientWatch(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	w := newWorld(t)
	c := w.client(t)
	for i := range 3 {
		_, err := c.Put(ctx, "a", fmt.Sprint(i))
		require.NoError(t, err)
	}
	past := c.Watch(ctx, "a", clientv3.WithRev(3))
	now := c.Watch(ctx, "a", clientv3.WithPrevKV(), clientv3.WithCreatedNotify())
	require.True(t, (<-now).Created)
	first := <-past
	require.Len(t, first.Events, 2)
	_, err := c.Delete(ctx, "a")
	require.NoError(t, err)
	event := <-now
	require.Equal(t, clientv3.EventTypeDelete, event.Events[0].Type)
	require.Equal(t, "2", string(event.Events[0].PrevKv.Value))
	require.NoError(t, c.RequestProgress(ctx))
	progress := <-now
	require.True(t, progress.IsProgressNotify())
	require.EqualValues(t, 5, progress.Header.Revision)
	_, err = c.Compact(ctx, 5)
	require.NoError(t, err)
	old := <-c.Watch(ctx, "a", clientv3.WithRev(2))
	require.Equal(t, rpctypes.ErrCompacted, old.Err())
	require.EqualValues(t, 5, old.CompactRevision)
}

func TestEtcdClientLeases(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	c := w.client(t)
	lease, err := c.Grant(ctx, 60)
	require.NoError(t, err)
	_, err = c.Put(ctx, "a", "1", clientv3.WithLease(lease.ID))
	require.NoError(t, err)
	alive, err := c.KeepAliveOnce(ctx, lease.ID)
	require.NoError(t, err)
	require.EqualValues(t, 60, alive.TTL)
	ttl, err := c.TimeToLive(ctx, lease.ID, clientv3.WithAttachedKeys())
	require.NoError(t, err)
	require.Equal(t, "a", string(ttl.Keys[0]))
	_, err = c.KeepAliveOnce(ctx, 12345)
	require.Equal(t, rpctypes.ErrLeaseNotFound, err)
	_, err = c.Revoke(ctx, lease.ID)
	require.NoError(t, err)
	got, err := c.Get(ctx, "a")
	require.NoError(t, err)
	require.Empty(t, got.Kvs)
}

// TestEtcdConcurrencyRecipes checks that the lock, the election and the software transactional memory of etcd's package
// concurrency work.
func TestEtcdConcurrencyRecipes(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	w := newWorld(t)
	c := w.client(t)
	_, err := c.Put(ctx, "count", "0")
	require.NoError(t, err)
	var work sync.WaitGroup
	acquired := 0
	for range 4 {
		work.Go(func() {
			session, err := concurrency.NewSession(c, concurrency.WithTTL(60))
			if !noError(t, err) {
				return
			}
			defer session.Close()
			lock := concurrency.NewMutex(session, "/lock")
			for range 3 {
				if !noError(t, lock.Lock(ctx)) {
					return
				}
				acquired++ // the race detector reports it if two goroutines hold the lock
				noError(t, lock.Unlock(ctx))
			}
		})
	}
	work.Wait()
	require.Equal(t, 12, acquired)

	session, err := concurrency.NewSession(c, concurrency.WithTTL(60))
	require.NoError(t, err)
	election := concurrency.NewElection(session, "/election")
	require.NoError(t, election.Campaign(ctx, "me"))
	leader, err := election.Leader(ctx)
	require.NoError(t, err)
	require.Equal(t, "me", string(leader.Kvs[0].Value))
	require.NoError(t, election.Resign(ctx))

	_, err = concurrency.NewSTM(c, func(stm concurrency.STM) error {
		stm.Put("count", stm.Get("count")+"1")
		return nil
	})
	require.NoError(t, err)
	got, err := c.Get(ctx, "count")
	require.NoError(t, err)
	require.Equal(t, "01", string(got.Kvs[0].Value))
}

// noError is like require.NoError, but may be called by any goroutine. It reports whether err is nil.
func noError(t *testing.T, err error) bool {
	if err != nil {
		t.Error(err)
	}
	return err == nil
}

func TestSnapshotIsValidFile(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	c := w.client(t)
	for i := range 100 {
		_, err := c.Put(ctx, fmt.Sprintf("k%d", i), "v")
		require.NoError(t, err)
	}
	r, err := c.Snapshot(ctx)
	require.NoError(t, err)
	defer r.Close()
	path := filepath.Join(t.TempDir(), "db")
	f, err := os.Create(path)
	require.NoError(t, err)
	_, err = io.Copy(f, r)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	file, err := snapfile.Open(path)
	require.NoError(t, err)
	require.NoError(t, file.Close())
}

func TestRequireLeader(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	w := newWorld(t)
	c := w.client(t)
	_, err := c.Put(ctx, "a", "1")
	require.NoError(t, err)
	// One stream requires a leader, the other does not.
	requiring := c.Watch(clientv3.WithRequireLeader(ctx), "a", clientv3.WithCreatedNotify())
	notRequiring := c.Watch(ctx, "a", clientv3.WithCreatedNotify())
	<-requiring
	<-notRequiring
	w.raft.SetLeader(0, 2)
	r := <-requiring
	require.Equal(t, rpctypes.ErrNoLeader, r.Err())
	_, err = pb.NewKVClient(c.ActiveConnection()).Range(clientv3.WithRequireLeader(ctx), &pb.RangeRequest{Key: []byte("a"), Serializable: true})
	require.Equal(t, rpctypes.ErrGRPCNoLeader.Error(), err.Error())
	got, err := c.Get(ctx, "a", clientv3.WithSerializable())
	require.NoError(t, err)
	require.Len(t, got.Kvs, 1)
	w.raft.SetLeader(1, 2)
	_, err = c.Put(ctx, "a", "2")
	require.NoError(t, err)
	require.Len(t, (<-notRequiring).Events, 1)
}

func TestLearnerServesOnlyLocalReads(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	c := w.client(t)
	w.raft.SetLearner(true)
	require.Eventually(t, w.service.IsLearner, 10*time.Second, time.Millisecond)
	_, err := c.Put(ctx, "a", "1")
	require.ErrorContains(t, err, "rpc not supported for learner")
	_, err = c.Get(ctx, "a")
	require.ErrorContains(t, err, "rpc not supported for learner")
	_, err = c.Get(ctx, "a", clientv3.WithSerializable())
	require.NoError(t, err)
	status, err := c.Status(ctx, w.address)
	require.NoError(t, err)
	require.True(t, status.IsLearner)
}

func TestHTTPPaths(t *testing.T) {
	w := newWorld(t)
	get := func(path string) (int, string) {
		r, err := http.Get("http://" + w.address + path)
		require.NoError(t, err)
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		return r.StatusCode, string(b)
	}
	code, body := get("/health")
	require.Equal(t, 200, code)
	require.JSONEq(t, `{"health":"true","reason":""}`, body)
	_, body = get("/version")
	require.JSONEq(t, `{"etcdserver":"3.7.3","etcdcluster":"3.7.0","storage":"3.7.0"}`, body)
	code, _ = get("/readyz")
	require.Equal(t, 200, code)

	c := w.client(t)
	_, err := c.Put(t.Context(), "a", "1") // gRPC and HTTP share the port
	require.NoError(t, err)

	w.raft.SetLeader(0, 2)
	code, body = get("/health")
	require.Equal(t, 503, code)
	require.JSONEq(t, `{"health":"false","reason":"RAFT NO LEADER"}`, body)
	code, _ = get("/health?serializable=true")
	require.Equal(t, 200, code)
	code, _ = get("/livez")
	require.Equal(t, 200, code)
	code, _ = get("/readyz")
	require.Equal(t, 503, code)
}

// TestStreamsOfClientAreLimited checks that a stream beyond a client's limit is refused, and that the client can open
// another stream after it has closed one.
func TestStreamsOfClientAreLimited(t *testing.T) {
	w := newWorld(t)
	conn, err := grpc.NewClient(w.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	open := func(ctx context.Context) error {
		s, err := pb.NewWatchClient(conn).Watch(ctx)
		require.NoError(t, err)
		if err := s.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: []byte("k")}}}); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		_, err = s.Recv()
		return err
	}
	first, cancel := context.WithCancel(t.Context())
	require.NoError(t, open(first))
	for range 2047 {
		require.NoError(t, open(t.Context()))
	}
	err = open(t.Context())
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	require.ErrorContains(t, err, "address 127.0.0.1 has 2048 streams open on this member")
	cancel()
	require.Eventually(t, func() bool { return open(t.Context()) == nil }, 10*time.Second, time.Millisecond)
}
