package mvcc

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Watch starts a watcher, which the caller must close. If o.FromRevision is below the compact revision, Watcher.Next
// fails with a CompactedError.
func (e *Engine) Watch(o watch.Options) *watch.Watcher { return e.hub.Watch(o) }

// history reads the events that are no longer in memory from the change log on disk. It implements watch.Source.
type history struct{ *Engine }

// ReadEvents implements watch.Source.
func (h history) ReadEvents(c *watch.Collector) error {
	v, err := h.pin(false)
	if err != nil {
		return err
	}
	defer v.gen.release()
	defer v.gen.unpin(v.compactRevision)
	if c.From < v.compactRevision && !mutant.On(mutant.WatchCompacted) {
		err = &CompactedError{Revision: c.From, CompactRevision: v.compactRevision}
	} else if err = scanChanges(v.gen.db, c); err == nil && c.PrevKV && len(c.Events()) > 0 {
		err = readPrevious(v, c.Events())
	}
	if err != nil {
		return fmt.Errorf("read events from revision %d: %w", c.From, markCorrupt(err))
	}
	return nil
}

// ReadPrevious implements watch.Source.
func (h history) ReadPrevious(events []watch.Event) error {
	v, err := h.pin(false)
	if err != nil {
		return err
	}
	defer v.gen.release()
	defer v.gen.unpin(v.compactRevision)
	return readPrevious(v, events)
}

// maxScannedBytes is the number of bytes of the change log after which a read ends, so that it does not keep Scrub from
// removing data for long even if the watcher needs none of the changes.
const maxScannedBytes = 4 << 20

// scanChanges adds the events of revisions c.From to c.To until c is full or maxScannedBytes were read.
func scanChanges(db *pebble.DB, c *watch.Collector) (err error) {
	chunks, err := db.NewIter(&pebble.IterOptions{LowerBound: []byte{tableRevisions}, UpperBound: changesKey(c.To+1, 0)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, chunks.Close()) }()
	values, err := db.NewIter(&pebble.IterOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, values.Close()) }()
	// Start at the last chunk that begins at or before the revision c.From, because this chunk may also contain changes
	// of c.From.
	ok := chunks.SeekLT(changesKey(c.From, 1))
	if !ok && chunks.Error() == nil {
		ok = chunks.First()
	}
	scanned := 0
	for ; ok; ok = chunks.Next() {
		chunk, err := chunks.ValueAndErr()
		if err != nil {
			return err
		}
		r, err := newChunkReader(chunks.Key(), chunk)
		if err != nil {
			return err
		}
		if scanned > maxScannedBytes && r.ordinal == 0 {
			c.StopAt(r.revision, 0)
			return nil
		}
		scanned += len(chunk)
		if more, err := addChunk(c, values, &r); err != nil || !more {
			return err
		}
	}
	return chunks.Error()
}

// addChunk adds the events of the chunk in r to c. If c does not need the chunks after it, more is false.
func addChunk(c *watch.Collector, values *pebble.Iterator, r *chunkReader) (more bool, err error) {
	for {
		ch, ok, err := r.next()
		if err != nil || !ok {
			return true, err
		}
		if ch.revision > c.To {
			return false, nil
		}
		if !c.Wants(ch.key, ch.revision, r.ordinal) {
			continue
		}
		if !c.HasRoom(ch.revision, r.ordinal) {
			return false, nil
		}
		e := ch.event()
		if c.KeysOnly {
			e.KV = KV{Key: bytes.Clone(ch.key), ModRevision: ch.revision}
		} else if ch.deleted || ch.superseded {
			cloneEvent(&e)
		} else if e.KV, err = getExact(values, ch.key, ch.revision); err != nil {
			return false, err
		}
		c.Add(e)
	}
}

// readPrevious reads the versions that events replaced, and sets Prev of the events. Scrub may have removed what events
// below the compact revision of v replaced. If such a version is missing, readPrevious fails with a CompactedError.
func readPrevious(v *view, events []watch.Event) (err error) {
	it, err := v.gen.db.NewIter(&pebble.IterOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for i := range events {
		e := &events[i]
		if e.PrevModRevision == 0 {
			continue
		}
		kv, err := getExact(it, e.KV.Key, e.PrevModRevision)
		if err != nil && e.KV.ModRevision < v.compactRevision {
			return &CompactedError{Revision: e.KV.ModRevision, CompactRevision: v.compactRevision}
		}
		if err != nil {
			return err
		}
		e.Prev = &kv
	}
	return nil
}

// getExact reads the version of key that was written at revision. If there is no such version, it fails with
// ErrCorrupt.
func getExact(it *pebble.Iterator, key []byte, revision int64) (KV, error) {
	kv, ok, err := get(it, key, revision)
	if err == nil && (!ok || kv.ModRevision != revision) {
		err = fmt.Errorf("%w: no value of %q at revision %d", ErrCorrupt, key, revision)
	}
	return kv, err
}

// cloneEvent replaces the key and value of e, which alias a chunk of the change log, by copies.
func cloneEvent(e *watch.Event) {
	e.KV.Key = bytes.Clone(e.KV.Key)
	if e.Type == watch.EventPut {
		e.KV.Value = append([]byte{}, e.KV.Value...)
	}
}
