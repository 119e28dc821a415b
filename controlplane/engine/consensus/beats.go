package consensus

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
)

// Heartbeats and their answers say little and are many: those of all groups from one host to another that are due at the
// same time go as one envelope.

// beats are those to one directory of a member that wait for the end of the round.
type beats struct {
	to, birth uint64
	list      []Beat
}

// beat makes a heartbeat, or an answer to one, part of what goes to its member.
func (g *Group) beat(m *raftpb.Message) {
	b := heartbeatOf(g.id, m)
	if !b.Answer {
		if g.asked.term != b.Term {
			g.asked = position{term: b.Term}
		}
		g.asked.index = max(g.asked.index, b.Reads)
	}
	h, birth := g.host, g.birthOf(m.GetTo())
	for i := range h.beats {
		if h.beats[i].to == m.GetTo() && h.beats[i].birth == birth {
			h.beats[i].list = append(h.beats[i].list, b)
			return
		}
	}
	h.beats = append(h.beats, beats{m.GetTo(), birth, []Beat{b}})
}

// sendBeats sends what has come together.
func (h *Host) sendBeats() {
	for _, b := range h.beats {
		h.opts.Transport.Send(Envelope{
			From: h.opts.ID, To: b.to, FromBirth: h.births.own, ToBirth: b.birth, Kind: KindBeats, Beats: b.list,
		})
	}
	clear(h.beats)
	h.beats = h.beats[:0]
}

// stepBeats takes beats apart again: each is admitted by its group.
func (h *Host) stepBeats(e Envelope) error {
	for _, b := range e.Beats {
		part := e
		part.Group, part.Beats, part.Raft = b.Group, nil, b.message(&e)
		g, err := h.admit(part)
		if err != nil {
			return err
		}
		switch {
		case g == nil:
		case b.Answer && !g.hasAsked(b):
			// raft would look for reads that nobody has asked.
			h.opts.Log.Warn("dropped a malformed message", "from", e.From, "err", fmt.Sprintf("it confirms read %d", b.Reads))
		default:
			g.step(part)
		}
	}
	return nil
}

// hasAsked says whether this member has asked for what an answer confirms. raft ignores answers of other terms.
func (g *Group) hasAsked(b Beat) bool {
	return b.Reads == 0 || b.Term != g.term || b.Term == g.asked.term && b.Reads <= g.asked.index
}
