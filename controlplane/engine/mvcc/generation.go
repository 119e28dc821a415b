package mvcc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
)

// generation is one Pebble directory in use.
type generation struct {
	number        uint64
	db            *pebble.DB
	loaded        state // when it was opened
	proposals     *proposals
	leases        leases
	records       recordSet
	freed         atomic.Int64 // bytes that Scrub has removed since the keyspace began, as Size counts them
	scrubProgress scrubProgress
	indexBuild    *indexBuild // nil without CountIndex
	hashes        compactionHashes
	defragmenting atomic.Int32 // of those that defragment: values in files of their own are written anew

	// using is held shared while db is in use, and exclusively to close it.
	using     sync.RWMutex
	closedErr error
	done      chan struct{} // closed once ended is set

	mu   sync.Mutex
	pins map[int64]int // open readers by the oldest revision they may read: Scrub leaves that to them
}

func (e *Engine) openGeneration(number uint64) (*generation, error) {
	path, o := e.dir.generation(number), e.pebbleOptions()
	if number == firstGeneration {
		// It may never have been flushed, and then its directory may be gone after a crash.
		if err := e.dir.fs.MkdirAll(path, 0o700); err != nil {
			return nil, err
		}
		if err := e.dir.sync(e.dir.path); err != nil {
			return nil, err
		}
	} else {
		o.ErrorIfNotExists = true
	}
	g := &generation{number: number, pins: map[int64]int{}, done: make(chan struct{})}
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

// acquire permits the use of db until release.
func (g *generation) acquire() error {
	g.using.RLock()
	if g.closedErr != nil {
		g.using.RUnlock()
		return g.closedErr
	}
	return nil
}

func (g *generation) release() { g.using.RUnlock() }

// retire waits until nobody uses db and closes it; whoever wants to use it later gets the reason.
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

// flush waits until all that is in memory now is on disk. The caller has acquired g.
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

// pin keeps Scrub from what can be read in the published state until unpin, and its index, if that is wanted, from
// changing. The caller may use the generation's db, and releases it.
func (e *Engine) pin(index bool) (*view, error) {
	for {
		g := e.published.Load().gen
		if err := g.acquire(); err != nil {
			if e.published.Load().gen != g {
				continue // restored meanwhile
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

func (g *generation) unpin(compactRevision int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pins[compactRevision]--; g.pins[compactRevision] == 0 {
		delete(g.pins, compactRevision)
	}
}

// unread is the revision below which nobody reads or will read. Floors only rise, so the lock makes that last.
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

func (g *generation) pinned() (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, readers := range g.pins {
		n += readers
	}
	return n
}
