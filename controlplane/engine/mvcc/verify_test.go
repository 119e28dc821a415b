package mvcc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// flip inverts some bits of a file's byte at an offset. A second call restores the byte.
func flip(t *testing.T, fs vfs.FS, path string, at int64) {
	f, err := fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	var b [1]byte
	_, err = f.ReadAt(b[:], at)
	require.NoError(t, err)
	b[0] ^= 0x55
	_, err = f.WriteAt(b[:], at)
	require.NoError(t, errors.Join(err, f.Close()))
}

// tables returns the paths of the Pebble tables in dir with their sizes in bytes.
func tables(t *testing.T, fs vfs.FS, dir string) map[string]int64 {
	names, err := fs.List(dir)
	require.NoError(t, err)
	found := map[string]int64{}
	for _, name := range names {
		if strings.HasSuffix(name, ".sst") {
			info, err := fs.Stat(fs.PathJoin(dir, name))
			require.NoError(t, err)
			found[fs.PathJoin(dir, name)] = info.Size()
		}
	}
	return found
}

// corruptible returns a file system with an engine's directory data, whose tables contain keys, some with history, and
// with its checkpoint copy.
func corruptible(t *testing.T) *vfs.MemFS {
	fs := vfs.NewMem()
	e := mustOpen(t, fs)
	rng := rand.New(rand.NewPCG(1, 1))
	value := make([]byte, 30)
	for i := range uint64(80) {
		for j := range value {
			value[j] = byte(rng.Uint32())
		}
		mustApply(t, e, put(t, i+1, fmt.Sprintf("key/%03d", i%50), string(value)))
	}
	_, err := e.Checkpoint(context.Background(), "copy")
	require.NoError(t, err)
	require.NoError(t, e.Close())
	return fs
}

// The tables are small, since in each read of a damaged block Pebble searches for a flipped bit for up to a third of a
// second.

// TestFlippedTable flips single bytes of a table and checks that each read returns what it did before, or ErrCorrupt.
func TestFlippedTable(t *testing.T) {
	fs := corruptible(t)
	e := mustOpen(t, fs)
	want, hash := content(t, e), must(e.HashKV(context.Background(), 0))(t)
	require.NoError(t, e.Close())
	corrupt := 0
	for path, size := range tables(t, fs, "data/1") {
		for at := int64(7); at < size; at += max(size/16, 1) {
			flip(t, fs, path, at)
			e, err := Open(fs, "data", Options{Quiet: true, KeyIndex: true})
			if err != nil {
				require.ErrorIs(t, err, ErrCorrupt, "byte %d", at)
				corrupt++
				flip(t, fs, path, at)
				continue
			}
			s := e.Snapshot()
			res, err := s.Range(RangeOptions{Key: []byte{0}, End: []byte{0}})
			if err != nil {
				require.ErrorIs(t, err, ErrCorrupt)
				corrupt++
			} else {
				require.Equal(t, want, contentOf(res))
			}
			if h, err := e.HashKV(context.Background(), 0); err != nil {
				require.ErrorIs(t, err, ErrCorrupt)
			} else {
				require.Equal(t, hash, h)
			}
			for i := range 2 {
				key := fmt.Sprintf("key/%03d", 40*i)
				kv, ok, err := s.Get([]byte(key))
				if err != nil {
					require.ErrorIs(t, err, ErrCorrupt)
				} else {
					require.True(t, ok)
					require.Contains(t, want, fmt.Sprintf("%s=%s ", key, kv.Value))
				}
			}
			w := e.Watch(watch.Options{Key: []byte{0}, End: []byte{0}, FromRevision: 2})
			if _, err := w.Next(context.Background()); err != nil {
				require.ErrorIs(t, err, ErrCorrupt)
			}
			w.Close()
			s.Close()
			require.NoError(t, e.Close())
			flip(t, fs, path, at)
		}
	}
	require.Greater(t, corrupt, 6)
}

// TestFlippedCheckpoint flips single bytes in the tables of a checkpoint. Restore must refuse it with ErrCorrupt, and
// the engine must continue with its state.
func TestFlippedCheckpoint(t *testing.T) {
	fs := corruptible(t)
	e, err := Open(fs, "mine", Options{Quiet: true})
	require.NoError(t, err)
	mustApply(t, e, put(t, 1, "a", "mine"))
	for path, size := range tables(t, fs, "copy") {
		// "copy" shares its files with the directory data, which this test does not open.
		for at := int64(3); at < size; at += max(size/16, 1) {
			flip(t, fs, path, at)
			require.ErrorIs(t, e.Restore("copy"), ErrCorrupt, "byte %d of %d of %s", at, size, path)
			require.Equal(t, "a=mine ", content(t, e))
			flip(t, fs, path, at)
		}
	}
	require.NoError(t, e.Restore("copy"))
	require.Equal(t, int64(81), e.Revision())
	require.NoError(t, e.Close())
}

func contentOf(res RangeResult) string {
	var b strings.Builder
	for _, kv := range res.KVs {
		fmt.Fprintf(&b, "%s=%s ", kv.Key, kv.Value)
	}
	return b.String()
}

// must returns a function that fails the test if err is not nil, and returns v otherwise.
func must[T any](v T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		require.NoError(t, err)
		return v
	}
}
