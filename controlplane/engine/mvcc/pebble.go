package mvcc

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// pebbleOptions returns the options with which the engine opens Pebble. All tuning of Pebble is here.
func (e *Engine) pebbleOptions() *pebble.Options {
	const memTables = 3 // one being filled, one being flushed, and one more for a slow disk
	o := &pebble.Options{
		FS:                 e.dir.fs,
		Comparer:           comparer(),
		DisableWAL:         true,
		FormatMajorVersion: pebble.FormatValueSeparation,
		// Pebble takes the memory of memtables from its block cache. So add the size of two memtables: the one that is
		// being filled, and one that is being flushed or kept for reuse. Blocks get the rest.
		CacheSize:    e.opts.CacheBytes + 2*e.opts.MemTableBytes,
		MemTableSize: uint64(e.opts.MemTableBytes),

		MemTableStopWritesThreshold: memTables,
		Logger:                      pebbleLogger{e.opts.Logger},
		EventListener: &pebble.EventListener{
			BackgroundError: func(err error) {
				e.diskErrors.Add(1)
				e.opts.Logger.Error("mvcc background work", "dir", e.dir.path, "err", err)
			},
			// Without this hook, Pebble would end the process when it finds damaged data. With it, only the reader of
			// the data gets an error.
			DataCorruption: func(i pebble.DataCorruptionInfo) {
				e.diskErrors.Add(1)
				e.damage.Add(1)
				e.opts.Logger.Error("mvcc corrupt data", "dir", e.dir.path, "file", i.Path, "err", i.Details)
			},
			WriteStallBegin: func(pebble.WriteStallBeginInfo) { e.writeStalls.Add(1) },
		},
	}
	// Compact level 0 half as often as Pebble does by default. Reads then look into up to twice as many tables, but
	// keys are found in memory. Flushes need not come early either, as there is no write-ahead log to truncate. A put
	// is then written little more than once. Writes are stopped only when compactions have fallen far behind.
	o.L0CompactionThreshold, o.L0StopWritesThreshold = 8, 48
	// Compress the last level, which is rarely written, with zstd, and the levels above it with faster algorithms.
	o.ApplyCompressionSettings(func() pebble.DBCompressionSettings { return pebble.DBCompressionBalanced })
	for i := range o.Levels {
		o.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
		o.Levels[i].BlockSize = 16 << 10
	}
	// Large values stay in the file that they were first written to while compactions move their keys.
	o.Experimental.ValueSeparationPolicy = func() pebble.ValueSeparationPolicy {
		return pebble.ValueSeparationPolicy{
			Enabled: !e.opts.Quiet, MinimumSize: separatedBytes, MaxBlobReferenceDepth: 10,
			TargetGarbageRatio: 0.3, RewriteMinimumAge: time.Minute,
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

// separatedBytes is the size in bytes from which values are stored in separate files. With it, three members that
// overwrite 200,000 keys of 256 bytes write 1.5 KB for each put instead of 2.1 KB, and overwriting values of 64 KiB
// takes a third less time. Ranges cost the same.
const separatedBytes = 256

// keepFiles is a file system that never removes files. Pebble removes obsolete files in the background, which
// Options.Quiet forbids.
type keepFiles struct{ vfs.FS }

// Remove does nothing.
func (keepFiles) Remove(string) error { return nil }

// pebbleLogger logs Pebble's errors. It drops Pebble's informational messages, since Engine.Stats has the statistics.
type pebbleLogger struct{ log *slog.Logger }

// Infof drops the message.
func (pebbleLogger) Infof(string, ...any) {}

// Errorf logs the message.
func (l pebbleLogger) Errorf(format string, args ...any) {
	l.log.Error("pebble", "err", fmt.Sprintf(format, args...))
}

// Fatalf ends the process. Pebble calls it when its manifest can no longer be trusted, and requires that it does not
// return.
func (l pebbleLogger) Fatalf(format string, args ...any) {
	panic("pebble: " + fmt.Sprintf(format, args...))
}
