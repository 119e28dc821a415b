package etcdrpc_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
)

// heap returns the size of all live objects, in bytes.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestMemoryOfUnreadWatchesIsLimited checks that watch streams whose clients do not read use a limited amount of
// memory, however many there are. When other streams need memory, the member must end them with UNAVAILABLE, and a
// client that reads must get every event in order.
func TestMemoryOfUnreadWatchesIsLimited(t *testing.T) {
	const streams, values, bytes = 200, 10, 1 << 20
	w := newWorld(t)
	c := w.client(t)
	for i := range values {
		_, err := c.Put(t.Context(), "k", fmt.Sprint(i)+strings.Repeat("x", bytes))
		require.NoError(t, err)
	}
	before := heap()
	conn, err := grpc.NewClient(w.address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(1<<30))
	require.NoError(t, err)
	defer conn.Close()
	var slow []pb.Watch_WatchClient
	for range streams {
		s, err := pb.NewWatchClient(conn).Watch(t.Context())
		require.NoError(t, err)
		require.NoError(t, s.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{
			CreateRequest: &pb.WatchCreateRequest{Key: []byte("k"), StartRevision: 2},
		}}))
		slow = append(slow, s)
	}
	require.Eventually(t, func() bool { return w.server.Streams().Unsent() >= rpc.MaxOrgUnsent }, 30*time.Second, time.Millisecond)
	require.Less(t, w.server.Streams().Unsent(), int64(rpc.MaxOrgUnsent+8*(bytes+1<<10)), "a few streams may exceed the limit by one batch")
	require.Less(t, heap()-before, int64(4*rpc.MaxOrgUnsent), "bytes of live objects of the member and the clients")

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	read := 0
	for r := range c.Watch(ctx, "k", clientv3.WithRev(2)) {
		require.NoError(t, r.Err())
		for _, e := range r.Events {
			require.Equal(t, fmt.Sprint(read), string(e.Kv.Value[:1]))
			read++
		}
		if read == values {
			break
		}
	}
	require.Equal(t, values, read)
	ended := 0
	for _, s := range slow {
		for err = nil; err == nil; _, err = s.Recv() {
		}
		require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
		ended++
	}
	require.Equal(t, streams, ended)
	require.Eventually(t, func() bool { return w.server.Streams().Unsent() == 0 }, 30*time.Second, time.Millisecond)
}
