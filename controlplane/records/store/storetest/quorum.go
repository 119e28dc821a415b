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

// Clock is a clock that only Advance and Set move. It is safe for concurrent use.
type Clock struct {
	mu sync.Mutex
	at time.Time
}

// NewClock returns a clock that shows at.
func NewClock(at time.Time) *Clock { return &Clock{at: at} }

// Now returns the time that the clock shows.
func (c *Clock) Now() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.at }

// Set makes the clock show at.
func (c *Clock) Set(at time.Time) { c.mu.Lock(); defer c.mu.Unlock(); c.at = at }

// Advance moves the clock by d, which may be negative.
func (c *Clock) Advance(d time.Duration) { c.mu.Lock(); defer c.mu.Unlock(); c.at = c.at.Add(d) }

// ErrLost is the error of a proposal that Quorum.Lose has made fail.
var ErrLost = errors.New("the answer was lost")

// Quorum is a store.Proposer that agrees with nobody and behaves as a test says. It counts what it does.
type Quorum struct {
	*store.Direct
	// Away makes every call fail as if this member had lost the others.
	Away atomic.Bool
	// Lose, if set, is called before and after each proposal; when it returns true the proposal fails: not carried out
	// before, carried out after. Set it while no proposal is under way.
	Lose func(after bool) bool
	// Committed counts the proposals that were carried out without a conflict, Proofs the calls of ReadIndex.
	Committed, Proofs atomic.Int64
}

var _ store.Proposer = (*Quorum)(nil)

// ReadIndex implements store.Proposer.
func (q *Quorum) ReadIndex(ctx context.Context) error {
	if q.Away.Load() {
		return fault.New(fault.Unavailable, "no leader").MayRetry()
	}
	q.Proofs.Add(1)
	return q.Direct.ReadIndex(ctx)
}

// Propose implements store.Proposer.
func (q *Quorum) Propose(ctx context.Context, id [16]byte, data []byte) (command.Result, error) {
	if q.Away.Load() {
		return command.Result{}, fault.New(fault.Unavailable, "no leader").MayRetry()
	}
	if q.Lose != nil && q.Lose(false) {
		return command.Result{}, ErrLost
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

// Open returns a store in memory and the quorum behind it. A nil now is the machine's clock.
func Open(t testing.TB, now func() time.Time) (*store.Store, *Quorum) {
	engine, err := mvcc.Open(vfs.NewMem(), "state", mvcc.Options{KeyIndex: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, engine.Close()) })
	q := &Quorum{Direct: store.NewDirect(engine)}
	return store.New(store.Options{Engine: engine, Proposer: q, PageKey: make([]byte, 32), Now: now}), q
}
