package transport

import (
	"context"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// spent returns the CPU time that this process has used.
func spent(b *testing.B) time.Duration {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkRoundTrip sends an envelope from one member to another and back, over TLS on loopback. flight is the number
// of envelopes that are sent without waiting for their return, payload their size in bytes.
func BenchmarkRoundTrip(b *testing.B) {
	for _, c := range []struct{ flight, payload int }{{1, 0}, {1, 4096}, {64, 100}} {
		b.Run(fmt.Sprintf("flight=%d/payload=%d", c.flight, c.payload), func(b *testing.B) {
			var two atomic.Pointer[Transport]
			back := make(chan struct{}, c.flight)
			w := newTestClusterWith(b, map[uint64]func(message.Envelope) bool{
				1: func(e message.Envelope) bool {
					if e.Group == 99 {
						back <- struct{}{}
					}
					return true
				},
				2: func(e message.Envelope) bool {
					if m := two.Load(); m != nil && e.Group == 99 {
						m.Send(message.Envelope{From: 2, To: 1, Kind: message.KindForward, Group: 99, Payloads: e.Payloads})
					}
					return true
				},
			}, 2)
			two.Store(w.servers[2].mesh)
			e := message.Envelope{From: 1, To: 2, Kind: message.KindForward, Group: 99, Payloads: [][]byte{make([]byte, c.payload)}}
			for connected := false; !connected; {
				w.servers[1].mesh.Send(e)
				select {
				case <-back:
					connected = true
				case <-time.After(200 * time.Millisecond):
				}
			}
			for quiet := false; !quiet; {
				select {
				case <-back:
				case <-time.After(300 * time.Millisecond):
					quiet = true
				}
			}
			before := spent(b)
			b.ResetTimer()
			sent := 0
			for ; sent < min(c.flight, b.N); sent++ {
				w.servers[1].mesh.Send(e)
			}
			for range b.N {
				<-back
				if sent < b.N {
					sent++
					w.servers[1].mesh.Send(e)
				}
			}
			b.StopTimer()
			b.ReportMetric(float64((spent(b)-before).Microseconds())/float64(b.N), "cpu-µs/op")
		})
	}
}

// BenchmarkReadIndex makes linearizable reads of one client in a cluster of three: on the leader and on a follower.
func BenchmarkReadIndex(b *testing.B) {
	w := newTestCluster(b, 3)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	w.propose(ctx, "first")
	leader := w.servers[1].runner.Leader(1).Leader
	for _, c := range []struct {
		name string
		id   uint64
	}{{"leader", leader}, {"follower", leader%3 + 1}} {
		b.Run(c.name, func(b *testing.B) {
			before := spent(b)
			for range b.N {
				err := w.servers[c.id].runner.ReadIndex(ctx, 1)
				require.NoError(b, err)
			}
			b.ReportMetric(float64((spent(b)-before).Microseconds())/float64(b.N), "cpu-µs/op")
		})
	}
}
