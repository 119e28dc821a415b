package mvcc

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// countingFS is a file system that counts the bytes written to files created through it.
type countingFS struct {
	vfs.FS
	written *atomic.Int64
}

func (c countingFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := c.FS.Create(name, category)
	return countingFile{f, c.written}, err
}

type countingFile struct {
	vfs.File
	written *atomic.Int64
}

func (f countingFile) Write(b []byte) (int, error) {
	f.written.Add(int64(len(b)))
	return f.File.Write(b)
}

// putOf returns the Data of a command that puts one key as the key-value service does.
func putOf(b *testing.B, key int, value []byte) []byte {
	data, err := command.EncodeProgram(command.Program{Steps: []command.Step{{Kind: command.StepPut, Key: benchKey(key), Value: value}}})
	require.NoError(b, err)
	return data
}

// BenchmarkProgramPut measures Apply with programs of one put of 256 bytes. All values are the same, as in etcd's
// benchmark, or random. The reported bytes written include flushes, compactions and a flush at the end. Run it with
// -benchtime=1000000x.
func BenchmarkProgramPut(b *testing.B) {
	for _, keys := range []int{1_000_000, 200_000} {
		for _, values := range []string{"same", "random"} {
			for _, batch := range []int{1, 10, 100} {
				b.Run(fmt.Sprintf("keys=%d/values=%s/batch=%d", keys, values, batch), func(b *testing.B) {
					benchmarkPuts(b, keys, batch, values == "same")
				})
			}
		}
	}
}

func benchmarkPuts(b *testing.B, keys, batch int, same bool) {
	var bytes atomic.Int64
	e, err := Open(countingFS{vfs.Default, &bytes}, b.TempDir(), benchOptions())
	require.NoError(b, err)
	defer func() { require.NoError(b, e.Close()) }()
	rng := rand.New(rand.NewPCG(1, 1))
	value := make([]byte, 256)
	var index uint64
	var spent time.Duration
	put := func(n int, key func(i int) int) {
		const prepared = 20_000 // encoded outside of the measured time, since proposers do that
		for done := 0; done < n; {
			b.StopTimer()
			cmds := make([]command.Command, min(prepared, n-done))
			for i := range cmds {
				if !same || index == 0 {
					for j := range value {
						value[j] = byte(rng.Uint32())
					}
				}
				index++
				cmds[i] = command.Command{Index: index, Term: 1, Data: putOf(b, key(done+i), value), WantSteps: i%3 == 0}
			}
			done += len(cmds)
			b.StartTimer()
			began := processorTime(b)
			for len(cmds) > 0 {
				size := min(batch, len(cmds))
				if _, err := e.Apply(cmds[:size]); err != nil {
					b.Fatal(err)
				}
				cmds = cmds[size:]
			}
			spent += processorTime(b) - began
		}
	}
	if keys < 1_000_000 {
		// The keys must exist, so that puts overwrite them.
		put(keys, func(i int) int { return i })
		_, err = e.Flush(context.Background())
		require.NoError(b, err)
	}
	bytes.Store(0)
	spent = 0
	b.ReportAllocs()
	b.ResetTimer()
	if keys < 1_000_000 {
		put(b.N, func(int) int { return rng.IntN(keys) })
	} else {
		put(b.N, func(i int) int { return i * 7919 % 1_000_003 })
	}
	b.StopTimer()
	_, err = e.Flush(context.Background())
	require.NoError(b, err)
	b.ReportMetric(float64(bytes.Load())/float64(b.N), "written-B/op")
	b.ReportMetric(float64(spent)/float64(b.N), "cpu-ns/op")
}

// processorTime returns the CPU time of the process. Unlike elapsed time, it includes background work and excludes
// other load on the machine.
func processorTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func benchOptions() Options { return Options{KeyIndex: true} }
