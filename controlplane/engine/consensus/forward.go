package consensus

import (
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// With GroupOptions.Forward, a member that does not lead forwards its proposals to the leader. The member calls the
// callback of a proposal when it applies the entry itself. It recognizes the entry by the proposal's ID.
//
// Forwarding never applies a proposal twice. Each envelope of proposals names a term. The leader appends the proposals
// only in that term and only once, even if the network repeats the envelope. It refuses an envelope only if it
// certainly has not appended it.
//
// So a member may send a proposal again in two cases: the leader has refused it, or the member has applied an entry of
// a later term. In the second case the proposal can no longer be committed, because terms never decrease along a log.
// In all other cases the outcome of the proposal is unknown, and after Limits.ProposalTicks it fails with ErrUncertain.

// sentProposals holds the forwarded proposals whose outcome is not known yet, because the leader may have appended them
// to its log. They are in the order in which they were sent.
type sentProposals struct {
	count int    // number of elements of list that still wait for their entry
	term  uint64 // term of the last applied entry
	list  []*proposal
	byID  map[[16]byte]*proposal // the first waiting proposal with each id; the others follow by twin
}

func (s *sentProposals) add(p *proposal) {
	if s.byID == nil {
		s.byID = map[[16]byte]*proposal{}
	}
	p.waits, p.twin = true, nil
	s.count++
	s.list = append(s.list, p)
	first := s.byID[p.id]
	if first == nil {
		s.byID[p.id] = p
		return
	}
	for first.twin != nil {
		first = first.twin
	}
	first.twin = p
}

// take returns the first proposal with the given ID that still waits for its entry, and marks it as no longer waiting.
// If there is none, it returns nil.
func (s *sentProposals) take(id [16]byte) *proposal {
	p := s.byID[id]
	if p == nil {
		return nil
	}
	s.remove(p)
	if gone := len(s.list) - s.count; gone > 64 && gone > s.count {
		s.drain(func(*proposal) bool { return false })
	}
	return p
}

// remove marks p as no longer waiting and removes it from the map byID. p stays in the slice list until the next drain.
func (s *sentProposals) remove(p *proposal) {
	switch first := s.byID[p.id]; {
	case first != p:
		for first.twin != p {
			first = first.twin
		}
		first.twin = p.twin
	case p.twin != nil:
		s.byID[p.id] = p.twin
	default:
		delete(s.byID, p.id)
	}
	p.waits, p.twin = false, nil
	s.count--
}

// drain removes the waiting proposals for which match returns true, and returns them in the order in which they were
// sent.
func (s *sentProposals) drain(match func(*proposal) bool) []*proposal {
	var out []*proposal
	keep := s.list[:0]
	for _, p := range s.list {
		switch {
		case !p.waits:
		case match(p):
			s.remove(p)
			out = append(out, p)
		default:
			keep = append(keep, p)
		}
	}
	clear(s.list[len(keep):])
	s.list = keep
	return out
}

// sendTo sends the proposals ps to the leader in one envelope, and adds them to g.sent, where they wait for their
// entries.
func (g *Group) sendTo(leader uint64, ps []*proposal) {
	g.forwarded++
	payloads := make([][]byte, len(ps))
	for i, p := range ps {
		p.envelope = g.forwarded
		payloads[i] = p.data
		g.sent.add(p)
	}
	e := g.envelope(leader, message.KindForward)
	e.Term, e.Life, e.Number, e.Payloads = ps[0].at.Term, g.host.nonce, g.forwarded, payloads
	g.host.opts.Transport.Send(e)
}

// handleForward queues an envelope of forwarded proposals for proposeForwarded. It drops the envelope if the sender is
// not a member of the group, if the envelope was received before, or if the envelope names another term than the last
// one in which this member led.
func (g *Group) handleForward(e message.Envelope) {
	if !g.storage.Members().Has(e.From) {
		return
	}
	if e.Term != g.arrived.term || !g.arrived.first(&e) {
		return // it may be in the log already, so a refusal would be wrong
	}
	g.forwardQueue = append(g.forwardQueue, e)
	for _, p := range e.Payloads {
		g.waiting += uint64(len(p))
	}
	g.host.schedule(g)
}

// proposeForwarded passes the queued proposals of other members to raft, several envelopes in one message. If this
// member does not lead in the term that an envelope names, is transferring leadership, or raft refuses the proposals,
// proposeForwarded refuses the envelope.
func (g *Group) proposeForwarded(s *raft.BasicStatus) {
	mail := g.forwardQueue
	g.forwardQueue = nil
	for len(mail) > 0 {
		if e := mail[0]; s.RaftState != raft.StateLeader || s.GetTerm() != e.Term || s.LeadTransferee != 0 {
			g.refuse(e, message.RefusedNotLeader)
			mail = mail[1:]
			continue
		}
		n, size := 0, uint64(0)
		var entries []*raftpb.Entry
		for n < len(mail) && mail[n].Term == s.GetTerm() && (n == 0 || size < g.host.opts.Limits.MessageBytes) {
			for _, p := range mail[n].Payloads {
				size += uint64(len(p))
				entries = append(entries, &raftpb.Entry{Data: p})
			}
			n++
		}
		if err := g.node.Step(&raftpb.Message{Type: raftpb.MsgProp.Enum(), From: &g.host.opts.ID, Entries: entries}); err != nil {
			for _, e := range mail[:n] {
				g.refuse(e, message.RefusedOverloaded)
			}
		}
		mail = mail[n:]
	}
}

// refuse sends a refusal to the sender of a forwarded envelope: none of its proposals was appended to the log.
func (g *Group) refuse(e message.Envelope, why message.Refusal) {
	answer := g.envelope(e.From, message.KindRefuse)
	answer.Term, answer.Life, answer.Number, answer.Refusal = e.Term, e.Life, e.Number, why
	g.host.opts.Transport.Send(answer)
}

// handleRefusal handles the leader's refusal of an envelope. If the leader was overloaded, the envelope's proposals
// fail with ErrOverloaded. Otherwise they are queued and will be forwarded again.
func (g *Group) handleRefusal(e message.Envelope) {
	if e.Life != g.host.nonce {
		return
	}
	refused := g.sent.drain(func(p *proposal) bool { return p.envelope == e.Number })
	if len(refused) == 0 {
		return
	}
	if e.Refusal == message.RefusedOverloaded {
		g.answer(refused, ErrOverloaded)
		return
	}
	for _, p := range refused {
		p.envelope = 0
	}
	g.queue = append(refused, g.queue...)
	if g.leader == e.From && g.term == e.Term {
		g.hold = g.host.now + 1 // a change of leader must follow soon
	}
	g.host.schedule(g)
}

// arrivals lists the envelopes of forwarded proposals that this member has accepted in the last term that it led. With
// it, an envelope that the network repeats is recognized.
type arrivals struct {
	term  uint64
	lives []arrival // ordered by the time of the last envelope, oldest first
}

// arrival lists the accepted envelopes from one run of a member's process; life is the random number of that run. Bit i
// of seen is set if the envelope with number newest-i was accepted.
type arrival struct {
	member, life uint64
	newest       uint64
	seen         uint64
}

// maxLives is the maximum length of arrivals.lives. When it is reached, the process run whose last envelope is oldest
// is forgotten. That takes about maxLives restarts of members, which is longer than the network delays an envelope.
const maxLives = 32

// first records the arrival of an envelope. It returns true if the envelope arrives for the first time. It returns
// false for a repetition, and also for an envelope whose number is 64 or more below the newest one of the same run, for
// which nothing is recorded.
func (a *arrivals) first(e *message.Envelope) bool {
	for i, l := range a.lives {
		if l.member != e.From || l.life != e.Life {
			continue
		}
		copy(a.lives[i:], a.lives[i+1:])
		fresh := l.first(e.Number)
		a.lives[len(a.lives)-1] = l
		return fresh
	}
	if len(a.lives) == maxLives {
		a.lives = append(a.lives[:0], a.lives[1:]...)
	}
	a.lives = append(a.lives, arrival{member: e.From, life: e.Life, newest: e.Number, seen: 1})
	return true
}

func (l *arrival) first(number uint64) bool {
	if number > l.newest {
		l.seen = l.seen<<(number-l.newest) | 1
		l.newest = number
		return true
	}
	bit := uint64(1) << (l.newest - number)
	if bit == 0 || l.seen&bit != 0 {
		return false
	}
	l.seen |= bit
	return true
}
