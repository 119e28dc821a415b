package consensus

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
)

// heartbeats collects raft heartbeats, and responses to heartbeats, of all groups for one receiving member. Process
// sends them as one envelope per round.
type heartbeats struct {
	to, dirID uint64
	list      []message.Heartbeat
}

// addHeartbeat adds a raft heartbeat, or a response to one, to the next heartbeat envelope for its receiver.
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

// sendHeartbeats sends the collected heartbeats, in one envelope per member, and empties the collection.
func (h *Host) sendHeartbeats() {
	for _, b := range h.heartbeats {
		h.opts.Transport.Send(message.Envelope{
			From: h.opts.ID, To: b.to, FromDirID: h.dirIDs.own, ToDirID: b.dirID, Kind: message.KindHeartbeats, Heartbeats: b.list,
		})
	}
	clear(h.heartbeats)
	h.heartbeats = h.heartbeats[:0]
}

// stepHeartbeats passes each heartbeat of an envelope to its group.
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
			// Drop the response: it confirms a read request that this leader did not send, and raft would panic.
			h.opts.Log.Warn("dropped a malformed message", "from", e.From, "err", fmt.Sprintf("it confirms read %d", b.Reads))
		default:
			g.step(part)
		}
	}
	return nil
}

// hasAskedFor reports whether it is safe to pass the heartbeat response b to raft. It is safe if b confirms no read
// request, confirms one that this leader has sent, or is of another term, because raft ignores responses of other
// terms.
func (g *Group) hasAskedFor(b message.Heartbeat) bool {
	return b.Reads == 0 || b.Term != g.term || b.Term == g.asked.Term && b.Reads <= g.asked.Index
}
