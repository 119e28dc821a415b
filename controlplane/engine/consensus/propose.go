package consensus

import (
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// callback is called once, with the result of a proposal.
type callback func(Result, error)

// proposal is one proposal, or a batch of proposals, that waits until its entry is applied.
type proposal struct {
	id       [16]byte
	data     []byte // the encoded entry; nil when raft has it and no retry can need it
	size     uint64
	at       raftconf.Position // the entry's index, 0 if unknown, and the only term in which the entry can exist
	deadline uint64            // in ticks
	done     callback

	// parts and closed are used only in a batch: the callbacks of its proposals, and whether the batch is closed.
	parts  []callback
	closed bool

	// The following fields are used only while the proposal is in Group.sent.
	envelope uint64 // number of the envelope to the leader; 0 if this member itself appended the proposal
	waits    bool
	twin     *proposal // the next proposal with the same id
}

// reply passes every callback of the proposal to the function reply, with the same result, and removes the callbacks.
func (p *proposal) reply(reply func(callback, Result, error), r Result, err error) {
	for _, ask := range p.parts {
		reply(ask, r, err)
	}
	if p.done != nil {
		reply(p.done, r, err)
	}
	p.done, p.parts = nil, nil
}

// Propose proposes data under id; a retry must repeat the id. Propose copies data. done is called exactly once: without
// an error when the entry is committed and applied on this member; with ErrUncertain when the proposal may or may not
// be applied; with another error when it will not be applied: a *NotLeaderError (ErrNoLeader with
// GroupOptions.Forward), ErrOverloaded, ErrTooLarge or ErrStopped. done is called before Propose returns, or during
// Process or Tick. done may call Propose and ReadIndex, but not Step or Process.
//
// In a group with GroupOptions.Forward, a proposal without an id (zeroes) may share an entry, and so an index, with
// others.
func (g *Group) Propose(id [16]byte, data []byte, done func(Result, error)) {
	limits := &g.host.opts.Limits
	switch {
	case g.host.err != nil:
		done(Result{}, g.host.err)
		return
	case g.role != raft.StateLeader && !g.forward:
		done(Result{}, &NotLeaderError{g.leader})
		return
	case len(data) > limits.ProposalBytes:
		done(Result{}, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, len(data), limits.ProposalBytes))
		return
	}
	size := uint64(message.EntryHeaderBytes + len(data))
	if g.proposalBytes > 0 && g.proposalBytes+size > limits.UncommittedBytes {
		done(Result{}, fmt.Errorf("%w: %d bytes of proposals are not committed yet", ErrOverloaded, g.proposalBytes))
		return
	}
	if mutant.On(mutant.AckBeforeCommit) {
		done(Result{}, nil)
		done = func(Result, error) {}
	}
	if g.forward && id == [16]byte{} {
		g.addToBatch(data, done)
		return
	}
	g.queue = append(g.queue, &proposal{id: id, data: message.NewEntry(id, data), size: size, done: done, deadline: g.host.now + limits.ProposalTicks})
	g.proposalBytes += size
	g.waiting += size
	g.host.schedule(g)
}

// blocked reports whether queued proposals must wait: no leader is known, this leader transfers leadership, or the
// leader has refused a forwarded proposal in this tick.
func (g *Group) blocked(s *raft.BasicStatus) bool {
	if s.RaftState == raft.StateLeader {
		return s.LeadTransferee != 0
	}
	return s.Lead == 0 || g.hold > g.host.now
}

// canPropose reports whether there are queued proposals that propose would pass to raft, forward or fail now.
func (g *Group) canPropose() bool {
	if len(g.queue) == 0 && len(g.forwardQueue) == 0 {
		return false
	}
	s := g.node.BasicStatus()
	if g.isBatching(&s) {
		return false
	}
	return len(g.forwardQueue) > 0 || !g.forward || !g.blocked(&s)
}

// isBatching reports whether proposals are held back to be batched: a write of the log is under way, so they can only
// be part of the next write. They are not held back if the write takes longer than a tick, or if they fill a message.
func (g *Group) isBatching(s *raft.BasicStatus) bool {
	if !g.forward && s.RaftState != raft.StateLeader {
		return false
	}
	return g.host.writing() && g.waiting < g.host.opts.Limits.MessageBytes
}

// propose passes the queued proposals to raft, or forwards them to the leader, in messages of up to
// Limits.MessageBytes. Without GroupOptions.Forward, a member that does not lead fails them with a *NotLeaderError.
func (g *Group) propose() {
	if len(g.queue) == 0 && len(g.forwardQueue) == 0 {
		return
	}
	status := g.node.BasicStatus()
	if g.isBatching(&status) {
		return
	}
	g.waiting = 0
	g.proposeForwarded(&status)
	leads := status.RaftState == raft.StateLeader
	switch {
	case g.forward && g.blocked(&status):
		return
	case !g.forward && (!leads || status.LeadTransferee != 0):
		leader := status.Lead
		if status.LeadTransferee != 0 {
			leader = status.LeadTransferee
		}
		queue := g.queue
		g.queue = nil
		g.answer(queue, &NotLeaderError{leader})
		return
	}
	queue := g.queue
	g.queue = nil
	for len(queue) > 0 {
		n, size := 0, uint64(0)
		for n < len(queue) && (n == 0 || size+queue[n].size <= g.host.opts.Limits.MessageBytes) {
			size += queue[n].size
			queue[n].closeBatch()
			queue[n].at, queue[n].envelope = raftconf.Position{Term: status.GetTerm()}, 0
			n++
		}
		if leads {
			g.append(queue[:n])
		} else {
			g.sendTo(status.Lead, queue[:n])
		}
		queue = queue[n:]
	}
}

// append passes proposals to raft, which appends all or none of them. If none, they fail with ErrOverloaded.
func (g *Group) append(ps []*proposal) {
	entries := make([]*raftpb.Entry, len(ps))
	for i, p := range ps {
		entries[i] = &raftpb.Entry{Data: p.data} // raft copies the Entry
	}
	if err := g.node.Step(&raftpb.Message{Type: raftpb.MsgProp.Enum(), From: &g.host.opts.ID, Entries: entries}); err != nil {
		g.answer(ps, ErrOverloaded)
		return
	}
	if !g.forward {
		for _, p := range ps {
			p.data = nil
		}
	}
	g.inflight = append(g.inflight, ps...)
	g.fresh += len(ps)
}

// number sets the log index of the proposals that were just passed to raft. Their entries are the last ones of entries.
func (g *Group) number(entries []*raftpb.Entry) {
	for i := range g.fresh {
		g.inflight[len(g.inflight)-1-i].at.Index = entries[len(entries)-1-i].GetIndex()
	}
	g.fresh = 0
}

// claim removes and returns the proposal whose entry, at position at, is to be applied next; nil if it was not made on
// this member. It also fails or queues again the proposals whose entries can no longer exist because of this entry. id
// is nil for raft's own entries.
func (g *Group) claim(at raftconf.Position, id *[16]byte) (found *proposal) {
	for len(g.inflight) > 0 && g.inflight[0].at.Index <= at.Index {
		switch p := g.takeInflight(); {
		case p.at == at:
			found = p
		case p.at.Index == at.Index:
			g.requeueOrFail(p)
		default:
			g.host.complete(p, Result{}, ErrUncertain)
		}
	}
	if g.sent.count == 0 {
		return found
	}
	if found == nil && id != nil {
		if found = g.sent.take(*id); found != nil {
			g.proposalBytes -= found.size
		}
	}
	if at.Term > g.sent.term {
		// Terms never decrease along a log, so no proposal sent to the leader of an earlier term can follow in it.
		for _, p := range g.sent.drain(func(p *proposal) bool { return p.at.Term < at.Term }) {
			g.proposalBytes -= p.size
			g.requeueOrFail(p)
		}
		g.sent.term = at.Term
	}
	return found
}

// requeueOrFail handles a proposal that certainly will not be applied: with GroupOptions.Forward it queues the proposal
// again, otherwise it fails the proposal with a *NotLeaderError.
func (g *Group) requeueOrFail(p *proposal) {
	if !g.forward {
		g.host.complete(p, Result{}, &NotLeaderError{g.leader})
		return
	}
	g.proposalBytes += p.size
	g.queue = append(g.queue, p)
	g.host.schedule(g)
}

func (g *Group) takeInflight() *proposal {
	p := g.inflight[0]
	g.inflight[0] = nil
	g.inflight = g.inflight[1:]
	g.proposalBytes -= p.size
	return p
}

// failUncertain fails, with ErrUncertain, the proposals of terms in which this member no longer leads, except committed
// ones. With GroupOptions.Forward it moves them to g.sent instead, because later applied entries will show whether they
// are lost.
func (g *Group) failUncertain() {
	if g.forward {
		if g.role != raft.StateLeader || len(g.inflight) > 0 && g.inflight[0].at.Term != g.term {
			inflight := g.inflight
			g.inflight = nil
			for _, p := range inflight {
				if p.at.Term < g.handed.Term {
					g.proposalBytes -= p.size
					g.requeueOrFail(p)
				} else {
					g.sent.add(p)
				}
			}
		}
		return
	}
	keep := g.inflight[:0]
	for _, p := range g.inflight {
		if p.at.Index <= g.commit || g.role == raft.StateLeader && p.at.Term == g.term {
			keep = append(keep, p)
			continue
		}
		g.proposalBytes -= p.size
		g.host.complete(p, Result{}, ErrUncertain)
	}
	clear(g.inflight[len(keep):])
	g.inflight = keep
}

// answer fails proposals with err. The caller has removed them from all lists.
func (g *Group) answer(ps []*proposal, err error) {
	for _, p := range ps {
		g.proposalBytes -= p.size
		g.host.complete(p, Result{}, err)
	}
}

// expire fails the proposals, reads, transfers and membership changes that are past their deadline.
func (g *Group) expire(now uint64) {
	for len(g.inflight) > 0 && g.inflight[0].deadline <= now {
		g.host.complete(g.takeInflight(), Result{}, ErrUncertain)
	}
	if g.forward {
		late := func(p *proposal) bool { return p.deadline <= now }
		g.answer(g.sent.drain(late), ErrUncertain)
		keep := g.queue[:0]
		for _, p := range g.queue {
			if !late(p) {
				keep = append(keep, p)
				continue
			}
			g.answer([]*proposal{p}, ErrNoLeader)
		}
		clear(g.queue[len(keep):])
		g.queue = keep
	}
	if len(g.queue)+len(g.forwardQueue) > 0 {
		g.host.schedule(g)
	}
	g.reads.expire(g, now)
	g.checkTransfer(now)
	g.checkChange(now)
}

// fail fails all pending calls, because the host stops with err. Proposals that raft or the leader may have appended
// get ErrUncertain.
func (g *Group) fail(err error) {
	g.answer(g.queue, err)
	g.queue = nil
	uncertain := fmt.Errorf("%w: %w", ErrUncertain, err)
	for _, j := range g.jobs {
		j.abandon(g.host.reply, uncertain)
	}
	g.jobs = nil
	for len(g.inflight) > 0 {
		g.host.complete(g.takeInflight(), Result{}, uncertain)
	}
	g.answer(g.sent.drain(func(*proposal) bool { return true }), uncertain)
	g.reads.fail(g, err)
	g.endTransfer(err)
	g.endChange(err)
}
