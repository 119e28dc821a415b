package keyindex

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// TestIndex changes an Index at random and checks that it finds and counts the same keys as a sorted slice. Copies made
// before a Freeze must not change.
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
				if command.InRange([]byte(p.key), []byte(key), span) {
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
				key = fmt.Sprintf("%08d", i) // after all other keys
			}
			at, there := slices.BinarySearchFunc(model, key, byKey)
			// Removals become more frequent, so that the index first grows and then shrinks.
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
				m := NewEntry(command.Meta{CreateRevision: 1, ModRevision: int64(i) + 1, Version: int64(rng.IntN(9)) + 1, Size: int64(rng.Uint32()), Lease: int64(i % 2)})
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
				x.Freeze()
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

// TestIndexMemory checks that a key takes at most 48 bytes and its length, whether keys are inserted in order or at
// random, and also after all keys were put again.
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
				x.Set(key, NewEntry(command.Meta{CreateRevision: 1, ModRevision: int64(i) + 1, Version: 1}))
				if i%50 == 0 {
					x.Freeze()
				}
			}
		}
		taken := int(heap() - before)
		require.Less(t, taken, 48*keys+length, name)
		t.Logf("%s: %.1f bytes per key, plus its length", name, float64(taken-length)/keys)
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
