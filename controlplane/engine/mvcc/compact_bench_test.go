package mvcc

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// BenchmarkCompact writes 2 GB in values of 64 KiB over 4096 keys and compacts. It measures how long puts of 256 bytes,
// one at a time, take while Scrub and Pebble remove the history. Run it with -benchtime=1x.
func BenchmarkCompact(b *testing.B) {
	for range b.N {
		e, err := Open(vfs.Default, b.TempDir(), Options{KeyIndex: true})
		require.NoError(b, err)
		const size, keys, total = 64 << 10, 4096, 2 << 30
		rng := rand.New(rand.NewPCG(1, 1))
		value := make([]byte, size)
		index := uint64(0)
		apply := func(value []byte) time.Duration {
			index++
			c := command.Command{Index: index, Term: 1, Data: putOf(b, int(index)%keys, value)}
			began := time.Now()
			if _, err := e.Apply([]command.Command{c}); err != nil {
				b.Fatal(err)
			}
			return time.Since(began)
		}
		var filling []time.Duration
		for range total / size {
			for j := 0; j < len(value); j += 8 {
				value[j], value[j+1], value[j+3] = byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32())
			}
			filling = append(filling, apply(value))
		}
		before := e.Stats().DiskBytes
		index++
		_, err = e.Apply([]command.Command{{Index: index, Term: 1, Data: command.EncodeCompact(e.Revision())}})
		require.NoError(b, err)
		ctx, cancel := context.WithCancel(context.Background())
		scrubbed := make(chan error)
		go func() {
			for {
				if done, err := e.Scrub(ctx, 1000); done || err != nil {
					scrubbed <- err
					return
				}
			}
		}()
		var took []time.Duration
		small := make([]byte, 256)
		var finished bool
		var last time.Time
		for !finished || time.Since(last) < 5*time.Second {
			took = append(took, apply(small))
			select {
			case err := <-scrubbed:
				require.NoError(b, err)
				finished, last = true, time.Now()
			default:
			}
			time.Sleep(200 * time.Microsecond)
		}
		_, err = e.Flush(ctx)
		require.NoError(b, err)
		for end := time.Now().Add(15 * time.Second); time.Now().Before(end); {
			took = append(took, apply(small))
			time.Sleep(200 * time.Microsecond)
		}
		cancel()
		slices.Sort(took)
		slices.Sort(filling)
		b.ReportMetric(float64(took[len(took)-1])/1e6, "longest-ms")
		b.ReportMetric(float64(took[len(took)*999/1000])/1e6, "p99.9-ms")
		b.ReportMetric(float64(filling[len(filling)-1])/1e6, "longest-fill-ms")
		b.ReportMetric(float64(before)/(1<<20), "MB-before")
		b.ReportMetric(float64(e.Stats().DiskBytes)/(1<<20), "MB-after")
		require.NoError(b, e.Close())
	}
}
