package store_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
)

// wire is a consensus.Transport between the members of one process. It sends no snapshots, because no member falls
// behind.
type wire struct {
	self    uint64
	runners map[uint64]*consensus.Runner
	ready   chan struct{}
}

func (w *wire) Send(e message.Envelope) {
	select {
	case <-w.ready:
	default:
		return // not all members exist yet
	}
	b, err := e.AppendTo(nil)
	if err != nil {
		panic(err)
	}
	copied, err := message.Parse(b)
	if err != nil {
		panic(err)
	}
	w.runners[e.To].Deliver(copied)
}

func (w *wire) SendSnapshot(e message.Envelope, _ string) {
	go w.runners[w.self].ReportSnapshot(e.Group, e.To, false)
}

const group = 1

// startThreeMembers starts three members and returns their stores, beginning with the leader's.
func startThreeMembers(t *testing.T, now func() time.Time) []*store.Store {
	runners := map[uint64]*consensus.Runner{}
	ready := make(chan struct{})
	stores := map[uint64]*store.Store{}
	groups := map[uint64]*store.Group{}
	for id := uint64(1); id <= 3; id++ {
		fs := vfs.NewMem()
		engine, err := mvcc.Open(fs, "state", mvcc.Options{})
		require.NoError(t, err)
		host, err := consensus.Open(consensus.Options{
			ID: id, Members: []uint64{1, 2, 3}, Dir: "raft", FS: fs, Transport: &wire{id, runners, ready}, Log: slog.New(slog.DiscardHandler),
		})
		require.NoError(t, err)
		machine := store.NewStateMachine(engine, store.StateMachineOptions{})
		_, err = host.AddGroup(consensus.GroupOptions{ID: group, Name: "system", Machine: machine})
		require.NoError(t, err)
		runners[id] = consensus.Start(host, consensus.RunnerOptions{TickInterval: 10 * time.Millisecond})
		groups[id] = store.NewGroup(runners[id], group)
		stores[id] = store.New(store.Options{Engine: engine, Proposer: groups[id], PageKey: make([]byte, 32), Now: now})
		t.Cleanup(func() {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			require.NoError(t, runners[id].Stop(ctx))
			groups[id].Close()
			machine.Close()
			require.NoError(t, engine.Close())
		})
	}
	close(ready)
	for {
		changed := groups[1].Changed()
		if leader, _ := groups[1].Leader(); leader != 0 {
			// Barrier returns only after the leader has committed its first entry of the term.
			require.NoError(t, stores[leader].Barrier(t.Context()))
			return []*store.Store{stores[leader], stores[leader%3+1], stores[(leader+1)%3+1]}
		}
		<-changed
	}
}

func TestRaft(t *testing.T) {
	storetest.Run(t, func(t *testing.T, now func() time.Time) *store.Store { return startThreeMembers(t, now)[0] })
}

type note struct{ Text string }

var notes = store.NewTable[note]("note")

// TestEveryMemberReadsAcknowledgedWrites checks that a write that the leader has acknowledged can be read at once on
// every member.
func TestEveryMemberReadsAcknowledgedWrites(t *testing.T) {
	members := startThreeMembers(t, time.Now)
	for range 50 {
		text := time.Now().String()
		_, err := members[0].Update(t.Context(), func(tx *store.Tx) error { notes.Put(tx, &note{text}, "n"); return nil })
		require.NoError(t, err)
		for _, s := range members {
			require.NoError(t, s.View(t.Context(), func(v *store.View) error {
				n, err := notes.Get(v, "n")
				require.Equal(t, text, n.Text)
				return err
			}))
		}
	}
}
