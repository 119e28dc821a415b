package mvcc

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// gatherer collects the events of one Batch.
type Collector struct {
	w *Watcher
	readSpan
	skip int // changes of the first revision

	events  []Event
	bytes   int
	scanned int

	// Where to go on when it stopped before take.to.
	stopped   bool
	next      int64
	nextPlace int
	partial   bool
}

// complete is the revision up to which everything is delivered with g's events.
func (g *Collector) complete() int64 {
	if g.stopped {
		return g.next - 1
	}
	return g.To
}

func (g *Collector) collect() error {
	if g.recent == nil {
		return g.fromDisk()
	}
	for _, b := range g.recent {
		for i := range b.events {
			e := &b.events[i]
			if !g.Wants(e.KV.Key, e.KV.ModRevision, int(e.ordinal)) {
				continue
			}
			if !g.HasRoom(e.KV.ModRevision, int(e.ordinal)) {
				return g.fetchPrevious(nil)
			}
			if g.w.opts.KeysOnly {
				// The key is cloned, so that the block is not kept for it.
				g.Add(Event{Type: e.Type, ordinal: e.ordinal, PrevModRevision: e.PrevModRevision, KV: KV{Key: bytes.Clone(e.KV.Key), ModRevision: e.KV.ModRevision}})
				continue
			}
			g.Add(*e)
		}
	}
	return g.fetchPrevious(nil)
}

// wants reports whether a change is to be seen.
func (g *Collector) Wants(key []byte, revision int64, place int) bool {
	if revision < g.From || revision > g.To || revision == g.From && place < g.skip {
		return false
	}
	return InRange(key, g.w.opts.Key, g.w.opts.End)
}

// room makes sure that there is room for an event at revision, or stops at the best place.
func (g *Collector) HasRoom(revision int64, place int) bool {
	if len(g.events) < g.w.opts.MaxEvents && g.bytes < g.w.opts.MaxBytes {
		return true
	}
	if g.events[0].KV.ModRevision == revision {
		// One revision fills the batch.
		g.StopAt(revision, place)
		g.partial = true
		return false
	}
	// Leave the beginning of the revision for the next batch.
	n := len(g.events)
	for g.events[n-1].KV.ModRevision == revision {
		n--
	}
	g.events = g.events[:n]
	g.StopAt(revision, 0)
	return false
}

func (g *Collector) StopAt(next int64, place int) {
	g.stopped, g.next, g.nextPlace = true, next, place
}

func (g *Collector) Add(e Event) {
	g.events = append(g.events, e)
	g.bytes += len(e.KV.Key) + len(e.KV.Value)
}

// scanBytes bounds how long one state is pinned to find nothing.
const scanBytes = 4 << 20

// fromDisk reads what the revisions list and looks up the values.
func (g *Collector) fromDisk() error {
	v, err := g.w.e.pin(false)
	if err != nil {
		return err
	}
	defer v.gen.release()
	defer v.gen.unpin(v.compactRevision)
	if g.From < v.compactRevision {
		err = &CompactedError{Revision: g.From, CompactRevision: v.compactRevision}
	} else if err = g.scan(v.gen.db); err == nil {
		err = g.fetchPrevious(v)
	}
	if err != nil {
		return fmt.Errorf("read events from revision %d: %w", g.From, markCorrupt(err))
	}
	return nil
}

func (g *Collector) scan(db *pebble.DB) (err error) {
	lists, err := db.NewIter(&pebble.IterOptions{LowerBound: []byte{tableRevisions}, UpperBound: changesKey(g.To+1, 0)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lists.Close()) }()
	values, err := db.NewIter(&pebble.IterOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, values.Close()) }()
	// A chunk may begin before the revision that is looked for.
	ok := lists.SeekLT(changesKey(g.From, 1))
	if !ok && lists.Error() == nil {
		ok = lists.First()
	}
	for ; ok; ok = lists.Next() {
		chunk, err := lists.ValueAndErr()
		if err != nil {
			return err
		}
		l, err := newChunkReader(lists.Key(), chunk)
		if err != nil {
			return err
		}
		if g.scanned > scanBytes && l.place == 0 {
			g.StopAt(l.revision, 0)
			return nil
		}
		g.scanned += len(chunk)
		if on, err := g.scanChunk(values, &l); err != nil || !on {
			return err
		}
	}
	return lists.Error()
}

// scanChunk adds the events of one chunk, until there is no more room.
func (g *Collector) scanChunk(values *pebble.Iterator, l *chunkReader) (bool, error) {
	for {
		c, ok, err := l.next()
		if err != nil || !ok {
			return true, err
		}
		if c.revision > g.To {
			return false, nil
		}
		if !g.Wants(c.key, c.revision, l.place) {
			continue
		}
		if !g.HasRoom(c.revision, l.place) {
			return false, nil
		}
		e := c.event()
		e.ordinal = int32(l.place)
		if g.w.opts.KeysOnly {
			e.KV = KV{Key: bytes.Clone(c.key), ModRevision: c.revision}
		} else if c.deleted || c.superseded {
			e.clone()
		} else if e.KV, err = exactly(values, c.key, c.revision); err != nil {
			return false, err
		}
		g.Add(e)
	}
}

// exactly reads the version of key that revision wrote.
func exactly(it *pebble.Iterator, key []byte, revision int64) (KV, error) {
	kv, ok, err := get(it, key, revision)
	if err == nil && (!ok || kv.ModRevision != revision) {
		err = fmt.Errorf("%w: no value of %q at revision %d", ErrCorrupt, key, revision)
	}
	return kv, err
}

// fetchPrevious adds to the events what they replaced, when that was asked for. It pins a state when v is nil.
func (g *Collector) fetchPrevious(v *view) (err error) {
	if !g.w.opts.PrevKV || len(g.events) == 0 {
		return nil
	}
	if v == nil {
		if v, err = g.w.e.pin(false); err != nil {
			return err
		}
		defer v.gen.release()
		defer v.gen.unpin(v.compactRevision)
	}
	it, err := v.gen.db.NewIter(&pebble.IterOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for i := range g.events {
		e := &g.events[i]
		if e.PrevModRevision == 0 {
			continue
		}
		kv, err := exactly(it, e.KV.Key, e.PrevModRevision)
		if err != nil && e.KV.ModRevision < v.compactRevision {
			// Of an event from memory, whose past has been removed.
			return &CompactedError{Revision: e.KV.ModRevision, CompactRevision: v.compactRevision}
		}
		if err != nil {
			return err
		}
		e.Prev = &kv
	}
	return nil
}
