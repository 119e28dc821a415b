package mvcc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
)

// generation is an open Pebble database, with the state that was loaded from it. Restore replaces it by a new one.
type generation struct {
	number        uint64
	db            *pebble.DB
	loaded        state // state at the time of opening
	proposals     *proposals
	leases        leases
	records       recordSet
	freed         atomic.Int64 // total size of the versions that Scrub has removed, counted as by Size
	scrubProgress scrubProgress
	indexBuild    *indexBuild // nil without Options.KeyIndex
	reads         readCounts
	values        *valueCache
	hashes        compactionHashes
	defragmenting atomic.Int32 // number of running calls of Defragment: compactions then rewrite separated values

	// using is locked for reading while db is used, and for writing to close db.
	using     sync.RWMutex
	closedErr error
	done      chan struct{} // closed once closedErr is set

	mu   sync.Mutex
	pins map[int64]int // number of open readers by their compact revision; Scrub keeps the data that they can read
}

// openGeneration opens the Pebble database of a generation and loads its state.
func (e *Engine) openGeneration(number uint64) (*generation, error) {
	path, o := e.dir.generation(number), e.pebbleOptions()
	if number == firstGeneration {
		// A crash may have removed the first generation's directory before its first flush: create it again.
		if err := e.dir.fs.MkdirAll(path, 0o700); err != nil {
			return nil, err
		}
		if err := e.dir.sync(e.dir.path); err != nil {
			return nil, err
		}
	} else {
		o.ErrorIfNotExists = true
	}
	g := &generation{
		number: number, pins: map[int64]int{}, done: make(chan struct{}), values: newValueCache(e.opts.ValueCacheBytes),
	}
	usual := o.Experimental.ValueSeparationPolicy
	o.Experimental.ValueSeparationPolicy = func() pebble.ValueSeparationPolicy {
		p := usual()
		if g.defragmenting.Load() > 0 {
			p.MaxBlobReferenceDepth = 0
		}
		return p
	}
	db, err := pebble.Open(path, o)
	if err != nil {
		return nil, fmt.Errorf("open pebble: %w", markCorrupt(err))
	}
	g.db = db
	if e.opts.KeyIndex {
		g.indexBuild = &indexBuild{finished: make(chan struct{})}
	}
	if g.loaded, err = loadState(db); err == nil {
		g.proposals, err = loadProposals(db, g.loaded.proposals)
	}
	if err == nil {
		g.leases, err = loadLeases(db)
	}
	if err == nil {
		g.records, err = loadRecords(db)
	}
	if err == nil {
		err = g.loadFreed()
	}
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return g, nil
}

// acquire keeps db open until release is called. It fails with ErrClosed or ErrRestored once the generation is retired.
func (g *generation) acquire() error {
	g.using.RLock()
	if g.closedErr != nil {
		g.using.RUnlock()
		return g.closedErr
	}
	return nil
}

// release undoes one successful acquire. db can be closed only when each acquire was undone.
func (g *generation) release() { g.using.RUnlock() }

// retire waits until db is not in use and closes it. Later calls of acquire return reason.
func (g *generation) retire(reason error) error {
	g.using.Lock()
	defer g.using.Unlock()
	if g.closedErr != nil {
		return nil
	}
	g.closedErr = reason
	close(g.done)
	if err := g.db.Close(); err != nil {
		return fmt.Errorf("close pebble: %w", err)
	}
	return nil
}

// flush waits until everything in memtables is on disk. The caller must have called acquire.
func (g *generation) flush(ctx context.Context) error {
	flushed, err := g.db.AsyncFlush()
	if err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	select {
	case <-flushed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("flush: %w", ctx.Err())
	}
}

// pin returns the published view and acquires its generation, which the caller must release. Until the caller also
// calls unpin, Scrub keeps all data that the view can read. If index is true, the view's index is not changed any more:
// Apply changes a copy.
func (e *Engine) pin(index bool) (*view, error) {
	for {
		g := e.published.Load().gen
		if err := g.acquire(); err != nil {
			if e.published.Load().gen != g {
				continue // a Restore happened
			}
			return nil, err
		}
		g.mu.Lock()
		if v := e.published.Load(); v.gen == g {
			g.pins[v.compactRevision]++
			v.indexShared = v.indexShared || index
			g.mu.Unlock()
			return v, nil
		}
		g.mu.Unlock()
		g.release()
	}
}

// unpin undoes one call of pin that returned a view with this compact revision.
func (g *generation) unpin(compactRevision int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pins[compactRevision]--; g.pins[compactRevision] == 0 {
		delete(g.pins, compactRevision)
	}
}

// scrubLimit returns the revision below which no reader can read: the lowest compact revision among the current one and
// those of the open readers. Compact revisions only rise, so the result stays valid after the lock is released.
func (e *Engine) scrubLimit(g *generation) int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	v := e.published.Load()
	if v.gen != g {
		return 0
	}
	compactRevision := v.compactRevision
	for pinned := range g.pins {
		compactRevision = min(compactRevision, pinned)
	}
	return compactRevision
}

// pinned returns the number of views that are pinned now.
func (g *generation) pinned() (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, readers := range g.pins {
		n += readers
	}
	return n
}
