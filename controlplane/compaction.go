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
	// historyBytes is the size, in bytes, above which old revisions are removed before historyAge. The size is
	// mvcc.Engine.Size minus SizeInUse. Revisions younger than historyLeast are never removed, so that a watch or a
	// page token may always be historyLeast behind.
	historyBytes = 256 << 20
	historyLeast = 30 * time.Second
	// compactEvery is the time between two runs of compact.
	compactEvery = 10 * time.Second
)

// compactor removes revisions that are older than historyAge. While the history is larger than historyBytes, it also
// removes younger ones. Its list of past revisions with their times (marks) is only in memory. A new leader starts with
// an empty list, so the history may then become older than historyAge.
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

// mark is the revision that was current at a time, up to which the history can be compacted later.
type mark struct {
	at       time.Duration
	revision int64
	written  int64 // Engine.Written at that revision, in bytes
}

// compact adds a mark for the current revision. If the history is too old or too large, it compacts it up to the mark
// that cut returns.
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

// cut returns the index of the mark up to which to compact, or -1 if nothing is to be compacted. Normally that is the
// newest mark older than historyAge. If the history is larger than historyBytes, cut searches the marks between
// historyLeast and historyAge for the oldest one after which at most historyBytes were written. If there is no such
// mark, it takes the newest of them.
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

// pruneAnswers returns a task for the leader. The task deletes the stored responses of requests with an idempotency key
// once they have expired, at most 100 per transaction.
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
