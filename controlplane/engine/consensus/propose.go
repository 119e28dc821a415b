package consensus

import (
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// callback receives the result of a proposal, once.
type callback func(Result, error)

// proposal waits for its entry to be applied.
type proposal struct {
	id       [16]byte
	data     []byte // as in the log; nil once raft has it and nobody will need it again
	size     uint64
	at       raftconf.Position // index 0: not known. The term is the only one in which its entry can be
	deadline uint64            // in ticks
	done     callback

	// Of a batch: the callbacks of its proposals, and whether the batch is closed.
	parts  []callback
	closed bool

	// While in Group.sent.
	envelope uint64 // that it went to the leader in; 0 if it was this member's own log
	waits    bool
	twin     *proposal // the next one with the same id
}

// reply calls send with the same result for every callback of the proposal, once.
func (p *proposal) reply(reply func(callback, Result, error), r Result, err error) {
	for _, ask := range p.parts {
		reply(ask, r, err)
	}
	if p.done != nil {
		reply(p.done, r, err)
	}
	p.done, p.parts = nil, nil
}

// Propose asks for data to be applied under id, which a retry repeats. done is called exactly once, when the entry is
// committed and applied here, or when that can no longer be promised: a *NotLeaderError, ErrNoLeader (with
// GroupOptions.Forward in place of the former), ErrOverloaded, ErrTooLarge or ErrStopped (nothing was done), or
// ErrUncertain. It may be called before Propose returns, and otherwise is during Process or Tick; it may propose and
// read, but not step or process the host. data is copied.
//
// In a group that forwards, a proposal without an id (zeroes) may share an entry, and so an index, with others.
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

// blocked says that what is queued has to wait, for a leader that takes it.
func (g *Group) blocked(s *raft.BasicStatus) bool {
	if s.RaftState == raft.StateLeader {
		return s.LeadTransferee != 0
	}
	return s.Lead == 0 || g.hold > g.host.now
}

// proposing says whether propose would do something.
func (g *Group) proposing() bool {
	if len(g.queue) == 0 && len(g.mail) == 0 {
		return false
	}
	s := g.node.BasicStatus()
	if g.gathers(&s) {
		return false
	}
	return len(g.mail) > 0 || !g.forward || !g.blocked(&s)
}

// gathers says that proposals come together for now: a write is under way, and they would only be in the one after it.
// Nothing waits so for a disk that is slow (a tick), nor when a message is full.
func (g *Group) gathers(s *raft.BasicStatus) bool {
	if !g.forward && s.RaftState != raft.StateLeader {
		return false
	}
	return g.host.writing() && g.waiting < g.host.opts.Limits.MessageBytes
}

// propose gives raft what is queued, or the leader, in as few messages as their size allows.
func (g *Group) propose() {
	if len(g.queue) == 0 && len(g.mail) == 0 {
		return
	}
	status := g.node.BasicStatus()
	if g.gathers(&status) {
		return
	}
	g.waiting = 0
	g.proposeMail(&status)
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

// append gives raft proposals to append, all or none.
func (g *Group) append(ps []*proposal) {
	entries := make([]*raftpb.Entry, len(ps))
	for i, p := range ps {
		entries[i] = &raftpb.Entry{Data: p.data} // raft copies
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

// number tells the proposals just given to raft their index: raft appended them last.
func (g *Group) number(entries []*raftpb.Entry) {
	for i := range g.fresh {
		g.inflight[len(g.inflight)-1-i].at.Index = entries[len(entries)-1-i].GetIndex()
	}
	g.fresh = 0
}

// claim takes the proposal whose entry is about to be applied, nil when nobody here waits for it, and settles those
// that it shows to be lost. raft's own entries have no id: nil.
func (g *Group) claim(at raftconf.Position, id *[16]byte) (found *proposal) {
	for len(g.inflight) > 0 && g.inflight[0].at.Index <= at.Index {
		switch p := g.takeInflight(); {
		case p.at == at:
			found = p
		case p.at.Index == at.Index:
			g.lost(p)
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
		// Terms do not go back along a log: what went to the leader of an earlier one is not in it.
		for _, p := range g.sent.drain(func(p *proposal) bool { return p.at.Term < at.Term }) {
			g.proposalBytes -= p.size
			g.lost(p)
		}
		g.sent.term = at.Term
	}
	return found
}

// lost deals with a proposal whose entry is known never to be: it goes back to the queue, or is answered.
func (g *Group) lost(p *proposal) {
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

// lose gives up on proposals of terms in which this member does not lead any more, but for those known to be decided.
// With forwarding all of them are found in the log again, or shown not to be there.
func (g *Group) lose() {
	if g.forward {
		if g.role != raft.StateLeader || len(g.inflight) > 0 && g.inflight[0].at.Term != g.term {
			inflight := g.inflight
			g.inflight = nil
			for _, p := range inflight {
				if p.at.Term < g.handed.Term {
					g.proposalBytes -= p.size
					g.lost(p)
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

// answer answers proposals that are in none of the lists any more.
func (g *Group) answer(ps []*proposal, err error) {
	for _, p := range ps {
		g.proposalBytes -= p.size
		g.host.complete(p, Result{}, err)
	}
}

// expire answers what waited too long.
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
	if len(g.queue)+len(g.mail) > 0 {
		g.host.schedule(g)
	}
	g.reads.expire(g, now)
	g.checkTransfer(now)
	g.checkChange(now)
}

// fail answers everything with err, for the host is at its end.
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
