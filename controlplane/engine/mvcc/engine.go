package mvcc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/keyindex"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// Options configures an engine. The zero value of each field is valid.
type Options struct {
	Logger        *slog.Logger // default: discard
	CacheBytes    int64        // size of Pebble's block cache; default 64 MiB
	MemTableBytes int64        // maximum size of a memtable, of which up to three exist; default 64 MiB. They start at 256 KiB
	RecentBytes   int64        // maximum bytes of recent events in memory for watchers; default 16 MiB

	// KeyIndex makes the engine hold an index of all live keys in memory (package keyindex): up to 48 bytes, and the
	// key's length, for each key. With it, most puts read nothing from disk, and counting a range at the current
	// revision takes O(log n). It is built in the background after Open and Restore; see AwaitKeyIndex.
	KeyIndex bool

	// ValueCacheBytes is the maximum size, in bytes, of a cache of the keys and values that Snapshot.Get has read; 0
	// means no cache. It is used only with KeyIndex.
	ValueCacheBytes int64

	// HashOnCompact makes each compaction start, in the background, a hash of the keyspace as it was before. HashKV
	// returns it for the compaction's revision. Until the hash is computed, Scrub keeps the data for it. Each hash
	// reads all keys. In a keyspace of more than 16 MiB, compactions after few writes get no hash, so that all hashes
	// together read at most about 20 times the bytes that were written.
	HashOnCompact bool

	// OnCommit, if set, is called after each commit of a batch of applied entries with the time that the commit took. It
	// runs on the goroutine that calls Apply.
	OnCommit func(time.Duration)

	// OnLeases, if set, is called after each batch that changed leases, and after Restore. Readers can then already see
	// the changes. OnLeases runs on the goroutine that calls Apply or Restore, so it must not block. It must not use
	// its argument after it has returned.
	OnLeases func(LeaseChanges)

	// Quiet makes the engine do all disk work within calls of its methods: Pebble compacts and deletes nothing in the
	// background, and full memtables are flushed before Apply returns. It is for simulations that must replay exactly;
	// it wastes disk space.
	Quiet bool
}

// EnsureDefaults replaces zero values by the defaults.
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

// Engine is a multi-version key-value store in one directory. Apply and Restore must be called from one goroutine; all
// other methods may be called from any.
type Engine struct {
	dir  directory
	opts Options

	// Only the goroutine that calls Apply and Restore uses the fields applier and failed.
	applier applier
	failed  error // error of an earlier Apply, which every later Apply returns; nil: there was none

	published atomic.Pointer[view]
	hub       *watch.Hub

	builders sync.WaitGroup // background builds of indexes and hashes

	closing   sync.Mutex
	closed    bool
	scrubbing sync.Mutex

	diskErrors  atomic.Int64
	writeStalls atomic.Int64
	damage      atomic.Int64
}

// view is the state that readers use. Each Apply publishes a new view; so do Restore and the end of an index build.
type view struct {
	gen *generation
	state
	records     recordSet
	index       *keyindex.Index // key index at the view's revision; nil: not built
	indexShared bool            // a snapshot uses index, which must not change any more; guarded by gen.mu
}

// Open opens the engine in dir, and creates dir if it does not exist. It fails with command.ErrUnknownFormat for a
// directory that a newer version wrote, and with ErrCorrupt for one with damaged data.
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

// install makes gen the generation that Apply changes and that readers see.
func (e *Engine) install(gen *generation) {
	e.applier = applier{
		state: gen.loaded, records: gen.records, leases: gen.leases, proposals: gen.proposals, maxChanges: command.MaxTxnChanges,
		onCommit: e.opts.OnCommit,
	}
	e.published.Store(&view{gen: gen, state: gen.loaded, records: gen.records})
}

// Applied returns the raft index and term of the last applied command, which need not be durable yet.
func (e *Engine) Applied() command.Position { return e.published.Load().applied }

// Revision returns the current revision: 1 when nothing was ever written.
func (e *Engine) Revision() int64 { return e.published.Load().revision }

// CompactRevision returns the oldest revision that can be read; 0 when nothing was compacted.
func (e *Engine) CompactRevision() int64 { return e.published.Load().compactRevision }

// LastTime returns the highest time stamp of all transactions, in Unix milliseconds. The proposer of a new transaction
// must set its Time to this time or a later one.
func (e *Engine) LastTime() int64 { return e.published.Load().time }

// Flush makes all commands that were applied before the call durable, and returns the position of the last of them.
// While the disk refuses writes, it waits until ctx ends.
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

// Close ends watchers and snapshots with ErrClosed and closes the files. It does not flush.
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

// Stats are counters and sizes of an Engine, for monitoring.
type Stats struct {
	Applied         command.Position
	Revision        int64
	CompactRevision int64
	Time            int64 // highest time stamp, Unix milliseconds
	Keys            int64 // number of live keys
	DiskBytes       int64 // bytes on disk, with old versions and data that Pebble has not yet deleted
	UnsavedBytes    int64 // bytes in memtables; a crash loses them, and they are applied again from the raft log
	Watchers        int
	RecentBytes     int64 // bytes of the events that are in memory for watchers
	Snapshots       int   // open snapshots and other reads of history
	DiskErrors      int64 // errors of Pebble's background work since Open; while the number grows, nothing becomes durable
	WriteStalls     int64 // how often Apply had to wait for Pebble since Open
	Gets            int64 // calls of Snapshot.Get that read a key from Pebble, since Open or Restore
	Ranges          int64 // calls of Snapshot.Range, since Open or Restore
	KeysRead        int64 // keys that these calls returned
}

// Stats returns the engine's current Stats. DiskBytes, UnsavedBytes and Snapshots are 0 once the engine is closed.
func (e *Engine) Stats() Stats {
	v := e.published.Load()
	s := Stats{
		Applied: v.applied, Revision: v.revision, CompactRevision: v.compactRevision, Time: v.time, Keys: v.keys,
		DiskErrors: e.diskErrors.Load(), WriteStalls: e.writeStalls.Load(),
	}
	reads := &v.gen.reads
	s.Gets, s.Ranges, s.KeysRead = reads.gets.Load(), reads.ranges.Load(), reads.keys.Load()
	s.Watchers, s.RecentBytes = e.hub.Stats()
	if v.gen.acquire() == nil {
		defer v.gen.release()
		m := v.gen.db.Metrics()
		s.DiskBytes, s.UnsavedBytes = int64(m.DiskSpaceUsage()), int64(m.MemTable.Size)
		s.Snapshots = v.gen.pinned()
	}
	return s
}
