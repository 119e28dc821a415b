package main

import (
	"context"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

const (
	// historyAge is how long old revisions of the platform's records can be read.
	historyAge = 15 * time.Minute
	// historyBytes limits the size of the old revisions, measured as mvcc.Engine.Size minus SizeInUse. Revisions
	// younger than historyLeast remain even beyond that limit, so that a watch or a page token may always be
	// historyLeast behind.
	historyBytes = 256 << 20
	historyLeast = 30 * time.Second
	// compactEvery is the time between two runs of compact.
	compactEvery = 10 * time.Second
)

// compactor removes revisions that are older than historyAge, and younger ones while the history is larger than
// historyBytes. Its marks are only in memory. A new leader starts without marks, so the history may become older than
// historyAge then.
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

// newCompactor returns the compactor for the platform's records, which are in the system group.
func (m *member) newCompactor() *compactor {
	return &compactor{store: m.records, engine: m.engines[layout.SystemGroup], now: m.clock.Elapsed}
}

// mark is a revision up to which the history can be compacted later.
type mark struct {
	at       time.Duration
	revision int64
	written  int64 // Engine.Written at that revision, in bytes
}

// compact adds a mark for the current revision. It compacts the history if it is too old or too large.
func (c *compactor) compact(ctx context.Context) error {
	now := mark{c.now(), c.store.Revision(), c.engine.Written()}
	if n := len(c.marks); n > 0 && now.written < c.marks[n-1].written {
		c.marks = nil // the state was replaced by a snapshot, so the marks do not apply to it
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

// cut returns the index of the mark up to which to compact, or -1 for none. That is the newest mark older than
// historyAge. While the history is larger than historyBytes, it is a newer one: the oldest mark older than historyLeast
// after which at most historyBytes were written, or the newest of these marks if there is no such mark.
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

// pruneAnswers returns a task that deletes the stored responses of requests with an idempotency key once they have
// expired, 100 per transaction.
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
