package raftlog

import (
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// TestPreallocatedLogs crashes a store with preallocated log files again and again, after records of different lengths.
// The store must then have exactly the records that were synced.
func TestPreallocatedLogs(t *testing.T) {
	fs := vfs.NewCrashableMem()
	rng := rand.New(rand.NewPCG(1, 2))
	const bytes = 256 << 10
	for life := range 20 {
		e, err := OpenEngine(preallocatingFS{fs, bytes}, "/log", true, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		files, err := fs.List("/log")
		require.NoError(t, err)
		long := 0
		for _, name := range files {
			if filepath.Ext(name) == ".log" {
				info, err := fs.Stat(fs.PathJoin("/log", name))
				require.NoError(t, err)
				require.GreaterOrEqual(t, info.Size(), int64(bytes))
				long++
			}
		}
		require.Positive(t, long)
		for i := range life {
			v, err := e.get([]byte{'x', byte(i)})
			require.NoError(t, err)
			require.NotNil(t, v, "write %d is missing after restart %d", i, life)
		}
		v, err := e.get([]byte{'x', byte(life)})
		require.NoError(t, err)
		require.Nil(t, v)
		b := e.db.NewBatch()
		require.NoError(t, b.Set([]byte{'x', byte(life)}, make([]byte, rng.IntN(100_000)), nil))
		require.NoError(t, e.Commit(b))
		require.NoError(t, e.db.Set([]byte{'y'}, make([]byte, rng.IntN(1000)), pebble.NoSync))
		next := fs.CrashClone(vfs.CrashCloneCfg{})
		require.NoError(t, e.Close())
		fs = next
	}
}
