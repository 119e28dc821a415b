package consensus

import (
	"encoding/binary"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
)

// Heartbeats and their answers say little and are many: those of all groups from one host to another that are due at the
// same time go as one envelope.

// Beat is one of them.
type Beat struct {
	Group  uint64
	Answer bool
	Term   uint64
	Commit uint64 // of a heartbeat: what the receiver may take for committed
	Reads  uint64 // the reads that the answer confirms, by the leader's count; 0: none
}

// beats are those to one directory of a member that wait for the end of the round.
type beats struct {
	to, birth uint64
	list      []Beat
}

// isBeat says whether a message goes as a Beat.
func isBeat(m *raftpb.Message) bool {
	return m.GetType() == raftpb.MsgHeartbeat || m.GetType() == raftpb.MsgHeartbeatResp
}

// beat makes a heartbeat, or an answer to one, part of what goes to its member.
func (g *Group) beat(m *raftpb.Message) {
	b := Beat{Group: g.id, Answer: m.GetType() == raftpb.MsgHeartbeatResp, Term: m.GetTerm(), Commit: m.GetCommit()}
	if len(m.Context) == 8 {
		b.Reads = binary.LittleEndian.Uint64(m.Context)
	}
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

// message is the beat as raft's.
func (b Beat) message(e *Envelope) *raftpb.Message {
	m := &raftpb.Message{
		Type: raftpb.MsgHeartbeat.Enum(), From: new(e.From), To: new(e.To), Term: new(b.Term), Commit: new(b.Commit),
	}
	if b.Answer {
		m.Type = raftpb.MsgHeartbeatResp.Enum()
	}
	if b.Reads > 0 {
		m.Context = binary.LittleEndian.AppendUint64(nil, b.Reads)
	}
	return m
}

// appendTo encodes a beat.
func (b Beat) appendTo(buf []byte) []byte {
	buf = appendBool(binary.AppendUvarint(buf, b.Group), b.Answer)
	for _, n := range []uint64{b.Term, b.Commit, b.Reads} {
		buf = binary.AppendUvarint(buf, n)
	}
	return buf
}

func (r *reader) beat() Beat {
	return Beat{Group: r.uvarint(), Answer: r.bool(), Term: r.uvarint(), Commit: r.uvarint(), Reads: r.uvarint()}
}
