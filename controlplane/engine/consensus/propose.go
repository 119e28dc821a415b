package consensus

import (
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// callback is the function that a caller of Propose passes. It is called once, with the result of the proposal.
type callback func(Result, error)

// proposal is a pending proposal, or a pending batch of proposals. It ends when its entry is applied on this member, or
// with an error.
type proposal struct {
	id       [16]byte
	data     []byte // the encoded entry; nil when raft has it and no retry can need it
	size     uint64
	at       raftconf.Position // the entry's index, 0 if unknown, and the only term in which the entry can exist
	deadline uint64            // in ticks
	done     callback

	// parts and closed are used only if the proposal is a batch. parts has the callbacks of the batch's proposals.
	// closed is true if no proposal can be added any more.
	parts  []callback
	closed bool

	// The following fields are used only while the proposal is in Group.sent, the forwarded proposals whose outcome is
	// unknown.
	envelope uint64 // number of the envelope to the leader; 0 if this member itself appended the proposal
	waits    bool
	twin     *proposal // the next proposal with the same id
}

// reply calls the function reply once per callback of the proposal, with the same result and error. It then removes the
// callbacks, so that none is called twice.
func (p *proposal) reply(reply func(callback, Result, error), r Result, err error) {
	for _, ask := range p.parts {
		reply(ask, r, err)
	}
	if p.done != nil {
		reply(p.done, r, err)
	}
	p.done, p.parts = nil, nil
}

// Propose proposes data under the given ID, and copies data. A retry must use the same ID. done is called exactly once:
//
//   - without an error when the entry is committed and applied on this member;
//   - with ErrUncertain when it is unknown whether the proposal was or will be applied;
//   - with another error when the proposal will not be applied: ErrOverloaded, ErrTooLarge, a *NotLeaderError or, in a
//     group with GroupOptions.Forward, ErrNoLeader, or the error that stopped the host.
//
// done is called before Propose returns, or during Process or Tick. done may call Propose and ReadIndex, but not Step
// or Process.
//
// In a group with GroupOptions.Forward, proposals without an ID (all bytes zero) may share one entry, and then have the
// same index.
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

// blocked reports whether queued proposals must wait. A leader must wait while it transfers leadership. Another member
// must wait while it knows no leader, and until the next tick after the leader has refused an envelope of forwarded
// proposals.
func (g *Group) blocked(s *raft.BasicStatus) bool {
	if s.RaftState == raft.StateLeader {
		return s.LeadTransferee != 0
	}
	return s.Lead == 0 || g.hold > g.host.now
}

// canPropose reports whether a call of propose would now pass a queued proposal to raft, forward it, or fail it.
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

// isBatching reports whether queued proposals are held back so that they form larger batches. They are held back while
// a write of the log is under way, because they could only be part of the next write anyway. They are no longer held
// back when the write takes longer than a tick, or when they reach Limits.MessageBytes.
func (g *Group) isBatching(s *raft.BasicStatus) bool {
	if !g.forward && s.RaftState != raft.StateLeader {
		return false
	}
	return g.host.writing() && g.waiting < g.host.opts.Limits.MessageBytes
}

// propose passes the queued proposals to raft if this member leads, in messages of up to Limits.MessageBytes. If it
// does not lead, propose forwards them to the leader; without GroupOptions.Forward they fail with a *NotLeaderError.
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

// append passes the proposals ps to raft, which appends either all or none of them. If raft appends none, they fail
// with ErrOverloaded.
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

// number sets the log index of the proposals that were passed to raft since the last Ready. Their entries are the last
// elements of the parameter entries.
func (g *Group) number(entries []*raftpb.Entry) {
	for i := range g.fresh {
		g.inflight[len(g.inflight)-1-i].at.Index = entries[len(entries)-1-i].GetIndex()
	}
	g.fresh = 0
}

// claim is called for each entry before it is applied. It removes and returns this member's proposal to which the entry
// belongs. It returns nil if the entry was proposed on another member. at is the entry's position, and id its proposal
// ID, which is nil for raft's own entries. If the entry shows that other proposals of this member can no longer be
// committed, claim queues them again or fails them.
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
		// Terms never decrease along a log. So a proposal that was sent to the leader of an earlier term cannot be in
		// an entry after this one.
		for _, p := range g.sent.drain(func(p *proposal) bool { return p.at.Term < at.Term }) {
			g.proposalBytes -= p.size
			g.requeueOrFail(p)
		}
		g.sent.term = at.Term
	}
	return found
}

// requeueOrFail handles a proposal that certainly will not be applied. With GroupOptions.Forward it queues the proposal
// again. Otherwise the proposal fails with a *NotLeaderError.
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

// failUncertain is called when the leader or the term has changed. It handles the proposals that this member passed to
// raft in a term in which it no longer leads. With GroupOptions.Forward it moves them to g.sent, because the entries
// applied later will show whether they are lost. Otherwise they fail with ErrUncertain, except those that are already
// committed.
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

// answer completes the proposals ps with err. The caller has already removed them from the group's lists.
func (g *Group) answer(ps []*proposal, err error) {
	for _, p := range ps {
		g.proposalBytes -= p.size
		g.host.complete(p, Result{}, err)
	}
}

// expire ends the proposals, reads, leadership transfers and membership changes whose deadline has passed. now is the
// current tick.
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

// fail ends all pending calls of the group because the host stops with err. Proposals that raft or a leader may have
// appended to a log fail with ErrUncertain, which wraps err.
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
