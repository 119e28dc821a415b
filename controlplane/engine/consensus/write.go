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

// The log is written by its own goroutine if a Runner drives the host, otherwise by the caller of Process. During a
// write, the writes of all groups collect in the next batch, and raft continues: it accepts proposals, sends appends,
// handles the followers' responses, and commits what a majority of the other members has stored. Messages that depend
// on a write (acknowledgements, votes, raft's messages to itself) are delivered after its fsync.

// write is one batch of the log and the actions that follow when the batch is durable.
type write struct {
	batch *pebble.Batch // nil if there is nothing to store, and the actions only have to wait for earlier writes
	after []after
	since uint64 // the tick in which the write was started
	cuts  bool   // whether the batch truncates a log
}

// after holds what a group does once a write is durable. First the responses are delivered, afterwards the function in
// the field then is called.
type after struct {
	g         *Group
	responses []*raftpb.Message
	then      func() error // may be nil
}

// batch returns the Pebble batch of the next write, and creates it if needed.
func (h *Host) batch() *pebble.Batch {
	if h.next.batch == nil {
		h.next.batch = h.engine.NewBatch()
	}
	return h.next.batch
}

// keep adds m, raft's message to the log, to the next write. During the installation of a snapshot it queues m until
// the installation has ended.
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

// stored is raft's message to the log, and the directory with the files of its snapshot, if it has one.
type stored struct {
	m   *raftpb.Message
	dir string
}

// store adds a message to the next write. If the message has a snapshot, store starts its installation instead.
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

// hardState returns the HardState that raft's message to the log contains. It is empty if it did not change.
func hardState(m *raftpb.Message) *raftpb.HardState {
	return &raftpb.HardState{Term: m.Term, Vote: m.Vote, Commit: m.Commit}
}

// due returns the collected write, which the caller must execute, and begins a new one; nil if there is nothing to
// write.
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

// run commits the batch to the log with an fsync. A Runner calls it on the log's goroutine.
func (w *write) run(e *raftlog.Engine) error {
	if w.batch == nil {
		return nil
	}
	return e.Write(w.batch, w.cuts)
}

// finish executes the actions that waited for w, which is durable now.
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

// deliver sends the messages ms to other members, or passes those that raft addressed to this member to its raft.
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

// take executes one Ready: it sends the messages, and adds the entries to the next write and the committed entries to
// the state machine's jobs. Vote requests wait for the next write.
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

// advance starts or executes the pending work of the log and of the state machines, and reports whether raft may have
// more to do.
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
