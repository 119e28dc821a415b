package consensus

import (
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// With GroupOptions.Forward, a member that does not lead sends its proposals to the leader. It calls the callback of a
// proposal when it applies the entry itself; it recognizes the entry by the proposal's ID.
//
// Forwarding never applies a proposal twice. The envelope names a term. The leader appends the proposals in that term
// or not at all, and once, even if the network repeats the envelope. It refuses an envelope only if it certainly has
// not appended it. So a proposal may be sent again when the leader has refused it, or when an entry of a later term was
// applied, because terms never decrease along a log. Until then, or until Limits.ProposalTicks have passed, its outcome
// is unknown.

// sentProposals holds the forwarded proposals that a leader may have appended to its log, in the order of sending.
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

// take returns the first waiting proposal with the id, and marks it as no longer waiting. It returns nil if there is
// none.
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

// remove removes p from byID and marks it as no longer waiting. p stays in the list until drain removes it.
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

// drain removes the proposals for which match returns true, and returns them in the order of sending.
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

// sendTo forwards the proposals ps to the leader in one envelope, and adds them to g.sent.
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
// not a member, the envelope's term is not the last that this member led, or the envelope is a repetition.
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

// proposeForwarded appends the proposals that other members have forwarded, those of several envelopes in one call of
// raft. It refuses an envelope unless this member leads in the envelope's term and raft accepts the proposals.
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

// refuse informs the sender of a forwarded envelope that none of its proposals was appended.
func (g *Group) refuse(e message.Envelope, why message.Refusal) {
	answer := g.envelope(e.From, message.KindRefuse)
	answer.Term, answer.Life, answer.Number, answer.Refusal = e.Term, e.Life, e.Number, why
	g.host.opts.Transport.Send(answer)
}

// handleRefusal queues the proposals of a refused envelope again. It fails them with ErrOverloaded if that was the
// reason.
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

// arrivals lists the forwarded envelopes that this member has accepted in the last term that it led, so that a repeated
// envelope can be recognized.
type arrivals struct {
	term  uint64
	lives []arrival // ordered by the time of the last envelope, oldest first
}

// arrival lists the accepted envelopes of one run (life) of a member: bit i of seen is set if envelope newest-i was
// accepted.
type arrival struct {
	member, life uint64
	newest       uint64
	seen         uint64
}

// maxLives is the largest length of arrivals.lives. No repeated envelope is delayed for as long as this many restarts
// of members take.
const maxLives = 32

// first returns true for an envelope that has not arrived before, and marks it as seen. It returns false for a
// repetition; an envelope whose number is 64 or more below the newest counts as one.
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
