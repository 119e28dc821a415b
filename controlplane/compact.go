package main

import (
	"context"
	"time"
)

const (
	// historyAge is how long old revisions of the platform's records are kept.
	historyAge = 15 * time.Minute
	// historyBytes is how much of them is kept, as mvcc.Engine.Size counts, and historyLeast for how long it is kept even
	// when it is more: so long a watch or a page token may lag behind at least.
	historyBytes = 256 << 20
	historyLeast = 30 * time.Second
	// compactEvery is the time between two looks at the history.
	compactEvery = 10 * time.Second
)

// compactor compacts revisions that are older than historyAge, and younger ones when the history is larger than
// historyBytes. What it remembers of them dies with the leadership: a new leader keeps more for a while.
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
	now   func() time.Duration // a clock that goes forward only
	marks []mark
}

// mark is a moment that the history can be cut at.
type mark struct {
	at       time.Duration
	revision int64
	written  int64 // bytes that had been written until then
}

// compact is one look at the history.
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

// cut returns the mark before which history is let go of, -1 for none: the newest of those that are too old, or the oldest
// that leaves little enough, or when none does the newest that may go.
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
