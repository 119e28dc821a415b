package mvcc

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
)

// benchEngine returns an engine on disk with n flushed keys of 256 bytes each.
func benchEngine(b *testing.B, n int, o Options) *Engine {
	e, err := Open(vfs.Default, b.TempDir(), o)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, e.Close()) })
	value := make([]byte, 256)
	cmds := make([]command.Command, 0, 1000)
	for i := range n {
		cmds = append(cmds, benchPut(b, uint64(i)+1, i, value))
		if len(cmds) == cap(cmds) || i == n-1 {
			_, err := e.Apply(cmds)
			require.NoError(b, err)
			cmds = cmds[:0]
		}
	}
	_, err = e.Flush(context.Background())
	require.NoError(b, err)
	return e
}

func benchKey(i int) []byte { return fmt.Appendf(nil, "key/%08d", i) }

func benchPut(b *testing.B, index uint64, key int, value []byte) command.Command {
	data, err := command.EncodeTxn(command.Txn{Time: 1, Ops: []command.Op{command.Put(benchKey(key), value)}})
	require.NoError(b, err)
	c := command.Command{Index: index, Term: 1, Data: data}
	binary.BigEndian.PutUint64(c.ID[:], index)
	c.ID[15] = 1
	return c
}

// written returns the bytes that Pebble has written to disk by flushes and compactions since it was opened.
func written(e *Engine) uint64 {
	total := e.published.Load().gen.db.Metrics().Total()
	return total.TableBytesFlushed + total.TableBytesCompacted
}

// BenchmarkPut measures Apply with puts of 256 bytes over 200,000 keys, in batches of 1, 10 and 100 commands.
func BenchmarkPut(b *testing.B) {
	for _, size := range []int{1, 10, 100} {
		b.Run(fmt.Sprintf("batch=%d", size), func(b *testing.B) {
			e := benchEngine(b, 200_000, Options{})
			rng := rand.New(rand.NewPCG(1, 1))
			// The time to encode commands is not measured, since proposers do that.
			const prepared = 20_000
			cmds := make([]command.Command, prepared)
			for i := range cmds {
				value := make([]byte, 256)
				for j := range value {
					value[j] = byte(rng.Uint32())
				}
				cmds[i] = benchPut(b, 0, rng.IntN(200_000), value)
			}
			index := e.Applied().Index
			before := written(e)
			b.ReportAllocs()
			b.ResetTimer()
			for done := 0; done < b.N; {
				from := done % (prepared - size)
				batch := cmds[from : from+min(size, b.N-done)]
				for i := range batch {
					index++
					batch[i].Index = index
					binary.BigEndian.PutUint64(batch[i].ID[:], index)
				}
				if _, err := e.Apply(batch); err != nil {
					b.Fatal(err)
				}
				done += len(batch)
			}
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "puts/s")
			_, err := e.Flush(context.Background())
			require.NoError(b, err)
			b.ReportMetric(float64(written(e)-before)/float64(b.N), "written-B/op")
		})
	}
}

// BenchmarkTransaction measures transactions like the update of a platform record: a range guard, guards of two keys,
// three puts.
func BenchmarkTransaction(b *testing.B) {
	e := benchEngine(b, 200_000, Options{})
	value := make([]byte, 256)
	index := e.Applied().Index
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		k := i * 10 % 190_000
		s := e.Snapshot()
		o := RangeOptions{Key: benchKey(k), End: benchKey(k + 10)}
		res, err := s.Range(o)
		if err != nil {
			b.Fatal(err)
		}
		data, err := command.EncodeTxn(command.Txn{
			Guards: []command.Guard{o.Guard(res), {Key: res.KVs[0].Key, ModRevision: res.KVs[0].ModRevision}, {Key: []byte("none")}},
			Ops:    []command.Op{command.Put(benchKey(k), value), command.Put(benchKey(k+1), value), command.Put(benchKey(k+2), value)},
		})
		if err != nil {
			b.Fatal(err)
		}
		s.Close()
		index++
		r, err := e.Apply([]command.Command{{Index: index, Data: data}})
		if err != nil || r[0].Conflict {
			b.Fatal(r, err)
		}
	}
}

// BenchmarkGet measures reads of single keys, with a snapshot for each read or one snapshot for all.
func BenchmarkGet(b *testing.B) {
	e := benchEngine(b, 200_000, Options{})
	get := func(b *testing.B, s *Snapshot, key []byte, want bool) {
		if _, ok, err := s.Get(key); err != nil || ok != want {
			b.Fatal(ok, err)
		}
	}
	b.Run("own snapshot", func(b *testing.B) {
		b.ReportAllocs()
		for i := range b.N {
			s := e.Snapshot()
			get(b, s, benchKey(i*7919%200_000), true)
			s.Close()
		}
	})
	for name, key := range map[string]func(i int) []byte{
		"present": func(i int) []byte { return benchKey(i * 7919 % 200_000) },
		"absent":  func(i int) []byte { return append(benchKey(i*7919%200_000), 'x') },
	} {
		b.Run(name, func(b *testing.B) {
			s := e.Snapshot()
			defer s.Close()
			b.ReportAllocs()
			for i := range b.N {
				get(b, s, key(i), name == "present")
			}
		})
	}
}

// BenchmarkRange measures reads of 100 keys, each with 1 or 20 versions.
func BenchmarkRange(b *testing.B) {
	for _, versions := range []int{1, 20} {
		b.Run(fmt.Sprintf("versions=%d", versions), func(b *testing.B) {
			const keys = 10_000
			e := benchEngine(b, keys, Options{})
			value := make([]byte, 256)
			index := e.Applied().Index
			for range versions - 1 {
				cmds := make([]command.Command, keys)
				for i := range cmds {
					index++
					cmds[i] = benchPut(b, index, i, value)
				}
				_, err := e.Apply(cmds)
				require.NoError(b, err)
			}
			_, err := e.Flush(context.Background())
			require.NoError(b, err)
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				s := e.Snapshot()
				res, err := s.Range(RangeOptions{Key: benchKey(i * 101 % (keys - 100)), End: []byte{0}, Limit: 100})
				if err != nil || len(res.KVs) != 100 {
					b.Fatal(err)
				}
				s.Close()
			}
		})
	}
}

// BenchmarkWatch measures puts while 20,000 watchers watch other keys, and while 100 watchers receive the events.
func BenchmarkWatch(b *testing.B) {
	const n = 10_000
	value := make([]byte, 256)
	b.Run(fmt.Sprintf("others=%d", n), func(b *testing.B) {
		e := benchEngine(b, 1, Options{})
		for i := range n {
			defer e.Watch(watch.Options{Key: benchKey(i + 1)}).Close()
			defer e.Watch(watch.Options{Key: benchKey(i + 1), End: benchKey(i + 2)}).Close()
		}
		index := e.Applied().Index
		b.ReportAllocs()
		for b.Loop() {
			index++
			if _, err := e.Apply([]command.Command{benchPut(b, index, 0, value)}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("same=100", func(b *testing.B) {
		e := benchEngine(b, 1, Options{})
		var wg sync.WaitGroup
		index := e.Applied().Index
		last := int64(b.N) + e.Revision()
		for range 100 {
			w := e.Watch(watch.Options{Key: []byte("key/"), End: []byte("key0")})
			wg.Go(func() {
				defer w.Close()
				for {
					batch, err := w.Next(context.Background())
					if err != nil {
						b.Error(err)
						return
					}
					if batch.Revision >= last {
						return
					}
				}
			})
		}
		b.ReportAllocs()
		b.ResetTimer()
		for range b.N {
			index++
			if _, err := e.Apply([]command.Command{benchPut(b, index, 0, value)}); err != nil {
				b.Fatal(err)
			}
		}
		wg.Wait()
		b.ReportMetric(float64(b.N)*100/b.Elapsed().Seconds(), "events/s")
	})
}
