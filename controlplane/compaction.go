package main

import (
	"context"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

const (
	// historyAge is how long old revisions of the platform's records are kept.
	historyAge = 15 * time.Minute
	// historyBytes limits the size of those old revisions, as measured by mvcc.Engine.Size. Revisions younger than
	// historyLeast are kept beyond that limit, so a watch or a page token may always lag behind by historyLeast.
	historyBytes = 256 << 20
	historyLeast = 30 * time.Second
	// compactEvery is the time between two runs of compact.
	compactEvery = 10 * time.Second
)

// compactor compacts revisions that are older than historyAge, and younger ones when the history is larger than
// historyBytes. Its marks are in memory only: a new leader starts without them and keeps more history for a while.
type compactor struct {
	store interface {
		Revision() int64
		Compact(ctx context.Context, revision int64) error
	}
	engine interface {
		Size() int64
		SizeInUse() int64
		Written() int64
	}
	now   func() time.Duration // a monotonic clock
	marks []mark
}

// newCompactor returns the compactor of the platform's records.
func (m *member) newCompactor() *compactor {
	return &compactor{store: m.records, engine: m.engines[layout.SystemGroup], now: m.clock.Elapsed}
}

// mark is a revision at which the history can be compacted.
type mark struct {
	at       time.Duration
	revision int64
	written  int64 // Engine.Written at that revision
}

// compact adds a mark for the present revision, and compacts the history if it is too old or too large.
func (c *compactor) compact(ctx context.Context) error {
	now := mark{c.now(), c.store.Revision(), c.engine.Written()}
	if n := len(c.marks); n > 0 && now.written < c.marks[n-1].written {
		c.marks = nil // the state was replaced by a snapshot
	}
	c.marks = append(c.marks, now)
	cut := c.cut(now)
	if cut < 0 {
		return nil
	}
	revision := c.marks[cut].revision
	c.marks = c.marks[cut+1:]
	return c.store.Compact(ctx, revision)
}

// cut returns the index of the mark to compact at, -1 for none: the newest mark older than historyAge or, while the
// history is larger than historyBytes, the oldest mark older than historyLeast that leaves at most historyBytes (the
// newest if none does).
func (c *compactor) cut(now mark) int {
	cut := -1
	large := c.engine.Size()-c.engine.SizeInUse() > historyBytes
	for i, m := range c.marks {
		age := now.at - m.at
		if age >= historyAge {
			cut = i
		} else if large && age >= historyLeast {
			cut = i
			if now.written-m.written <= historyBytes {
				break
			}
		}
	}
	return cut
}

// pruneAnswers returns a task that removes expired stored responses of requests with an idempotency key, 100 per
// transaction.
func pruneAnswers(s *store.Store) func(context.Context) error {
	return func(ctx context.Context) error {
		for more := true; more; {
			if _, err := s.Update(ctx, func(tx *store.Tx) (err error) {
				more, err = store.ForgetAnswers(tx, 100)
				return err
			}); err != nil {
				return err
			}
		}
		return nil
	}
}
