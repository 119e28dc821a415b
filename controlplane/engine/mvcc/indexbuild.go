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

// indexBuild holds the key index of a generation. The index is first built in the background; then Apply updates it.
type indexBuild struct {
	mu       sync.Mutex
	index    keyindex.Index // belongs to the builder until complete, then to the applier
	complete bool
	backlog  []indexUpdate // changes since the builder's last step
	failed   error         // error with which the build has failed
	finished chan struct{} // closed when the builder has ended, successfully or not
}

// indexUpdate is a key with its new index entry. The zero Entry means that the key was deleted.
type indexUpdate struct {
	key []byte
	keyindex.Entry
}

// keysPerStep is the number of keys that the builder reads in one step. Between steps it applies the backlog to the
// index.
const keysPerStep = 4096

// publish makes the view v visible to readers. The parameter changes has the changes since the previous view. publish
// first applies them to the value cache and the key index.
func (e *Engine) publish(v *view, changes []change) {
	e.hashCompaction(v)
	v.gen.values.apply(changes)
	x := v.gen.indexBuild
	if x == nil {
		e.published.Store(v)
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.complete {
		for i := range changes {
			if x.failed != nil {
				break
			}
			if c := &changes[i]; !c.superseded {
				x.backlog = append(x.backlog, indexUpdate{key: append([]byte(nil), c.key...), Entry: keyindex.NewEntry(c.after)})
			}
		}
		e.published.Store(v)
		return
	}
	// If no snapshot shares the index, change it in place. Hold gen.mu meanwhile, so that no snapshot can be taken. For
	// a large batch that would delay snapshots too long; then copy the nodes of the index before changing them.
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

// startIndexBuild builds the index of the published generation g in the background. With Options.Quiet it returns only
// when the index is built.
func (e *Engine) startIndexBuild(g *generation) {
	build := func() {
		defer close(g.indexBuild.finished)
		err := e.buildIndex(g)
		if err == nil {
			return
		}
		if !errors.Is(err, ErrClosed) && !errors.Is(err, ErrRestored) {
			e.opts.Logger.Error("build the index of keys: counts will read their range", "dir", e.dir.path, "err", err)
		}
		x := g.indexBuild
		x.mu.Lock()
		defer x.mu.Unlock()
		x.failed, x.backlog = markCorrupt(err), nil
	}
	switch {
	case g.indexBuild == nil:
	case e.opts.Quiet:
		build()
	default:
		e.builders.Go(build)
	}
}

// buildIndex builds the index by reading all keys in steps, each at the revision that is then current. Later changes to
// keys before position, which were already read, come from the backlog. Changes to other keys are in what later steps
// read.
func (e *Engine) buildIndex(g *generation) error {
	var position []byte // all keys before it were read
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

// buildIndexStep reads the next keys from position on, and returns the key at which the next step starts. After the
// last key it sets x.complete, publishes the index and returns true for whole.
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
	// Apply publishes with x.mu held, but Restore without it. Do not replace a view of Restore by this older one.
	if v = e.published.Load(); v.gen != g ||
		!e.published.CompareAndSwap(v, &view{gen: g, state: v.state, records: v.records, index: &given}) {
		return nil, false, ErrRestored
	}
	return nil, true, nil
}

// AwaitKeyIndex waits until the index is built. Snapshots that are taken afterwards count ranges at their own revision
// without reading them. Without Options.KeyIndex it returns nil at once. It fails with the error of ctx, with
// ErrClosed, and with ErrCorrupt if the index could not be built because data is damaged. If the index could not be
// built for another reason, it returns nil, and counting reads the range.
func (e *Engine) AwaitKeyIndex(ctx context.Context) error {
	for {
		g := e.published.Load().gen
		if g.indexBuild == nil {
			return nil
		}
		select {
		case <-g.indexBuild.finished:
			if e.published.Load().gen == g {
				return g.indexBuild.damage()
			}
			continue
		default:
		}
		select {
		case <-g.indexBuild.finished:
		case <-g.done:
			if e.published.Load().gen == g {
				return fmt.Errorf("await key index: %w", g.closedErr)
			}
		case <-ctx.Done():
			return fmt.Errorf("await key index: %w", ctx.Err())
		}
	}
}

// damage returns the error of the index build if the build failed because stored data is corrupt. Otherwise it returns
// nil.
func (x *indexBuild) damage() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if errors.Is(x.failed, ErrCorrupt) {
		return x.failed
	}
	return nil
}

// applyTo stores the new entry of i.key in the index t. If the key was deleted, it removes the key from t.
func (i *indexUpdate) applyTo(t *keyindex.Index) {
	if !i.Live() {
		t.Remove(i.key)
	} else {
		t.Set(i.key, i.Entry)
	}
}

// fillIndex adds up to keysPerStep keys from the reader r to the index t. It returns the key that follows them, or nil
// if there is none.
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

// unreadBytes is the size in bytes from which values that Pebble stores in separate files are not read to build the
// index. Reading them would take longer than the few bytes of metadata are worth. The entry of such a key is partial:
// the first put over the key reads the version.
const unreadBytes = 1 << 10

// entry returns the index entry of the version at the position of r.it. The parameter mod is the revision of this
// version. For a tombstone the entry is the zero Entry.
func (r *reader) entry(mod int64) (keyindex.Entry, error) {
	if v := r.it.LazyValue(); v.Fetcher != nil && v.Len() >= unreadBytes {
		return keyindex.PartialEntry(mod), nil
	}
	h, err := r.keyState(mod)
	return keyindex.NewEntry(h.Meta), err
}
