package kv

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv/kvtest"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
)

// world holds a service with an in-memory engine and a SingleMember as its consensus.
type world struct {
	*Service
	fs     *vfs.MemFS
	engine *mvcc.Engine
	raft   *kvtest.SingleMember
	ahead  atomic.Int64 // nanoseconds added to the service's clock
}

func newWorld(t *testing.T, change ...func(*Options)) *world {
	t.Helper()
	feed := &LeaseFeed{}
	fs := vfs.NewMem()
	engine, err := mvcc.Open(fs, "kv", mvcc.Options{OnLeases: feed.Changed})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	w := &world{fs: fs, engine: engine, raft: kvtest.NewSingleMember(engine)}
	began := time.Now()
	o := Options{
		Engine: engine, Consensus: w.raft, Leases: feed, Tokens: users.NewTokens(make([]byte, 32), time.Hour),
		Clock: func() time.Duration { return time.Since(began) + time.Duration(w.ahead.Load()) },
		Self:  1, Cluster: 77, Election: time.Second, BcryptCost: users.MinCost, Log: slog.New(slog.DiscardHandler),
	}
	for _, f := range change {
		f(&o)
	}
	w.Service = New(o)
	return w
}

// run runs the service's background work until the test ends.
func (w *world) run(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); w.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

func (w *world) put(t *testing.T, key, value string) int64 {
	t.Helper()
	r, err := w.Put(t.Context(), &pb.PutRequest{Key: []byte(key), Value: []byte(value)})
	require.NoError(t, err)
	return r.Header.Revision
}
