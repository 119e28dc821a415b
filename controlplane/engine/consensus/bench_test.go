package consensus

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// countingMachine is a StateMachine that stores only the applied position.
type countingMachine struct{ index, term uint64 }

func (m *countingMachine) Apply(entries []Entry) ([]any, error) {
	m.index, m.term = entries[len(entries)-1].Index, entries[len(entries)-1].Term
	return make([]any, len(entries)), nil
}
func (m *countingMachine) Applied() (uint64, uint64) { return m.index, m.term }
func (m *countingMachine) Flush() (uint64, error)    { return m.index, nil }
func (m *countingMachine) Checkpoint(string) (index, term uint64, err error) {
	return m.index, m.term, nil
}
func (m *countingMachine) Restore(string) error { return nil }

// benchNet is a Transport that encodes envelopes, counts their bytes and passes them to deliver. It sends no snapshots.
type benchNet struct {
	deliver func(to uint64, b []byte)
	bytes   atomic.Int64
}

func (n *benchNet) Send(e message.Envelope) {
	b, err := e.AppendTo(nil)
	if err != nil {
		panic(err)
	}
	n.bytes.Add(int64(len(b)))
	n.deliver(e.To, b)
}

func (n *benchNet) SendSnapshot(message.Envelope, string) { panic("no member is behind") }

func openBench(b *testing.B, net *benchNet) map[uint64]*Host {
	hosts := map[uint64]*Host{}
	for id := range uint64(3) {
		h, err := Open(Options{
			ID: id + 1, Members: []uint64{1, 2, 3}, Dir: "/consensus", FS: vfs.NewMem(), Transport: net,
			Log: slog.New(slog.DiscardHandler),
		})
		require.NoError(b, err)
		_, err = h.AddGroup(GroupOptions{ID: 1, Name: "bench", Machine: &countingMachine{}})
		require.NoError(b, err)
		hosts[id+1] = h
	}
	return hosts
}

// BenchmarkTrio measures the cost of an entry of 256 bytes in three hosts together, on one goroutine, with disks and
// network in memory. The parameter batch is the number of proposals that are queued at a time.
func BenchmarkTrio(b *testing.B) {
	for _, batch := range []int{1, 10, 100, 1000} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			type packet struct {
				to uint64
				b  []byte
			}
			var queue []packet
			net := &benchNet{deliver: func(to uint64, b []byte) { queue = append(queue, packet{to, b}) }}
			hosts := openBench(b, net)
			settle := func() {
				for busy := true; busy; {
					busy = len(queue) > 0
					now := queue
					queue = nil
					for _, p := range now {
						e, err := message.Parse(p.b)
						require.NoError(b, err)
						require.NoError(b, hosts[p.to].Step(e))
					}
					for id := range uint64(3) {
						if h := hosts[id+1]; !h.Idle() {
							busy = true
							require.NoError(b, h.Process())
						}
					}
				}
			}
			var lead *Group
			for lead == nil {
				for _, h := range hosts {
					require.NoError(b, h.Tick())
				}
				settle()
				for _, h := range hosts {
					if g := h.groups[0]; g.Status().Role == "Leader" {
						lead = g
					}
				}
			}
			data := make([]byte, 256)
			done := 0
			b.ReportAllocs()
			net.bytes.Store(0)
			for b.Loop() {
				for i := range batch {
					var id [16]byte
					binary.LittleEndian.PutUint64(id[:], uint64(i))
					lead.Propose(id, data, func(_ Result, err error) {
						if err != nil {
							b.Error(err)
						}
						done++
					})
				}
				settle()
			}
			require.Equal(b, b.N*batch, done)
			n := float64(done)
			b.ReportMetric(n/b.Elapsed().Seconds(), "entries/s")
			b.ReportMetric(float64(net.bytes.Load())/n, "wire-B/entry")
			for _, h := range hosts {
				require.NoError(b, h.Close())
			}
		})
	}
}

// BenchmarkRunners measures three Runners in memory from the clients' view. Each client waits for the result of its
// proposal or read before it makes the next.
func BenchmarkRunners(b *testing.B) {
	for _, kind := range []string{"propose", "read"} {
		for _, clients := range []int{1, 100, 1000} {
			b.Run(fmt.Sprintf("%s/clients=%d", kind, clients), func(b *testing.B) {
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
				for id, h := range openBench(b, net) {
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
				b.ResetTimer()
				for range clients {
					wg.Go(func() {
						for next.Add(1) <= int64(b.N) {
							var err error
							if kind == "read" {
								err = lead.ReadIndex(ctx, 1)
							} else {
								_, err = lead.Propose(ctx, 1, [16]byte{}, data)
							}
							if err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				wg.Wait()
				b.StopTimer()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
				for i := range runners {
					if r := runners[i].Load(); r != nil {
						require.NoError(b, r.Stop(ctx))
					}
				}
			})
		}
	}
}
