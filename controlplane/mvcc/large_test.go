package mvcc

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// Large values lie in files beside the tables. They survive flushes, compactions, closing and a checkpoint, and a flipped
// byte in such a file is noticed before the checkpoint takes the state's place.
func TestLargeValues(t *testing.T) {
	fs := vfs.NewMem()
	open := func(dir string) *Engine {
		e, err := Open(fs, dir, Options{CountIndex: true})
		require.NoError(t, err)
		return e
	}
	e := open("data")
	rng := rand.New(rand.NewPCG(1, 1))
	want := map[string][]byte{}
	index := uint64(0)
	for round := range 6 {
		for i := range 40 {
			key := fmt.Sprintf("key/%02d", i)
			if round > 0 && rng.IntN(3) == 0 {
				continue
			}
			value := make([]byte, separatedBytes/2+rng.IntN(2*separatedBytes))
			for j := range value {
				value[j] = byte(rng.Uint32())
			}
			index++
			mustApply(t, e, put(t, index, key, string(value)))
			want[key] = value
		}
		_, err := e.Flush(context.Background())
		require.NoError(t, err)
	}
	require.NoError(t, e.Defragment(context.Background()))
	same := func(e *Engine) {
		t.Helper()
		s := e.Snapshot()
		defer s.Close()
		res, err := s.Range(RangeOptions{Key: []byte{0}, End: []byte{0}})
		require.NoError(t, err)
		require.Len(t, res.KVs, len(want))
		for _, kv := range res.KVs {
			require.True(t, bytes.Equal(want[string(kv.Key)], kv.Value), "%s", kv.Key)
		}
	}
	same(e)
	require.NoError(t, e.Close())
	e = open("data")
	same(e)
	_, err := e.Checkpoint(context.Background(), "copy")
	require.NoError(t, err)

	names, err := fs.List("copy")
	require.NoError(t, err)
	other := open("other")
	flipped := 0
	for _, name := range names {
		if !strings.HasSuffix(name, ".blob") {
			continue
		}
		path := fs.PathJoin("copy", name)
		info, err := fs.Stat(path)
		require.NoError(t, err)
		for _, at := range []int64{1, info.Size() / 3, info.Size() / 2} {
			flip(t, fs, path, at)
			require.ErrorIs(t, other.Restore("copy"), ErrCorrupt, "byte %d of %s", at, name)
			flip(t, fs, path, at)
			flipped++
		}
	}
	require.NotZero(t, flipped, "no value lies beside the tables")
	require.NoError(t, other.Restore("copy"))
	same(other)
	require.NoError(t, other.Close())
	same(e)
	require.NoError(t, e.Close())
}
