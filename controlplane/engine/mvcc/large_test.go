package mvcc

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// TestLargeValues checks that values in separate files survive flushes, compactions, closing and a checkpoint, and that
// Restore refuses a checkpoint with a flipped byte in such a file.
func TestLargeValues(t *testing.T) {
	fs := vfs.NewMem()
	open := func(dir string) *Engine {
		e, err := Open(fs, dir, Options{KeyIndex: true})
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
	require.NotZero(t, flipped, "no value is in a blob file")
	require.NoError(t, other.Restore("copy"))
	same(other)
	require.NoError(t, other.Close())
	same(e)
	require.NoError(t, e.Close())
}

// TestDefragmentWhileWriting checks that Defragment gives the space of large and small values back, while commands are
// applied, none of which waits for Pebble.
func TestDefragmentWhileWriting(t *testing.T) {
	for _, size := range []int{separatedBytes / 4, 16 * separatedBytes} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			ctx := t.Context()
			e := newEngine(t)
			value := make([]byte, size)
			write := func() {
				for j := range value {
					value[j] = byte(rand.Uint32())
				}
				index := e.Applied().Index + 1
				mustApply(t, e, put(t, index, fmt.Sprintf("key/%02d", index%50), string(value)))
			}
			for range 2 << 20 / size {
				write()
			}
			_, err := e.Flush(ctx)
			require.NoError(t, err)
			before := e.Stats().DiskBytes
			mustApply(t, e, command.Command{Index: e.Applied().Index + 1, Data: command.EncodeCompact(e.Revision())})
			scrubAll(t, e)
			// An ordinary compaction would not help: the unused space is inside of files that Pebble keeps.
			require.NoError(t, e.published.Load().gen.db.Compact(ctx, []byte{0}, []byte{0xff}, false))
			// Much less is written during Defragment than it frees. If it ends before anything was written, it is
			// repeated.
			meanwhile, most := 0, 1<<19/size
			for rounds := 0; meanwhile < 2; rounds++ {
				require.Less(t, rounds, 100, "no command was applied during 100 calls of Defragment")
				done := make(chan error, 1)
				go func() { done <- e.Defragment(ctx) }()
				for len(done) == 0 && meanwhile < most {
					write()
					meanwhile++
				}
				require.NoError(t, <-done)
			}
			require.Zero(t, e.Stats().WriteStalls)
			// Pebble removes replaced files shortly after the compaction.
			require.Eventually(t, func() bool { return e.Stats().DiskBytes < before/2 }, 20*time.Second, time.Millisecond)
			s := e.Snapshot()
			defer s.Close()
			res, err := s.Range(RangeOptions{Key: []byte{0}, End: []byte{0}, CountOnly: true})
			require.NoError(t, err)
			require.EqualValues(t, 50, res.Count)
		})
	}
}
