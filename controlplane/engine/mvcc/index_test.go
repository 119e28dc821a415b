package mvcc

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// TestIndex changes an index at random beside a sorted slice. Copies that were given away must stay as they were.
func TestIndex(t *testing.T) {
	type pair struct {
		key string
		m   Entry
	}
	type given struct {
		index Index
		model []pair
	}
	byKey := func(p pair, key string) int { return compareStrings(p.key, key) }
	check := func(x *Index, model []pair, rng *rand.Rand) {
		require.Equal(t, int64(len(model)), x.root.count)
		for range 20 {
			key, end := randomKey(rng), randomKey(rng)
			span := [][]byte{[]byte(end), {0}, nil}[rng.IntN(3)]
			var count, newest int64
			for _, p := range model {
				if InRange([]byte(p.key), []byte(key), span) {
					count, newest = count+1, max(newest, p.m.ModRevision())
				}
			}
			gotCount, gotNewest := x.Count([]byte(key), span)
			require.Equal(t, [2]int64{count, newest}, [2]int64{gotCount, gotNewest}, "[%q, %q)", key, span)
			m, ok := x.Find([]byte(key))
			at, there := slices.BinarySearchFunc(model, key, byKey)
			require.Equal(t, there, ok)
			if ok {
				require.Equal(t, model[at].m, m)
			}
		}
	}
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var x Index
		var model []pair
		var kept []given
		for i := range 6000 {
			key := randomKey(rng)
			if seed == 3 && i < 3000 {
				key = fmt.Sprintf("%08d", i) // always at the end
			}
			at, there := slices.BinarySearchFunc(model, key, byKey)
			// First it grows, then it shrinks.
			if rng.IntN(6000) < i {
				x.Remove([]byte(key))
				if there {
					model = slices.Delete(model, at, at+1)
				} else if len(model) > 0 {
					at = rng.IntN(len(model))
					x.Remove([]byte(model[at].key))
					model = slices.Delete(model, at, at+1)
				}
			} else {
				m := Meta{CreateRevision: 1, ModRevision: int64(i) + 1, Version: int64(rng.IntN(9)) + 1, Size: int64(rng.Uint32()), Lease: int64(i % 2)}.entry()
				x.Set([]byte(key), m)
				if there {
					model[at].m = m
				} else {
					model = slices.Insert(model, at, pair{key, m})
				}
			}
			if i%500 == 0 {
				check(&x, model, rng)
			}
			if rng.IntN(200) == 0 {
				kept = append(kept, given{x, slices.Clone(model)})
				x.epoch++
			}
		}
		for _, k := range kept {
			check(&k.index, k.model, rng)
		}
		for _, p := range model {
			x.Remove([]byte(p.key))
		}
		require.Equal(t, child{}, x.root)
	}
}

func compareStrings(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func randomKey(rng *rand.Rand) string {
	return fmt.Sprintf("k%0*d", rng.IntN(3), rng.IntN(2000))
}

// The index takes at most 48 bytes and its length for each key, built in order or at random, also once all were put again.
func TestIndexMemory(t *testing.T) {
	const keys = 100_000
	for name, order := range map[string]func(i int) int{
		"in order": func(i int) int { return i }, "at random": func(i int) int { return i * 7919 % 100_003 },
	} {
		var x Index
		before := heap()
		length := 0
		for round := range 2 {
			for i := range keys {
				key := fmt.Appendf(nil, "some/prefix/%08d", order(i))
				length += len(key) * (1 - round)
				x.Set(key, Meta{CreateRevision: 1, ModRevision: int64(i) + 1, Version: 1}.entry())
				if i%50 == 0 {
					x.epoch++
				}
			}
		}
		taken := int(heap() - before)
		require.Less(t, taken, 48*keys+length, name)
		t.Logf("%s: %.1f bytes and its length a key", name, float64(taken-length)/keys)
		runtime.KeepAlive(&x)
	}
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// The index is built while commands are applied, and again after a restore; counts are exact all the time.
func TestIndexBuilding(t *testing.T) {
	fs := vfs.NewMem()
	e, err := Open(fs, "data", Options{})
	require.NoError(t, err)
	const keys = 3 * keysPerStep
	var cmds []Command
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
				data, err := EncodeTxn(Txn{Ops: []Op{Delete(fmt.Appendf(nil, "key/%05d", rng.IntN(keys)))}})
				require.NoError(t, err)
				before := e.Revision()
				mustApply(t, e, Command{Index: index, Data: data})
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

// BenchmarkCount reads ten of 200,000 keys and counts all, with the index and without.
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
