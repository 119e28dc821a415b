package mvcc

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/vfs"
)

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
