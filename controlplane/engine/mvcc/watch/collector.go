package watch

import (
	"bytes"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Source reads the history that a Hub does not hold in memory.
type Source interface {
	// CompactRevision returns the oldest revision whose events can be read.
	CompactRevision() int64

	// ReadEvents adds the events of revisions c.From to c.To to c, oldest first. If c.PrevKV is true, it sets Prev. It
	// returns early if c.HasRoom returns false, or after a call of c.StopAt. It fails with a CompactedError if c.From
	// is below the compact revision, with ErrRestored if the state was replaced, and with ErrClosed if the engine was
	// closed.
	ReadEvents(c *Collector) error

	// ReadPrevious sets Prev of those events that replaced a version. It fails with the same errors as ReadEvents.
	ReadPrevious(events []Event) error
}

// Collector collects the events of one Batch. A Source passes each change, in order, to Wants. If Wants returns true,
// the Source calls HasRoom. If HasRoom also returns true, it calls Add.
type Collector struct {
	readSpan
	*Options
	skip int // number of changes of revision From that were delivered before

	events []Event
	bytes  int // total size of keys and values in events

	// stopped is true if this read ended before the revision To. The next read then continues at change number
	// nextOrdinal (from 0) of the revision in the field next.
	stopped     bool
	next        int64
	nextOrdinal int
	partial     bool // some events of revision next are in this batch
}

// complete returns the revision up to which the caller has all events once it has received those in c.
func (c *Collector) complete() int64 {
	if c.stopped {
		return c.next - 1
	}
	return c.To
}

// collectRecent collects the events of the revisions in s from the blocks in memory.
func (w *Watcher) collectRecent(s readSpan) (Collector, error) {
	c := Collector{readSpan: s, Options: &w.opts, skip: w.delivered}
	c.addBlocks()
	if c.PrevKV && len(c.events) > 0 {
		return c, w.hub.source.ReadPrevious(c.events)
	}
	return c, nil
}

// collectFromSource collects the events of the revisions in s, which are no longer in memory, from the hub's Source.
func (w *Watcher) collectFromSource(s readSpan) (Collector, error) {
	c := &Collector{readSpan: s, Options: &w.opts, skip: w.delivered}
	err := w.hub.source.ReadEvents(c)
	return *c, err
}

// addBlocks adds those events of c.recent that the watcher must receive, until the batch is full.
func (c *Collector) addBlocks() {
	for _, b := range c.recent {
		for i := range b.events {
			e := &b.events[i]
			if !c.Wants(e.KV.Key, e.KV.ModRevision, int(e.ordinal)) {
				continue
			}
			if !c.HasRoom(e.KV.ModRevision, int(e.ordinal)) {
				return
			}
			if c.KeysOnly {
				// Without the clone, the event would keep the memory of the whole block.
				c.Add(Event{
					Type: e.Type, PrevModRevision: e.PrevModRevision,
					KV: command.KV{Key: bytes.Clone(e.KV.Key), ModRevision: e.KV.ModRevision},
				})
				continue
			}
			c.Add(*e)
		}
	}
}

// Wants reports whether the watcher must receive the change of key that has the number ordinal (from 0) in revision.
func (c *Collector) Wants(key []byte, revision int64, ordinal int) bool {
	if revision < c.From || revision > c.To || revision == c.From && ordinal < c.skip {
		return false
	}
	return command.InRange(key, c.Key, c.End)
}

// HasRoom reports whether the batch has room for the change with the number ordinal (from 0) of revision. If it returns
// false, the Source must stop. The next read continues at that change if the batch has only events of this revision;
// otherwise it continues at the first change of the revision.
func (c *Collector) HasRoom(revision int64, ordinal int) bool {
	if len(c.events) < c.MaxEvents && c.bytes < c.MaxBytes {
		return true
	}
	if c.events[0].KV.ModRevision == revision {
		c.StopAt(revision, ordinal)
		c.partial = true
		return false
	}
	n := len(c.events)
	for c.events[n-1].KV.ModRevision == revision {
		n--
	}
	c.events = c.events[:n]
	c.StopAt(revision, 0)
	return false
}

// StopAt makes the next read continue at the change with the number ordinal (from 0) of revision. The Source must stop
// after calling it.
func (c *Collector) StopAt(revision int64, ordinal int) {
	c.stopped, c.next, c.nextOrdinal = true, revision, ordinal
}

// Add adds e to the batch.
func (c *Collector) Add(e Event) {
	e.ordinal = 0
	c.events = append(c.events, e)
	c.bytes += len(e.KV.Key) + len(e.KV.Value)
}

// Events returns the events that were added so far. A Source may set Prev of these events.
func (c *Collector) Events() []Event { return c.events }
