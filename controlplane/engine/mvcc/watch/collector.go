package watch

import (
	"bytes"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Source reads the history that a Hub does not hold in memory.
type Source interface {
	// CompactRevision returns the oldest revision whose events can be read.
	CompactRevision() int64

	// ReadEvents adds the events of revisions c.From to c.To to c, oldest first, with Prev set if c.PrevKV. It returns
	// early when c.HasRoom has reported false or after it has called c.StopAt. It fails with a CompactedError when
	// c.From is below the compact revision, and with ErrRestored or ErrClosed.
	ReadEvents(c *Collector) error

	// ReadPrevious sets Prev of those events that replaced a version. It fails like ReadEvents.
	ReadPrevious(events []Event) error
}

// Collector collects the events of one Batch. For each change, in order, a Source calls Wants; if that is true,
// HasRoom; and if that is true, Add.
type Collector struct {
	readSpan
	*Options
	skip int // number of changes of revision From that were delivered before

	events []Event
	bytes  int // total size of keys and values in events

	// stopped means that this read ended before To; the next one continues at change nextOrdinal of revision next.
	stopped     bool
	next        int64
	nextOrdinal int
	partial     bool // some events of revision next are in this batch
}

// complete returns the revision up to which all events are delivered once the caller has those in c.
func (c *Collector) complete() int64 {
	if c.stopped {
		return c.next - 1
	}
	return c.To
}

// collectRecent collects the events of s from the blocks in memory.
func (w *Watcher) collectRecent(s readSpan) (Collector, error) {
	c := Collector{readSpan: s, Options: &w.opts, skip: w.delivered}
	c.addBlocks()
	if c.PrevKV && len(c.events) > 0 {
		return c, w.hub.source.ReadPrevious(c.events)
	}
	return c, nil
}

// collectFromSource collects the events of s, which are no longer in memory, from the hub's Source.
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

// Wants reports whether the watcher must receive the change of key, which is the ordinal-th (from 0) of revision.
func (c *Collector) Wants(key []byte, revision int64, ordinal int) bool {
	if revision < c.From || revision > c.To || revision == c.From && ordinal < c.skip {
		return false
	}
	return command.InRange(key, c.Key, c.End)
}

// HasRoom reports whether the batch has room for the ordinal-th change of revision. If it has not, the Source must
// stop; the next read continues at that change, or, if the batch also has events of older revisions, at the beginning
// of revision.
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

// StopAt makes the next read continue at the ordinal-th change of revision. The Source must stop after it.
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
