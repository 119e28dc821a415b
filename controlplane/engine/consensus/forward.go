package consensus

import (
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// A member that does not lead sends its proposals to the one that does (GroupOptions.Forward), and answers each when it
// applies the entry itself, which it knows by the proposal's id.
//
// None is applied twice by that. An envelope names the term that its sender takes the leader to lead, and the leader
// appends it in that term or not at all, and once however often the network brings it; it refuses only what it knows that
// it has not appended. So a proposal may be sent again when the leader has refused it, and when an entry of a later term
// was applied: terms do not go back along a log. Until then, or Limits.ProposalTicks have passed, its outcome is not
// known.

// sent are proposals whose entry a leader may have appended, in the order of their sending.
type sent struct {
	count int    // of those that wait
	term  uint64 // of the last entry applied
	list  []*proposal
	byID  map[[16]byte]*proposal // the first of each id
}

func (s *sent) add(p *proposal) {
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

// take removes the first with an id; nil if there is none.
func (s *sent) take(id [16]byte) *proposal {
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

// remove leaves p in the list, which drain clears of what does not wait.
func (s *sent) remove(p *proposal) {
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

// drain removes those that match, and returns them in order.
func (s *sent) drain(match func(*proposal) bool) []*proposal {
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

// sendTo sends proposals to the leader in one envelope.
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

// handleForward takes what another member forwards, to append or to refuse all of it.
func (g *Group) handleForward(e message.Envelope) {
	if !g.storage.Members().Has(e.From) {
		return
	}
	if e.Term != g.arrived.term || !g.arrived.first(&e) {
		return // it was decided before, or may have been: that it is not in the log cannot be said
	}
	g.mail = append(g.mail, e)
	for _, p := range e.Payloads {
		g.waiting += uint64(len(p))
	}
	g.host.schedule(g)
}

// proposeMail appends what other members have forwarded, many envelopes at once, and refuses what cannot be.
func (g *Group) proposeMail(s *raft.BasicStatus) {
	mail := g.mail
	g.mail = nil
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

// refuse says to the member that forwarded an envelope that nothing in it was appended.
func (g *Group) refuse(e message.Envelope, why message.Refusal) {
	answer := g.envelope(e.From, message.KindRefuse)
	answer.Term, answer.Life, answer.Number, answer.Refusal = e.Term, e.Life, e.Number, why
	g.host.opts.Transport.Send(answer)
}

// handleRefusal takes the leader's word that an envelope of this life was not appended.
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
		g.hold = g.host.now + 1 // there must be news soon
	}
	g.host.schedule(g)
}

// arrivals knows which envelopes of forwarded proposals were decided on in the term that this member led last, in this
// life. Of other terms it knows nothing.
type arrivals struct {
	term  uint64
	lives []arrival // the one heard from last is last
}

// arrival is what was decided of one life of a member: bit i of seen is envelope newest-i.
type arrival struct {
	member, life uint64
	newest       uint64
	seen         uint64
}

// maxLives of members are remembered in one term of a leader; packets do not live as long as that many restarts.
const maxLives = 32

// first says whether the envelope is new, once. One that is late by 64 is taken for a repetition.
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
