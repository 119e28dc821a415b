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

// The log has a thread of its own. What all groups want to keep until it is free goes into one batch and one fsync; what
// depends on that (acknowledgements, votes, what raft tells itself) is said when it is durable. Driven by steps, the
// thread is the caller's; a Runner has a goroutine for it, and raft's goes on meanwhile: it takes proposals, sends them
// on, hears the followers, and commits what a majority of the others holds.

// write is one batch of the log.
type write struct {
	batch *pebble.Batch // nil if there is nothing to keep, only something to say after the writes before
	after []after
	since uint64 // the tick in which it was begun
	cuts  bool   // a log is shorter after it
}

// after is what waits for a write.
type after struct {
	g         *Group
	responses []*raftpb.Message
	then      func() error // optional
}

// batch is the one that the next write keeps.
func (h *Host) batch() *pebble.Batch {
	if h.next.batch == nil {
		h.next.batch = h.engine.NewBatch()
	}
	return h.next.batch
}

// keep makes what raft wants to be durable part of the next write.
func (g *Group) keep(m *raftpb.Message) error {
	s := stored{m, ""}
	if m.Snapshot != nil {
		meta := m.Snapshot.GetMetadata()
		if s.dir = g.takeIncoming(raftconf.Position{Index: meta.GetIndex(), Term: meta.GetTerm()}); s.dir == "" {
			return fmt.Errorf("install a snapshot at entry %d: its files are missing", meta.GetIndex())
		}
	}
	if g.installing != nil {
		g.installing.held = append(g.installing.held, s)
		return nil
	}
	return g.store(s)
}

// stored is what raft wants to be durable, and the files of its snapshot if it is one.
type stored struct {
	m   *raftpb.Message
	dir string
}

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

// hardState is that of a message for the log, empty if it does not change.
func hardState(m *raftpb.Message) *raftpb.HardState {
	return &raftpb.HardState{Term: m.Term, Vote: m.Vote, Commit: m.Commit}
}

// due takes the next write, nil if there is nothing to do.
func (h *Host) due() *write {
	if h.next.batch == nil && len(h.next.after) == 0 {
		return nil
	}
	w := h.next
	h.next = &write{}
	w.since = h.now
	if w.batch != nil && w.batch.Empty() {
		_ = w.batch.Close() // nothing was ever in it
		w.batch = nil
	}
	return w
}

// run makes the write durable, on the log's thread.
func (w *write) run(e *raftlog.Engine) error {
	if w.batch == nil {
		return nil
	}
	return e.Write(w.batch, w.cuts)
}

// finish tells everybody what the write was waited for.
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

// deliver sends messages to where they are for, which may be raft here.
func (g *Group) deliver(ms []*raftpb.Message) {
	for _, m := range ms {
		if m.GetTo() == g.host.opts.ID {
			_ = g.node.Step(m) // raft has no use for what it has outlived
		} else {
			g.host.send(g, m)
		}
	}
	g.host.schedule(g)
}

// take carries out one Ready.
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

// advance lets the threads go on, and says whether raft may have more to do by that.
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
