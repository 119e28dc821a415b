package consensus

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftlog"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Under a Runner, a separate goroutine writes the log; otherwise the goroutine that calls Process does. During a write,
// the next writes of all groups are collected in a batch, and raft continues: it accepts proposals, sends appends,
// handles the followers' responses, and commits what a majority, without this member, has stored. Messages that promise
// that a write is durable (acknowledgements, votes, raft's messages to itself) are delivered after the fsync of that
// write.

// write is one batch of the log, together with the actions that are executed when the batch is durable.
type write struct {
	batch *pebble.Batch // nil if there is nothing to store, and the actions only have to wait for earlier writes
	after []after
	since uint64 // the tick in which the write was started
	cuts  bool   // whether the batch truncates a log
}

// after holds the work of a group that must wait until a write is durable: to deliver the messages in responses, and
// then to call the function in the field then.
type after struct {
	g         *Group
	responses []*raftpb.Message
	then      func() error // may be nil
}

// batch returns the Pebble batch of the next write. It creates the batch if there is none yet.
func (h *Host) batch() *pebble.Batch {
	if h.next.batch == nil {
		h.next.batch = h.engine.NewBatch()
	}
	return h.next.batch
}

// keep handles m, a message in which raft requests a write to the log, by adding it to the next write. While a snapshot
// is being installed, keep queues m until the installation has ended.
func (g *Group) keep(m *raftpb.Message) error {
	s := stored{m, ""}
	if m.Snapshot != nil {
		meta := m.Snapshot.GetMetadata()
		if s.dir = g.takeIncoming(raftconf.Position{Index: meta.GetIndex(), Term: meta.GetTerm()}); s.dir == "" {
			return fmt.Errorf("install a snapshot at entry %d: its files are missing", meta.GetIndex())
		}
	}
	if g.installing != nil {
		g.installing.queuedWrites = append(g.installing.queuedWrites, s)
		return nil
	}
	return g.store(s)
}

// stored is a message in which raft requests a write to the log. If the message contains a snapshot, dir is the
// directory with its received files.
type stored struct {
	m   *raftpb.Message
	dir string
}

// store adds the message to the next write of the log. If the message contains a snapshot, store instead starts to
// install the snapshot.
func (g *Group) store(s stored) error {
	if s.m.Snapshot != nil {
		return g.install(s)
	}
	begin := g.storage.Begin().Index
	if err := g.storage.Write(g.host.batch(), hardState(s.m), s.m.Entries); err != nil {
		return err
	}
	g.host.next.cuts = g.host.next.cuts || g.storage.Begin().Index > begin
	if mutant.On(mutant.AckBeforeSync) {
		g.deliver(s.m.Responses)
		return nil
	}
	g.host.next.after = append(g.host.next.after, after{g: g, responses: s.m.Responses})
	return nil
}

// hardState returns the HardState in m, a message in which raft requests a write to the log. The result is empty if the
// HardState has not changed.
func hardState(m *raftpb.Message) *raftpb.HardState {
	return &raftpb.HardState{Term: m.Term, Vote: m.Vote, Commit: m.Commit}
}

// due returns the collected write, which the caller must execute, and begins to collect a new one. It returns nil if
// there is nothing to do.
func (h *Host) due() *write {
	if h.next.batch == nil && len(h.next.after) == 0 {
		return nil
	}
	w := h.next
	h.next = &write{}
	w.since = h.now
	if w.batch != nil && w.batch.Empty() {
		_ = w.batch.Close() // the batch is empty, so no error can lose data
		w.batch = nil
	}
	return w
}

// run writes the batch to the log and waits for the fsync. A Runner calls run on the goroutine that writes the log.
func (w *write) run(e *raftlog.Engine) error {
	if w.batch == nil {
		return nil
	}
	return e.Write(w.batch, w.cuts)
}

// finish is called when the write w is durable. It executes the actions that waited for w.
func (h *Host) finish(w *write) error {
	for _, a := range w.after {
		a.g.deliver(a.responses)
		if a.then != nil {
			if err := a.then(); err != nil {
				return fmt.Errorf("group %d: %w", a.g.id, err)
			}
		}
		h.schedule(a.g)
	}
	return nil
}

// deliver sends each message in ms to its receiver. raft also addresses messages to its own member; deliver passes
// these back to raft.
func (g *Group) deliver(ms []*raftpb.Message) {
	for _, m := range ms {
		if m.GetTo() == g.host.opts.ID {
			_ = g.node.Step(m) // raft refuses messages of earlier terms
		} else {
			g.host.send(g, m)
		}
	}
	g.host.schedule(g)
}

// take handles one Ready of raft: it sends the messages, adds the new entries to the next write of the log, and queues
// the committed entries for the state machine. Vote requests are sent only after the next write.
func (h *Host) take(g *Group, rd *raft.Ready) error {
	g.number(rd.Entries)
	g.observe(rd)
	for _, m := range rd.Messages {
		var err error
		switch {
		case m.GetTo() == raft.LocalAppendThread:
			err = g.keep(m)
		case m.GetTo() == raft.LocalApplyThread:
			err = g.apply(m)
		case m.GetType() == raftpb.MsgVote:
			h.next.after = append(h.next.after, after{g: g, responses: []*raftpb.Message{m}})
		default:
			h.send(g, m)
		}
		if err != nil {
			return fmt.Errorf("group %d: %w", g.id, err)
		}
	}
	return nil
}

// advance executes the pending writes of the log and the jobs of the state machines. Under a Runner it only starts
// them. The result is true if raft may have more to do afterwards.
func (h *Host) advance() (bool, error) {
	if h.threads != nil {
		return h.threads.advance(h)
	}
	moved := false
	for w := h.due(); w != nil; w = h.due() {
		moved = true
		if err := w.run(h.engine); err != nil {
			return false, err
		}
		if err := h.finish(w); err != nil {
			return false, err
		}
	}
	for _, g := range h.groups {
		if len(g.jobs) > 0 {
			moved = true
			if err := g.work(); err != nil {
				return false, fmt.Errorf("group %d: %w", g.id, err)
			}
		}
	}
	return moved, h.engine.Err()
}
