package mvcc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/errors/oserror"
	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// A directory holds
//
//	LOCK       against a second process
//	CURRENT    the format of the directory and the number of the generation that counts
//	<number>/  one Pebble directory a generation: Restore makes the next one
//
// CURRENT is written anew, synced and renamed into place before the first generation exists and when a restored one is
// complete. Whatever it does not name is left over from a crash and removed by clear.
type directory struct {
	fs   vfs.FS
	path string
	lock io.Closer
}

const (
	directoryFormat = 1
	firstGeneration = 1
	currentName     = "CURRENT"
	currentTemp     = "CURRENT.new"
	currentText     = "trivet mvcc format %d generation %d\n"
)

func (d *directory) generation(number uint64) string {
	return d.fs.PathJoin(d.path, strconv.FormatUint(number, 10))
}

// open locks the directory and returns the number of the current generation.
func (d *directory) open() (number uint64, err error) {
	if err := d.fs.MkdirAll(d.path, 0o700); err != nil {
		return 0, err
	}
	if err := d.sync(d.fs.PathDir(d.path)); err != nil {
		return 0, err
	}
	lock, err := d.fs.Lock(d.fs.PathJoin(d.path, "LOCK"))
	if err != nil {
		return 0, fmt.Errorf("lock, another process may have it: %w", err)
	}
	d.lock = lock
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	number, found, err := d.current()
	if err != nil || found {
		return number, err
	}
	if others, err := d.others(0); err != nil {
		return 0, err
	} else if len(others) > 0 {
		return 0, fmt.Errorf("%w: %s is missing beside generation %d", ErrCorrupt, currentName, others[0])
	}
	return firstGeneration, d.setCurrent(firstGeneration)
}

// clear removes all that does not belong to generation number, once that is known to be whole.
func (d *directory) clear(number uint64) error {
	others, err := d.others(number)
	if err != nil {
		return err
	}
	for _, n := range others {
		if err := d.fs.RemoveAll(d.generation(n)); err != nil {
			return fmt.Errorf("remove old generation: %w", err)
		}
	}
	if err := d.fs.Remove(d.fs.PathJoin(d.path, currentTemp)); err != nil && !oserror.IsNotExist(err) {
		return err
	}
	return nil
}

func (d *directory) close() error { return d.lock.Close() }

// current reads CURRENT.
func (d *directory) current() (number uint64, found bool, err error) {
	f, err := d.fs.Open(d.fs.PathJoin(d.path, currentName))
	if oserror.IsNotExist(err) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	text, err := io.ReadAll(io.LimitReader(f, 1<<10))
	if err = errors.Join(err, f.Close()); err != nil {
		return 0, false, fmt.Errorf("read %s: %w", currentName, err)
	}
	var format int
	if n, err := fmt.Sscanf(string(text), currentText, &format, &number); n >= 1 && format != directoryFormat {
		return 0, false, fmt.Errorf("directory of format %d, this program knows %d: %w", format, directoryFormat, ErrUnknownFormat)
	} else if err != nil || number == 0 {
		return 0, false, fmt.Errorf("%w: %s says %q", ErrCorrupt, currentName, text)
	}
	return number, true, nil
}

// setCurrent durably names the generation that counts.
func (d *directory) setCurrent(number uint64) error {
	temp := d.fs.PathJoin(d.path, currentTemp)
	f, err := d.fs.Create(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("write %s: %w", currentName, err)
	}
	_, err = fmt.Fprintf(f, currentText, directoryFormat, number)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", currentName, err)
	}
	if err := d.fs.Rename(temp, d.fs.PathJoin(d.path, currentName)); err != nil {
		return fmt.Errorf("write %s: %w", currentName, err)
	}
	return d.sync(d.path)
}

// others lists all generations but keep.
func (d *directory) others(keep uint64) ([]uint64, error) {
	names, err := d.fs.List(d.path)
	if err != nil {
		return nil, err
	}
	var found []uint64
	for _, name := range names {
		if n, err := strconv.ParseUint(name, 10, 64); err == nil && n != keep {
			found = append(found, n)
		}
	}
	return found, nil
}

func (d *directory) sync(path string) error {
	f, err := d.fs.OpenDir(path)
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("sync directory %s: %w", path, err)
	}
	return nil
}

// adopt durably makes the files in from generation number, which does not count yet.
func (d *directory) adopt(from string, number uint64) error {
	names, err := d.fs.List(from)
	if err != nil {
		return err
	}
	for _, name := range names {
		f, err := d.fs.Open(d.fs.PathJoin(from, name))
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return fmt.Errorf("sync %s: %w", name, err)
		}
	}
	if err := d.sync(from); err != nil {
		return err
	}
	if err := d.fs.RemoveAll(d.generation(number)); err != nil {
		return err
	}
	if err := d.fs.Rename(from, d.generation(number)); err != nil {
		return err
	}
	if err := d.sync(d.path); err != nil {
		return err
	}
	return d.sync(d.fs.PathDir(from))
}

// generation is one Pebble directory in use.
type generation struct {
	number     uint64
	db         *pebble.DB
	loaded     state // when it was opened
	proposals  *proposals
	leases     leases
	records    records
	freed      atomic.Int64 // bytes that Scrub has removed since the keyspace began, as Size counts them
	scrubbed   scrubbed
	indexing   *indexing // nil without CountIndex
	remembered remembered
	rewriting  atomic.Int32 // of those that defragment: values in files of their own are written anew

	reads readCounts

	// using is held shared while db is in use, and exclusively to close it.
	using sync.RWMutex
	ended error
	done  chan struct{} // closed once ended is set

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
		if g.rewriting.Load() > 0 {
			p.MaxBlobReferenceDepth = 0
		}
		return p
	}
	db, err := pebble.Open(path, o)
	if err != nil {
		return nil, fmt.Errorf("open pebble: %w", marked(err))
	}
	g.db = db
	if e.opts.CountIndex {
		g.indexing = &indexing{ended: make(chan struct{})}
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

func loadState(db *pebble.DB) (state, error) {
	b, closer, err := db.Get([]byte{tableState})
	if errors.Is(err, pebble.ErrNotFound) {
		return state{revision: 1, epoch: 1}, nil
	}
	if err != nil {
		return state{}, fmt.Errorf("read state: %w", marked(err))
	}
	s, err := decodeState(b)
	return s, errors.Join(err, closer.Close())
}

// acquire permits the use of db until release.
func (g *generation) acquire() error {
	g.using.RLock()
	if g.ended != nil {
		g.using.RUnlock()
		return g.ended
	}
	return nil
}

func (g *generation) release() { g.using.RUnlock() }

// retire waits until nobody uses db and closes it; whoever wants to use it later gets the reason.
func (g *generation) retire(reason error) error {
	g.using.Lock()
	defer g.using.Unlock()
	if g.ended != nil {
		return nil
	}
	g.ended = reason
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
			g.pins[v.floor]++
			v.taken = v.taken || index
			g.mu.Unlock()
			return v, nil
		}
		g.mu.Unlock()
		g.release()
	}
}

func (g *generation) unpin(floor int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pins[floor]--; g.pins[floor] == 0 {
		delete(g.pins, floor)
	}
}

// unread is the revision below which nobody reads or will read. Floors only rise, so the lock makes that last.
func (e *Engine) unread(g *generation) int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	v := e.published.Load()
	if v.gen != g {
		return 0
	}
	floor := v.floor
	for pinned := range g.pins {
		floor = min(floor, pinned)
	}
	return floor
}

func (g *generation) pinned() (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, readers := range g.pins {
		n += readers
	}
	return n
}
