package mvcc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/keyindex"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// Options of an engine. The zero value of each field works.
type Options struct {
	Logger        *slog.Logger // default: discard
	CacheBytes    int64        // of Pebble's block cache; default 64 MiB
	MemTableBytes int64        // of a memtable, of which there can be three; default 64 MiB. They grow from 256 KiB
	RecentBytes   int64        // of recent events kept in memory while there are watchers; default 16 MiB

	// CountIndex keeps all live keys in memory, with what commands and counts need to know of them: up to 48 bytes and its
	// length for each. Puts then read nothing from disk, and counts of ranges at the current revision take no time. It is
	// built in the background after Open and Restore; see AwaitCounts.
	KeyIndex bool

	// RememberHashes hashes the keyspace in the background when it is compacted, as it was before, and lets HashKV remember
	// that; see there. Scrub waits for it. It reads all keys, but at most some 20 times what is written.
	HashOnCompact bool

	// OnLeases is told what a batch did to the leases once readers can see it, and that all may have changed once the
	// state was restored. It is called by the goroutine that applies and must not keep it. Optional.
	OnLeases func(LeaseChanges)

	// Quiet keeps all disk work inside calls: nothing is compacted or deleted in the background, and full memtables
	// are flushed before Apply returns. For simulations that must replay step by step; it wastes disk.
	Quiet bool
}

// EnsureDefaults fills what was left out.
func (o *Options) EnsureDefaults() {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.CacheBytes <= 0 {
		o.CacheBytes = 64 << 20
	}
	if o.MemTableBytes <= 0 {
		o.MemTableBytes = 64 << 20
	}
	if o.RecentBytes <= 0 {
		o.RecentBytes = 16 << 20
	}
}

// Engine is one keyspace. Apply and Restore belong to one goroutine; everything else may be called from any.
type Engine struct {
	dir  directory
	opts Options

	// Owned by the goroutine that calls Apply and Restore.
	applier applier
	failed  error // sticky: what Apply left behind cannot be built upon

	published atomic.Pointer[view]
	hub       *watch.Hub

	builders sync.WaitGroup // of indexes and hashes

	closing   sync.Mutex
	closed    bool
	scrubbing sync.Mutex

	diskErrors  atomic.Int64
	writeStalls atomic.Int64
	damage      atomic.Int64
}

// view is what readers see: it is replaced after every batch.
type view struct {
	gen *generation
	state
	records     recordSet
	index       *keyindex.Index // of revision; nil while there is none
	indexShared bool            // a snapshot has index, which must then not change; guarded by gen.mu
}

// Open opens the engine in dir, which it makes when there is none. A directory of an unknown format is refused with
// ErrUnknownFormat.
func Open(fs vfs.FS, dir string, opts Options) (*Engine, error) {
	opts.EnsureDefaults()
	e := &Engine{opts: opts, dir: directory{fs: fs, path: dir}}
	number, err := e.dir.open()
	if err != nil {
		return nil, fmt.Errorf("open mvcc directory %s: %w", dir, err)
	}
	gen, err := e.openGeneration(number)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open mvcc directory %s: %w", dir, err), e.dir.close())
	}
	if err := e.dir.clear(number); err != nil {
		return nil, errors.Join(fmt.Errorf("open mvcc directory %s: %w", dir, err), gen.retire(ErrClosed), e.dir.close())
	}
	e.hub = watch.NewHub(gen.loaded.revision, opts.RecentBytes, history{e})
	e.install(gen)
	e.startIndexBuild(gen)
	return e, nil
}

// install makes gen the state that is applied to and read.
func (e *Engine) install(gen *generation) {
	e.applier = applier{
		state: gen.loaded, records: gen.records, leases: gen.leases, proposals: gen.proposals, maxChanges: command.MaxTxnChanges,
	}
	e.published.Store(&view{gen: gen, state: gen.loaded, records: gen.records})
}

// Applied is the position of the last command that was applied, durable or not.
func (e *Engine) Applied() command.Position { return e.published.Load().applied }

// Revision is the current revision: 1 when nothing was ever written.
func (e *Engine) Revision() int64 { return e.published.Load().revision }

// Floor is the oldest revision that can be read; 0 when nothing was compacted.
func (e *Engine) CompactRevision() int64 { return e.published.Load().compactRevision }

// LastTime is the highest stamp of any transaction, Unix milliseconds: a proposer stamps this or more.
func (e *Engine) LastTime() int64 { return e.published.Load().time }

// Flush makes what is applied durable and returns a position that is. While the disk refuses writes it waits for ctx.
func (e *Engine) Flush(ctx context.Context) (command.Position, error) {
	v := e.published.Load()
	if err := v.gen.acquire(); err != nil {
		return command.Position{}, err
	}
	defer v.gen.release()
	if err := v.gen.flush(ctx); err != nil {
		return command.Position{}, err
	}
	return v.applied, nil
}

// Close ends watchers and snapshots with ErrClosed and closes the files, flushing nothing.
func (e *Engine) Close() error {
	e.closing.Lock()
	defer e.closing.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	e.hub.Close()
	err := e.published.Load().gen.retire(ErrClosed)
	e.builders.Wait()
	return errors.Join(err, e.dir.close())
}

// Stats are figures of the engine at one moment.
type Stats struct {
	Applied         command.Position
	Revision        int64
	CompactRevision int64
	Time            int64 // highest stamp, Unix milliseconds
	Keys            int64 // live keys
	DiskBytes       int64 // on disk, history and garbage included
	UnsavedBytes    int64 // in memtables, of which a crash may lose the data
	Watchers        int
	RecentBytes     int64 // of events held in memory
	Snapshots       int   // open, and other reads of history under way
	DiskErrors      int64 // of Pebble's background work since Open: while they grow, nothing becomes durable
	WriteStalls     int64 // times that Apply had to wait for Pebble since Open
}

// Stats returns the figures; those of Pebble are 0 once the engine is closed.
func (e *Engine) Stats() Stats {
	v := e.published.Load()
	s := Stats{
		Applied: v.applied, Revision: v.revision, CompactRevision: v.compactRevision, Time: v.time, Keys: v.keys,
		DiskErrors: e.diskErrors.Load(), WriteStalls: e.writeStalls.Load(),
	}
	s.Watchers, s.RecentBytes = e.hub.Stats()
	if v.gen.acquire() == nil {
		defer v.gen.release()
		m := v.gen.db.Metrics()
		s.DiskBytes, s.UnsavedBytes = int64(m.DiskSpaceUsage()), int64(m.MemTable.Size)
		s.Snapshots = v.gen.pinned()
	}
	return s
}
