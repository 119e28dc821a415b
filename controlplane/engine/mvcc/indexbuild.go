package mvcc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/keyindex"
)

// indexing is a generation's index: being built, then kept up by the goroutine that applies.
type indexBuild struct {
	mu       sync.Mutex
	index    keyindex.Index // the builder's until it is whole, then the applier's
	complete bool
	backlog  []indexUpdate // what batches changed since the builder last looked
	finished chan struct{} // closed when the builder has ended, with an index or without
}

// indexed is a key's new mark; the zero mark says that the key is gone.
type indexUpdate struct {
	key []byte
	keyindex.Entry
}

// buildKeys is how many keys the builder reads between two looks at what has changed since.
const keysPerStep = 4096

// publish shows v, which changes led to, to readers.
func (e *Engine) publish(v *view, changes []change) {
	e.hashCompaction(v)
	x := v.gen.indexBuild
	if x == nil {
		e.published.Store(v)
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.complete {
		for i := range changes {
			if c := &changes[i]; !c.superseded {
				x.backlog = append(x.backlog, indexUpdate{key: append([]byte(nil), c.key...), Entry: keyindex.NewEntry(c.after)})
			}
		}
		e.published.Store(v)
		return
	}
	// Nobody can take a snapshot while pins are locked: an index that none has can be changed in place. A change of many
	// keys would hold up snapshots, and goes on in copies.
	const many = 1024
	v.gen.mu.Lock()
	inPlace := !e.published.Load().indexShared && len(changes) <= many
	if !inPlace {
		v.gen.mu.Unlock()
		x.index.Freeze()
	}
	for i := range changes {
		if c := &changes[i]; !c.superseded {
			u := indexUpdate{key: c.key, Entry: keyindex.NewEntry(c.after)}
			u.applyTo(&x.index)
		}
	}
	given := x.index
	v.index = &given
	e.published.Store(v)
	if inPlace {
		v.gen.mu.Unlock()
	}
}

// startIndex builds the index of a generation that was just published: in the background, unless the engine is quiet.
func (e *Engine) startIndexBuild(g *generation) {
	build := func() {
		defer close(g.indexBuild.finished)
		if err := e.buildIndex(g); err != nil && !errors.Is(err, ErrClosed) && !errors.Is(err, ErrRestored) {
			e.opts.Logger.Error("mvcc build index, counts will scan", "dir", e.dir.path, "err", err)
		}
	}
	switch {
	case g.indexBuild == nil:
	case e.opts.Quiet:
		build()
	default:
		e.builders.Go(build)
	}
}

// fillIndex reads all keys, some at a time, each time at the then current revision. What changes meanwhile among the keys
// it has read comes through the backlog; what changes ahead of it, it will read.
func (e *Engine) buildIndex(g *generation) error {
	var position []byte // before which all keys were read
	for whole := false; !whole; {
		pinned, err := e.pin(false)
		if err != nil {
			return err
		}
		if pinned.gen == g {
			position, whole, err = e.buildIndexStep(g, position)
		} else {
			err = ErrRestored
		}
		pinned.gen.unpin(pinned.compactRevision)
		pinned.gen.release()
		if err != nil {
			return err
		}
	}
	return nil
}

// fillSome reads the next keys from position on and returns the first that it has not read. When there is none, the index
// is whole and readers are given it.
func (e *Engine) buildIndexStep(g *generation, position []byte) (next []byte, whole bool, err error) {
	x := g.indexBuild
	x.mu.Lock()
	v := e.published.Load()
	for _, i := range x.backlog {
		if bytes.Compare(i.key, position) < 0 {
			i.applyTo(&x.index)
		}
	}
	x.backlog = x.backlog[:0]
	x.mu.Unlock()

	it, err := g.db.NewIter(&pebble.IterOptions{LowerBound: appendPrefix(nil, position), UpperBound: []byte{tableKeys + 1}})
	if err != nil {
		return nil, false, err
	}
	next, err = fillIndex(&x.index, &reader{it: it, revision: v.revision})
	if err = errors.Join(err, it.Close()); err != nil || next != nil {
		return next, false, err
	}

	x.mu.Lock()
	defer x.mu.Unlock()
	for _, i := range x.backlog {
		i.applyTo(&x.index)
	}
	x.backlog, x.complete = nil, true
	given := x.index
	// The goroutine that applies publishes under this lock; one that restores, without it, and must not be undone.
	if v = e.published.Load(); v.gen != g ||
		!e.published.CompareAndSwap(v, &view{gen: g, state: v.state, records: v.records, index: &given}) {
		return nil, false, ErrRestored
	}
	return nil, true, nil
}

// AwaitCounts waits until snapshots that are taken from then on count ranges of their own revision without reading them.
// Without CountIndex, or when the index could not be built, counts read the range and there is nothing to wait for. It
// fails with what ctx says, or with ErrClosed.
func (e *Engine) AwaitKeyIndex(ctx context.Context) error {
	for {
		g := e.published.Load().gen
		if g.indexBuild == nil {
			return nil
		}
		select {
		case <-g.indexBuild.finished:
			if e.published.Load().gen == g {
				return nil
			}
			continue
		default:
		}
		select {
		case <-g.indexBuild.finished:
		case <-g.done:
			if e.published.Load().gen == g {
				return fmt.Errorf("await counts: %w", g.closedErr)
			}
		case <-ctx.Done():
			return fmt.Errorf("await counts: %w", ctx.Err())
		}
	}
}

func (i *indexUpdate) applyTo(t *keyindex.Index) {
	if !i.Live() {
		t.Remove(i.key)
	} else {
		t.Set(i.key, i.Entry)
	}
}

// fill takes some keys of r and returns the one after them, nil at the end.
func fillIndex(t *keyindex.Index, r *reader) (next []byte, err error) {
	for n := 0; ; n++ {
		prefix, mod, ok, err := r.next(n == 0)
		if err != nil || !ok {
			return nil, err
		}
		if r.key, err = appendUserKey(r.key[:0], prefix); err != nil {
			return nil, err
		}
		if n >= keysPerStep {
			return bytes.Clone(r.key), nil
		}
		m, err := r.entry(mod)
		if err != nil {
			return nil, err
		}
		if m.Live() {
			t.Set(r.key, m)
		}
	}
}

// unreadBytes is the size from which versions are not read to fill an index, where Pebble keeps them apart: large values
// would be read whole for some bytes before them. The first put over such a key reads it, which costs little beside
// writing as much.
const unreadBytes = 1 << 10

// mark is that of what r.it stands at, a version of revision mod; the zero mark is a tombstone.
func (r *reader) entry(mod int64) (keyindex.Entry, error) {
	if v := r.it.LazyValue(); v.Fetcher != nil && v.Len() >= unreadBytes {
		return keyindex.PartialEntry(mod), nil
	}
	h, err := r.keyState(mod)
	return keyindex.NewEntry(h.Meta), err
}
