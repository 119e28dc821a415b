package consensus

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

// ready is one group's share of a round.
type ready struct {
	g  *Group
	rd raft.Ready
}

// completion is one callback that is due.
type completion struct {
	proposal func(Result, error)
	read     *Read
	other    func()
	result   Result
	err      error
}

// schedule makes the next Process look at the group.
func (h *Host) schedule(g *Group) {
	if !g.queued {
		g.queued = true
		h.work = append(h.work, g)
	}
}

func (h *Host) complete(p *proposal, result Result, err error) {
	h.completions = append(h.completions, completion{proposal: p.done, result: result, err: err})
	p.done = nil
}

// callBack runs what is due. A callback may cause more.
func (h *Host) callBack() {
	for len(h.completions) > 0 {
		due := h.completions
		h.completions = h.spare[:0]
		for i := range due {
			switch c := &due[i]; {
			case c.proposal != nil:
				c.proposal(c.result, c.err)
			case c.read != nil:
				if c.read.done != nil {
					c.read.done(c.result.Index, c.err)
				}
			case c.other != nil:
				c.other()
			}
		}
		clear(due)
		h.spare = due[:0]
	}
}

// Idle says that Process would do nothing.
func (h *Host) Idle() bool { return h.err != nil || len(h.work) == 0 }

// Process does all the work that waited when it was called, of all groups, in rounds: what raft wants to keep goes to
// the log in one batch with one fsync; then raft's messages leave, committed entries are applied and callbacks are
// called. What callbacks queue is for the next call; Idle says whether one is needed. An error is final: the host has
// stopped, everything that waited was answered.
//
// Of the messages only a leader's appends and heartbeats leave before the fsync, so that the followers' disks work at
// the same time as ours: they promise nothing about the sender's disk, for its term was synced with its vote. Votes,
// acknowledgements and requests for votes do.
func (h *Host) Process() (err error) {
	if h.err != nil {
		return h.err
	}
	defer h.guard(&err)
	slices.SortFunc(h.work, func(a, b *Group) int { return cmp.Compare(a.id, b.id) })
	for _, g := range h.work {
		g.propose()
		g.reads.ask(g)
	}
	for {
		h.readies = h.readies[:0]
		for _, g := range h.work {
			if g.node.HasReady() {
				rd := g.node.Ready()
				g.number(rd.Entries)
				h.readies = append(h.readies, ready{g, rd})
			}
		}
		if len(h.readies) == 0 {
			break
		}
		if err := h.round(); err != nil {
			return h.fail(err)
		}
	}
	clear(h.readies[:cap(h.readies)])
	h.callBack()
	return h.rest()
}

func (h *Host) round() error {
	for _, r := range h.readies {
		for _, m := range r.rd.Messages {
			if early(m) {
				h.send(r.g, m)
			}
		}
	}
	if err := h.persist(); err != nil {
		return err
	}
	for _, r := range h.readies {
		for _, m := range r.rd.Messages {
			if !early(m) {
				h.send(r.g, m)
			}
		}
	}
	for _, r := range h.readies {
		if err := r.g.apply(r.rd.CommittedEntries); err != nil {
			return fmt.Errorf("group %d: %w", r.g.id, err)
		}
		r.g.node.Advance(r.rd)
		r.g.observe(&r.rd)
	}
	h.callBack()
	return h.engine.failure()
}

func early(m *raftpb.Message) bool {
	return m.GetType() == raftpb.MsgApp || m.GetType() == raftpb.MsgHeartbeat
}

// persist installs snapshots and writes the batch of the round.
func (h *Host) persist() error {
	var b *pebble.Batch
	for _, r := range h.readies {
		if raft.IsEmptySnap(r.rd.Snapshot) && len(r.rd.Entries) == 0 && raft.IsEmptyHardState(r.rd.HardState) {
			continue
		}
		if b == nil {
			b = h.engine.db.NewBatch()
			defer b.Close()
		}
		if !raft.IsEmptySnap(r.rd.Snapshot) {
			if err := r.g.install(b, r.rd.Snapshot.GetMetadata()); err != nil {
				return fmt.Errorf("group %d: %w", r.g.id, err)
			}
		}
		if err := r.g.storage.write(b, r.rd.HardState, r.rd.Entries); err != nil {
			return err
		}
	}
	if b == nil || b.Empty() {
		return nil
	}
	return h.engine.commit(b)
}

// send hands a raft message to the transport.
func (h *Host) send(g *Group, m *raftpb.Message) {
	e := Envelope{
		From: h.opts.ID, To: m.GetTo(), FromBirth: h.births.own, ToBirth: h.births.known[m.GetTo()],
		Kind: KindRaft, Group: g.id, Raft: m,
	}
	if m.GetType() == raftpb.MsgSnap {
		g.sendSnapshot(e)
		return
	}
	h.opts.Transport.Send(e)
}

// observe takes note of what a round changed.
func (g *Group) observe(rd *raft.Ready) {
	if rd.SoftState != nil {
		g.role = rd.SoftState.RaftState
	}
	leader, term := g.leader, g.term
	if rd.SoftState != nil {
		leader = rd.SoftState.Lead
	}
	if t := g.storage.hard.GetTerm(); t != term {
		term = t
	}
	if leader != g.leader || term != g.term {
		g.leader, g.term = leader, term
		g.reads.resend = 0 // the question may have gone to the last one
		g.lose()
		g.host.leads(Leadership{Group: g.id, Leader: leader, Term: term})
	}
	g.reads.hear(g, rd.ReadStates)
	g.reads.release(g)
	g.checkTransfer(g.host.now)
}

// rest ends Process: cuts logs that have grown, drops what nobody took, keeps the groups that have more to do.
func (h *Host) rest() error {
	more := h.work[:0]
	for _, g := range h.work {
		if err := g.trim(); err != nil {
			return h.fail(fmt.Errorf("group %d: %w", g.id, err))
		}
		g.dropIncoming()
		if g.queued = len(g.queue) > 0 || g.reads.due(g) || g.node.HasReady(); g.queued {
			more = append(more, g)
		}
	}
	clear(h.work[len(more):])
	h.work = more
	return nil
}

// trim lets the log be cut with the next batch when it is a quarter longer than the tail that is kept for followers.
func (g *Group) trim() error {
	limits, l := &g.host.opts.Limits, g.storage
	count, bytes := l.last.index-l.begin.index, l.sizes.bytes()
	if count <= limits.TailEntries+limits.TailEntries/4 && bytes <= limits.TailBytes+limits.TailBytes/4 || l.cut.index > 0 || l.last.index < g.flushAfter {
		return nil
	}
	flushed, err := g.machine.Flush()
	if err != nil {
		return fmt.Errorf("flush the state: %w", err)
	}
	to := l.sizes.tail(limits.TailBytes)
	if count > limits.TailEntries {
		to = max(to, l.last.index-limits.TailEntries)
	}
	to = min(to, flushed, g.applied.index)
	if bytes < 4*limits.TailBytes {
		// A follower that is being sent the state should be able to go on from there.
		for _, out := range g.outgoing {
			to = min(to, out.at.index)
		}
	}
	g.flushAfter = l.last.index + limits.TailEntries/8 + 1
	if to <= l.begin.index {
		return nil
	}
	term, err := l.Term(to)
	if err != nil {
		return err
	}
	l.cut = position{to, term}
	g.flushAfter = 0
	return nil
}
