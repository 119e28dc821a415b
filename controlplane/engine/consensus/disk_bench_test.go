package consensus

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// written returns the bytes that this process has written to disks, 0 if the system does not count such bytes.
func written() float64 {
	b, err := os.ReadFile("/proc/self/io")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		var n float64
		if _, err := fmt.Sscanf(line, "write_bytes: %f", &n); err == nil {
			return n
		}
	}
	return 0
}

// cpuTime returns the CPU time that this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkDisk measures Runners in this process, with their logs on the disk that holds temporary files, from the
// clients' view. Each client waits for the result of its proposal of 256 bytes before it makes the next. disk-B/op has
// the bytes that all hosts together write, as the kernel counts them.
func BenchmarkDisk(b *testing.B) {
	for _, members := range []uint64{1, 3} {
		for _, clients := range []int{1, 100, 1000} {
			b.Run(fmt.Sprintf("hosts=%d/clients=%d", members, clients), func(b *testing.B) {
				var runners [4]atomic.Pointer[Runner]
				net := &benchNet{deliver: func(to uint64, buf []byte) {
					if r := runners[to].Load(); r != nil {
						e, err := message.Parse(buf)
						if err != nil {
							panic(err)
						}
						r.Deliver(e)
					}
				}}
				var ids []uint64
				for id := range members {
					ids = append(ids, id+1)
				}
				dir := b.TempDir()
				for _, id := range ids {
					h, err := Open(Options{
						ID: id, Members: ids, Dir: filepath.Join(dir, fmt.Sprint(id)), Transport: net, Log: slog.New(slog.DiscardHandler),
					})
					require.NoError(b, err)
					_, err = h.AddGroup(GroupOptions{ID: 1, Name: "bench", Machine: &countingMachine{}})
					require.NoError(b, err)
					runners[id].Store(Start(h, RunnerOptions{}))
				}
				ctx := b.Context()
				changes, stop := runners[1].Load().Leads(1)
				var lead *Runner
				for l := range changes {
					if lead = runners[l.Leader].Load(); lead != nil {
						break
					}
				}
				stop()
				data := make([]byte, 256)
				var next atomic.Int64
				var wg sync.WaitGroup
				var slowest [1000]time.Duration
				before, cpu := written(), cpuTime()
				b.ResetTimer()
				for c := range clients {
					wg.Go(func() {
						for next.Add(1) <= int64(b.N) {
							began := time.Now()
							if _, err := lead.Propose(ctx, 1, [16]byte{}, data); err != nil {
								b.Error(err)
								return
							}
							slowest[c] = max(slowest[c], time.Since(began))
						}
					})
				}
				wg.Wait()
				b.StopTimer()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
				b.ReportMetric((written()-before)/float64(b.N), "disk-B/op")
				b.ReportMetric(float64((cpuTime()-cpu).Nanoseconds())/1000/float64(b.N), "cpu-µs/op")
				most := time.Duration(0)
				for _, d := range slowest {
					most = max(most, d)
				}
				b.ReportMetric(float64(most.Microseconds())/1000, "slowest-ms")
				for i := range runners {
					if r := runners[i].Load(); r != nil {
						require.NoError(b, r.Stop(ctx))
					}
				}
			})
		}
	}
}
