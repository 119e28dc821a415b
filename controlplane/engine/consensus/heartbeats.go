package consensus

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
)

// Heartbeats and their answers say little and are many: those of all groups from one host to another that are due at the
// same time go as one envelope.

// heartbeats are those to one directory of a member that wait for the end of the round.
type heartbeats struct {
	to, dirID uint64
	list      []message.Heartbeat
}

// addHeartbeat makes a heartbeat, or an answer to one, part of what goes to its member.
func (g *Group) addHeartbeat(m *raftpb.Message) {
	b := message.HeartbeatOf(g.id, m)
	if !b.Answer {
		if g.asked.Term != b.Term {
			g.asked = raftconf.Position{Term: b.Term}
		}
		g.asked.Index = max(g.asked.Index, b.Reads)
	}
	h, dirID := g.host, g.dirIDOf(m.GetTo())
	for i := range h.heartbeats {
		if h.heartbeats[i].to == m.GetTo() && h.heartbeats[i].dirID == dirID {
			h.heartbeats[i].list = append(h.heartbeats[i].list, b)
			return
		}
	}
	h.heartbeats = append(h.heartbeats, heartbeats{m.GetTo(), dirID, []message.Heartbeat{b}})
}

// sendHeartbeats sends what has come together.
func (h *Host) sendHeartbeats() {
	for _, b := range h.heartbeats {
		h.opts.Transport.Send(message.Envelope{
			From: h.opts.ID, To: b.to, FromDirID: h.dirIDs.own, ToDirID: b.dirID, Kind: message.KindHeartbeats, Heartbeats: b.list,
		})
	}
	clear(h.heartbeats)
	h.heartbeats = h.heartbeats[:0]
}

// stepHeartbeats takes beats apart again: each is admitted by its group.
func (h *Host) stepHeartbeats(e message.Envelope) error {
	for _, b := range e.Heartbeats {
		part := e
		part.Group, part.Heartbeats, part.Raft = b.Group, nil, b.Message(&e)
		g, err := h.admit(part)
		if err != nil {
			return err
		}
		switch {
		case g == nil:
		case b.Answer && !g.hasAskedFor(b):
			// raft would look for reads that nobody has asked.
			h.opts.Log.Warn("dropped a malformed message", "from", e.From, "err", fmt.Sprintf("it confirms read %d", b.Reads))
		default:
			g.step(part)
		}
	}
	return nil
}

// hasAskedFor says whether this member has asked for what an answer confirms. raft ignores answers of other terms.
func (g *Group) hasAskedFor(b message.Heartbeat) bool {
	return b.Reads == 0 || b.Term != g.term || b.Term == g.asked.Term && b.Reads <= g.asked.Index
}
