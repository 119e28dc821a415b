package mvcc

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// TestIndexBuilding checks that counts are exact while the index is built and commands are applied, also after a
// restore.
func TestIndexBuilding(t *testing.T) {
	fs := vfs.NewMem()
	e, err := Open(fs, "data", Options{})
	require.NoError(t, err)
	const keys = 3 * keysPerStep
	var cmds []command.Command
	for i := range uint64(keys) {
		cmds = append(cmds, put(t, i+1, fmt.Sprintf("key/%05d", i), "v"))
	}
	mustApply(t, e, cmds...)
	_, err = e.Checkpoint(context.Background(), "copy")
	require.NoError(t, err)
	require.NoError(t, e.Close())

	e, err = Open(fs, "data", Options{KeyIndex: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	count := func() int64 {
		s := e.Snapshot()
		defer s.Close()
		o := RangeOptions{Key: []byte("key/"), End: []byte("key0"), Limit: 10, WantCount: true}
		res, err := s.Range(o)
		require.NoError(t, err)
		o.Limit = 0
		all, err := s.Range(o)
		require.NoError(t, err)
		require.Equal(t, int64(len(all.KVs)), res.Count)
		require.True(t, res.More)
		require.Equal(t, all.MaxModRevision, res.MaxModRevision)
		return res.Count
	}
	run := func() {
		rng := rand.New(rand.NewPCG(1, 1))
		live := count()
		for i := range 300 {
			index := e.Applied().Index + 1
			if i%3 == 0 {
				data, err := command.EncodeTxn(command.Txn{Ops: []command.Op{command.Delete(fmt.Appendf(nil, "key/%05d", rng.IntN(keys)))}})
				require.NoError(t, err)
				before := e.Revision()
				mustApply(t, e, command.Command{Index: index, Data: data})
				live -= e.Revision() - before
			} else {
				mustApply(t, e, put(t, index, fmt.Sprintf("key/%05d/%d", rng.IntN(keys), i), "new"))
				live++
			}
			if i%50 == 0 {
				require.Equal(t, live, count())
			}
		}
		require.NoError(t, e.AwaitKeyIndex(context.Background()))
		require.NotNil(t, e.published.Load().index)
		require.Equal(t, live, count())
		require.Equal(t, live, e.Stats().Keys)
	}
	run()
	require.NoError(t, e.Restore("copy"))
	run()
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	require.NoError(t, e.Close())
	require.NoError(t, e.AwaitKeyIndex(ended))
}

// BenchmarkCount measures a range that returns ten of 200,000 keys and counts all of them, with the key index and
// without.
func BenchmarkCount(b *testing.B) {
	for _, on := range []bool{true, false} {
		b.Run(fmt.Sprintf("index=%v", on), func(b *testing.B) {
			e := benchEngine(b, 200_000, Options{KeyIndex: on})
			require.NoError(b, e.AwaitKeyIndex(context.Background()))
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				s := e.Snapshot()
				res, err := s.Range(RangeOptions{Key: []byte("key/"), End: []byte("key0"), Limit: 10, WantCount: true})
				s.Close()
				if err != nil || len(res.KVs) != 10 || res.Count != 200_000 {
					b.Fatal(err, len(res.KVs), res.Count)
				}
			}
		})
	}
}

// TestStartLeavesLargeValues checks that the build of the index does not read large values, and that puts, deletes and
// counts of their keys are right nevertheless.
func TestStartLeavesLargeValues(t *testing.T) {
	fs := vfs.NewMem()
	open := func() *Engine {
		e, err := Open(fs, "data", Options{KeyIndex: true})
		require.NoError(t, err)
		require.NoError(t, e.AwaitKeyIndex(context.Background()))
		return e
	}
	e := open()
	const keys = 20
	large := string(bytes.Repeat([]byte("large "), unreadBytes))
	key := func(i int) string { return fmt.Sprintf("key/%02d", i) }
	index := uint64(0)
	apply := func(key, value string) {
		index++
		mustApply(t, e, put(t, index, key, value))
	}
	for i := range keys {
		apply(key(i), "small")
		apply(key(i), large)
	}
	_, err := e.Flush(context.Background())
	require.NoError(t, err)
	before := e.published.Load().state
	require.NoError(t, e.Close())

	e = open()
	defer func() { require.NoError(t, e.Close()) }()
	unread := 0
	for i := range keys {
		if m, ok := e.published.Load().index.Find([]byte(key(i))); ok && m.Partial() {
			unread++
		}
	}
	require.Equal(t, keys, unread)
	require.Equal(t, before, e.published.Load().state)
	apply(key(0), large+"!")
	index++
	data, err := command.EncodeTxn(command.Txn{Ops: []command.Op{command.Delete([]byte(key(1)))}})
	require.NoError(t, err)
	mustApply(t, e, command.Command{Index: index, Data: data})

	after := e.published.Load().state
	require.Equal(t, before.live+1-storedBytes([]byte(key(1)), command.Meta{Size: int64(len(large))}), after.live)
	s := e.Snapshot()
	defer s.Close()
	kv, ok, err := s.Get([]byte(key(0)))
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, [2]int64{2, 3}, [2]int64{kv.CreateRevision, kv.Version})
	m, ok := s.index.Find([]byte(key(0)))
	require.True(t, ok)
	require.False(t, m.Partial(), "the put has read the key's metadata into the index")
	res, err := s.Range(RangeOptions{Key: []byte{0}, End: []byte{0}, CountOnly: true})
	require.NoError(t, err)
	require.Equal(t, int64(keys-1), res.Count)
	require.Equal(t, s.Revision()-1, res.MaxModRevision)
}

// TestIndexOfDamagedData checks that the build of the index fails with ErrCorrupt at a flipped byte, and that later
// changes are then not collected for it.
func TestIndexOfDamagedData(t *testing.T) {
	fs := vfs.NewMem()
	e := mustOpen(t, fs)
	rng, value := rand.New(rand.NewPCG(1, 2)), make([]byte, 500)
	const keys = 2000
	for i := range uint64(keys) {
		for j := range value {
			value[j] = byte(rng.Uint32())
		}
		mustApply(t, e, put(t, i+1, fmt.Sprintf("key/%04d", i), string(value)))
	}
	_, err := e.Checkpoint(context.Background(), "copy")
	require.NoError(t, err)
	require.NoError(t, e.Close())
	all := tables(t, fs, "data/1")
	first := slices.Min(slices.Collect(maps.Keys(all)))
	flip(t, fs, first, all[first]/2)
	e, err = Open(fs, "data", Options{KeyIndex: true})
	require.NoError(t, err)
	defer e.Close()
	require.ErrorIs(t, e.AwaitKeyIndex(context.Background()), ErrCorrupt)
	mustApply(t, e, put(t, keys+1, "key/0000", "new"))
	require.Empty(t, e.published.Load().gen.indexBuild.backlog)
}
