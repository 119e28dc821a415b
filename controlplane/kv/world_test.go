package kv

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
)

// alone is the agreement of a cluster of one, which can be told that it does not lead, and made to fail.
type alone struct {
	engine *mvcc.Engine

	applying sync.Mutex

	mu      sync.Mutex
	leader  uint64
	term    uint64
	changed chan struct{}
	fail    error             // of proposals and read indexes
	before  func(data []byte) // called before a proposal is carried out
	behind  func()            // called by a read index, which brings what others did
	learns  bool
}

func newAlone(e *mvcc.Engine) *alone {
	return &alone{engine: e, leader: 1, term: 2, changed: make(chan struct{})}
}

func (a *alone) Propose(ctx context.Context, data []byte, _ bool) (command.Result, error) {
	a.mu.Lock()
	fail, before := a.fail, a.before
	a.mu.Unlock()
	if fail != nil {
		return command.Result{}, fail
	}
	if before != nil {
		before(data)
	}
	return a.apply(data)
}

func (a *alone) apply(data []byte) (command.Result, error) {
	a.applying.Lock()
	defer a.applying.Unlock()
	results, err := a.engine.Apply([]command.Command{{Index: a.engine.Applied().Index + 1, Term: 2, Data: data, WantSteps: true}})
	if err != nil {
		return command.Result{}, err
	}
	return results[0], nil
}

func (a *alone) ReadIndex(ctx context.Context) error {
	a.mu.Lock()
	fail, behind := a.fail, a.behind
	a.mu.Unlock()
	if fail == nil && behind != nil {
		behind()
	}
	return fail
}

func (a *alone) Status(context.Context) (consensus.GroupStatus, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := a.engine.Applied().Index
	s := consensus.GroupStatus{Leader: a.leader, Term: a.term, Commit: at, Applied: at, Voters: []uint64{1}}
	if a.learns {
		s.Learners = []uint64{1}
	}
	return s, nil
}

func (a *alone) Self() uint64 { return 1 }

func (a *alone) Leader() (member, term uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.leader, a.term
}

func (a *alone) Changed() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changed
}

// lead makes a member the leader of a term.
func (a *alone) lead(member, term uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.leader, a.term = member, term
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *alone) set(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
}

// world is a service over an engine in memory.
type world struct {
	*Service
	fs     *vfs.MemFS
	engine *mvcc.Engine
	raft   *alone
	ahead  atomic.Int64 // of the clock
}

func newWorld(t *testing.T, change ...func(*Options)) *world {
	t.Helper()
	feed := &LeaseFeed{}
	fs := vfs.NewMem()
	engine, err := mvcc.Open(fs, "kv", mvcc.Options{OnLeases: feed.Changed})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	w := &world{fs: fs, engine: engine, raft: newAlone(engine)}
	began := time.Now()
	o := Options{
		Engine: engine, Agreement: w.raft, Leases: feed, Tokens: users.NewTokens(make([]byte, 32), time.Hour),
		Clock: func() time.Duration { return time.Since(began) + time.Duration(w.ahead.Load()) },
		Self:  1, Cluster: 77, Election: time.Second, BcryptCost: users.MinCost, Log: slog.New(slog.DiscardHandler),
	}
	for _, f := range change {
		f(&o)
	}
	w.Service = New(o)
	return w
}

// run runs the service's work until the test ends.
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
