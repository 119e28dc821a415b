package storetest

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Clock is a clock whose time changes only by Advance and Set. It is safe for concurrent use.
type Clock struct {
	mu sync.Mutex
	at time.Time
}

// NewClock returns a Clock that is set to the given time.
func NewClock(at time.Time) *Clock { return &Clock{at: at} }

// Now returns the time to which the clock is set.
func (c *Clock) Now() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.at }

// Set sets the clock to the given time.
func (c *Clock) Set(at time.Time) { c.mu.Lock(); defer c.mu.Unlock(); c.at = at }

// Advance moves the clock by d, which may be negative.
func (c *Clock) Advance(d time.Duration) { c.mu.Lock(); defer c.mu.Unlock(); c.at = c.at.Add(d) }

// ErrLost is the error of a proposal for which Quorum.Lose returned true.
var ErrLost = errors.New("the answer was lost")

// Quorum is a store.Proposer of a cluster of one member. A test can make its calls fail and read how many succeeded.
type Quorum struct {
	*store.Direct
	// While Away is true, every proposal and every ReadIndex fails with Unavailable, as if this member could not reach
	// a majority.
	Away atomic.Bool
	// Lose, if not nil, is called twice per proposal: with after = false before the proposal is applied, and with after
	// = true afterwards. If it returns true, the proposal fails with ErrLost at that point. Do not change Lose while a
	// proposal is running.
	Lose func(after bool) bool
	// Proposed is nil, or a function that is called with the data of each proposal: the bytes that members would write
	// to their raft logs. The function must not keep the data. Do not set Proposed while a proposal is running.
	Proposed func(data []byte)
	// Committed counts the proposals that were applied without a conflict. Proofs counts the successful calls of
	// ReadIndex.
	Committed, Proofs atomic.Int64
}

var _ store.Proposer = (*Quorum)(nil)

// ReadIndex implements store.Proposer. It fails while the field Away is true.
func (q *Quorum) ReadIndex(ctx context.Context) error {
	if q.Away.Load() {
		return fault.New(fault.Unavailable, "no leader").MayRetry()
	}
	q.Proofs.Add(1)
	return q.Direct.ReadIndex(ctx)
}

// Propose implements store.Proposer. It fails while the field Away is true, or if Lose returns true.
func (q *Quorum) Propose(ctx context.Context, id [16]byte, data []byte) (command.Result, error) {
	if q.Away.Load() {
		return command.Result{}, fault.New(fault.Unavailable, "no leader").MayRetry()
	}
	if q.Lose != nil && q.Lose(false) {
		return command.Result{}, ErrLost
	}
	if q.Proposed != nil {
		q.Proposed(data)
	}
	result, err := q.Direct.Propose(ctx, id, data)
	if err == nil && !result.Conflict {
		q.Committed.Add(1)
	}
	if q.Lose != nil && q.Lose(true) {
		return command.Result{}, ErrLost
	}
	return result, err
}

// Open returns an in-memory store and its Quorum. now is the store's clock; nil means the system clock.
func Open(t testing.TB, now func() time.Time) (*store.Store, *Quorum) {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{KeyIndex: true, ValueCacheBytes: 1 << 20})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	q := &Quorum{Direct: store.NewDirect(engine)}
	return store.New(store.Options{Engine: engine, Proposer: q, PageKey: make([]byte, 32), Now: now}), q
}
