// Package mvcc is one ordered keyspace with a history: revisions, compare-and-swap transactions, etcd's transactions with
// branches and leases, ranges at any revision that is kept, watches from any revision that is kept, compaction. It is a deterministic state machine over Pebble: the
// same commands in the same order give the same state, the same results and the same events on every member. The
// platform's own records and the users' keys each live in an engine of this kind.
//
// It must not know where commands come from or what keys, values and named records mean: no raft, no users, no RPC, no
// clock. Time is what proposers stamped into transactions; who renews a lease, and when it ends, is not its affair.
//
// There are two kinds of transactions. A Txn was decided before it was proposed: what was read is in its guards, which are
// revisions only. A Program is decided when it is applied. Its answers are made only where they are Wanted; whether it is
// refused is the same everywhere.
//
// # Semantics
//
// They are etcd's. The empty keyspace is at revision 1, the first write makes revision 2. A transaction that changes
// something makes one revision; one that changes nothing makes none. A key has a create revision, a mod revision and a
// version, which counts from 1 and starts again after a delete. Compacting at revision R lets go of what only older
// revisions could see: reads and watches from R on stay exact, older ones answer a CompactedError.
//
// # Durability
//
// Pebble runs without a log of its own: the log of commands is the log. The applied index, the revision, the stamped
// time, the floor, the epoch, leases, sizes and the ids of proposals are in the same batch as the data they belong to, so
// after a crash the engine stands exactly between two commands, at or after the last Flush, and the log is replayed from
// Applied().
// Entries may be dropped from the log only below a Position that Flush returned.
//
// # Choices
//
//   - A key's versions lie side by side, newest first, and hold the values; what revisions changed is listed
//     without values, one list a batch: lists differ between members, what they say does not. A range is one scan, a point read one seek behind a bloom filter, and opening reads no index.
//   - Physical removal is not part of applying. EncodeCompact only moves the floor; Scrub removes in bounded pieces, at
//     its own pace on every member, what no permitted read can see. What has been removed already tells where it goes on.
//   - Compaction keeps all of the floor's own revision, with what it replaced, so a watch from the floor misses nothing.
//   - A snapshot that is open keeps its data, whatever is compacted meanwhile. Restore ends snapshots (ErrRestored).
//     Watchers live on: they read on from the restored history, or end with CompactedError when it begins later.
//   - A live watcher is not ended by a compaction that overtakes it while the events it misses are still in memory.
//   - One revision may put and delete a key, and more: etcd allows it across branches. Readers see the last, watchers all;
//     the values of the others are in the lists only. What an event replaced is what the key held before the revision.
//   - Branches are chosen by what the program found, not by what its steps write, as etcd does.
//   - A live key costs memory only with CountIndex. Counts of ranges are exact: from the index at a snapshot's own revision,
//     else by scanning. The index also spares a put the look at what it replaces.
//   - Leases and named records have no history. Records are kept with a snapshot; leases are always as of now.
//   - Sizes for quotas are logical: what was written less what Scrub removed, neither compressed nor rounded to files.
//   - Damaged data is found by checksums. Whoever reads it gets ErrCorrupt, Apply ends with it, Restore refuses it. Pebble
//     looks for a flipped bit first: such a read of a block of 16 KiB costs a third of a second.
//   - Close does not flush; a Flush before it shortens the next replay.
//   - While the disk refuses writes Pebble tries again and Apply goes on, until three memtables are full: then it waits.
//     Stats counts both. A disk that refuses Pebble's manifest ends the process, as Pebble would have it.
package mvcc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/vfs"
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
	CountIndex bool

	// RememberHashes hashes the keyspace in the background when it is compacted, as it was before, and lets HashKV remember
	// that; see there. Scrub waits for it. It reads all keys, but at most some 20 times what is written.
	RememberHashes bool

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
	stage  stage
	failed error // sticky: what Apply left behind cannot be built upon

	published atomic.Pointer[view]
	hub       *hub

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
	records records
	index   *index // of revision; nil while there is none
	taken   bool   // a snapshot has index, which must then not change; guarded by gen.mu
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
	e.hub = newHub(gen.loaded.revision, opts.RecentBytes)
	e.install(gen)
	e.startIndex(gen)
	return e, nil
}

// install makes gen the state that is applied to and read.
func (e *Engine) install(gen *generation) {
	e.stage = stage{
		state: gen.loaded, records: gen.records, leases: gen.leases, proposals: gen.proposals, mostChanges: MaxTxnChanges,
	}
	e.published.Store(&view{gen: gen, state: gen.loaded, records: gen.records})
}

// Applied is the position of the last command that was applied, durable or not.
func (e *Engine) Applied() Position { return e.published.Load().applied }

// Revision is the current revision: 1 when nothing was ever written.
func (e *Engine) Revision() int64 { return e.published.Load().revision }

// Floor is the oldest revision that can be read; 0 when nothing was compacted.
func (e *Engine) Floor() int64 { return e.published.Load().floor }

// LastTime is the highest stamp of any transaction, Unix milliseconds: a proposer stamps this or more.
func (e *Engine) LastTime() int64 { return e.published.Load().time }

// Flush makes what is applied durable and returns a position that is. While the disk refuses writes it waits for ctx.
func (e *Engine) Flush(ctx context.Context) (Position, error) {
	v := e.published.Load()
	if err := v.gen.acquire(); err != nil {
		return Position{}, err
	}
	defer v.gen.release()
	if err := v.gen.flush(ctx); err != nil {
		return Position{}, err
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
	e.hub.close()
	err := e.published.Load().gen.retire(ErrClosed)
	e.builders.Wait()
	return errors.Join(err, e.dir.close())
}

// Stats are figures of the engine at one moment.
type Stats struct {
	Applied      Position
	Revision     int64
	Floor        int64
	Time         int64 // highest stamp, Unix milliseconds
	Keys         int64 // live keys
	DiskBytes    int64 // on disk, history and garbage included
	UnsavedBytes int64 // in memtables, of which a crash may lose the data
	Watchers     int
	RecentBytes  int64 // of events held in memory
	Snapshots    int   // open, and other reads of history under way
	DiskErrors   int64 // of Pebble's background work since Open: while they grow, nothing becomes durable
	WriteStalls  int64 // times that Apply had to wait for Pebble since Open
	Gets         int64 // calls of Snapshot.Get that read a key from Pebble, since Open or Restore
	Ranges       int64 // calls of Snapshot.Range, since Open or Restore
	KeysRead     int64 // keys that these calls returned
}

// Stats returns the figures; those of Pebble are 0 once the engine is closed.
func (e *Engine) Stats() Stats {
	v := e.published.Load()
	s := Stats{
		Applied: v.applied, Revision: v.revision, Floor: v.floor, Time: v.time, Keys: v.keys,
		DiskErrors: e.diskErrors.Load(), WriteStalls: e.writeStalls.Load(),
	}
	reads := &v.gen.reads
	s.Gets, s.Ranges, s.KeysRead = reads.gets.Load(), reads.ranges.Load(), reads.keys.Load()
	s.Watchers, s.RecentBytes = e.hub.stats()
	if v.gen.acquire() == nil {
		defer v.gen.release()
		m := v.gen.db.Metrics()
		s.DiskBytes, s.UnsavedBytes = int64(m.DiskSpaceUsage()), int64(m.MemTable.Size)
		s.Snapshots = v.gen.pinned()
	}
	return s
}

// pebbleOptions is the one place where Pebble is tuned.
func (e *Engine) pebbleOptions() *pebble.Options {
	const memTables = 3 // one that fills, one that is written out and one for when the disk is slow
	o := &pebble.Options{
		FS:                 e.dir.fs,
		Comparer:           comparer(),
		DisableWAL:         true,
		FormatMajorVersion: pebble.FormatValueSeparation,
		// Pebble takes the memory of memtables from its block cache: of the one that fills and the one that is written out or
		// kept for the next. What they do not take yet, blocks do.
		CacheSize:    e.opts.CacheBytes + 2*e.opts.MemTableBytes,
		MemTableSize: uint64(e.opts.MemTableBytes),

		MemTableStopWritesThreshold: memTables,
		Logger:                      pebbleLogger{e.opts.Logger},
		EventListener: &pebble.EventListener{
			BackgroundError: func(err error) {
				e.diskErrors.Add(1)
				e.opts.Logger.Error("mvcc background work", "dir", e.dir.path, "err", err)
			},
			// Without this Pebble would end the process. Whoever reads the data gets the error.
			DataCorruption: func(i pebble.DataCorruptionInfo) {
				e.diskErrors.Add(1)
				e.damage.Add(1)
				e.opts.Logger.Error("mvcc corrupt data", "dir", e.dir.path, "file", i.Path, "err", i.Details)
			},
			WriteStallBegin: func(pebble.WriteStallBeginInfo) { e.writeStalls.Add(1) },
		},
	}
	// Half the compactions of Pebble's default, for reads that look at twice as many tables: there is no log beside them to
	// cut soon, keys are found in memory, and a put is then written a little over once. Writes stop only when compactions
	// cannot keep up at all.
	o.L0CompactionThreshold, o.L0StopWritesThreshold = 8, 48
	// zstd on the last level, which is written rarely, and what is fast elsewhere.
	o.ApplyCompressionSettings(func() pebble.DBCompressionSettings { return pebble.DBCompressionBalanced })
	for i := range o.Levels {
		o.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
		o.Levels[i].BlockSize = 16 << 10
	}
	// Large values stay where they were first written while compactions move their keys.
	o.Experimental.ValueSeparationPolicy = func() pebble.ValueSeparationPolicy {
		return pebble.ValueSeparationPolicy{
			Enabled: !e.opts.Quiet, MinimumSize: separatedBytes, MaxBlobReferenceDepth: 10, TargetGarbageRatio: 0.3, RewriteMinimumAge: time.Minute,
		}
	}
	if e.opts.Quiet {
		o.DisableAutomaticCompactions = true
		o.DisableTableStats = true
		o.L0StopWritesThreshold = 1 << 30
		o.Experimental.ReadSamplingMultiplier = -1
		o.Experimental.FileCacheShards = 1
		o.FS = keepFiles{e.dir.fs}
	}
	return o
}

// separatedBytes is the size from which values lie in files of their own. Three members that overwrite 200k keys of 256
// bytes then write 1.5 KB a put instead of 2.1, and a load that overwrites values of 64 KiB takes a third less time;
// ranges cost the same.
const separatedBytes = 256

// keepFiles never removes what Pebble no longer needs: Pebble does that in the background.
type keepFiles struct{ vfs.FS }

// Remove does nothing.
func (keepFiles) Remove(string) error { return nil }

// pebbleLogger passes on what is wrong; what Pebble does all day is in its metrics.
type pebbleLogger struct{ log *slog.Logger }

// Infof drops the message.
func (pebbleLogger) Infof(string, ...any) {}

// Errorf logs the message.
func (l pebbleLogger) Errorf(format string, args ...any) {
	l.log.Error("pebble", "err", fmt.Sprintf(format, args...))
}

// Fatalf ends the process: Pebble calls it when its manifest can no longer be trusted, and must not return from it.
func (l pebbleLogger) Fatalf(format string, args ...any) {
	panic("pebble: " + fmt.Sprintf(format, args...))
}
