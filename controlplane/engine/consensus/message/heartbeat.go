package message

import (
	"encoding/binary"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/internal/codec"
)

// Heartbeat is the content of a raft message MsgHeartbeat of one group. If Answer is set, it is that of a
// MsgHeartbeatResp.
type Heartbeat struct {
	Group  uint64
	Answer bool
	Term   uint64
	Commit uint64 // not in a response: the commit index up to which the receiver has the entries
	Reads  uint64 // raft's context: the number of the last ReadIndex request that a response confirms; 0: none
}

// IsHeartbeat reports whether m is a MsgHeartbeat or a MsgHeartbeatResp. These are sent in envelopes of KindHeartbeats.
func IsHeartbeat(m *raftpb.Message) bool {
	return m.GetType() == raftpb.MsgHeartbeat || m.GetType() == raftpb.MsgHeartbeatResp
}

// HeartbeatOf converts a group's MsgHeartbeat or MsgHeartbeatResp to a Heartbeat.
func HeartbeatOf(group uint64, m *raftpb.Message) Heartbeat {
	b := Heartbeat{Group: group, Answer: m.GetType() == raftpb.MsgHeartbeatResp, Term: m.GetTerm(), Commit: m.GetCommit()}
	if len(m.Context) == 8 {
		b.Reads = binary.LittleEndian.Uint64(m.Context)
	}
	return b
}

// Message converts b back to a raft message. The sender and the receiver of the message are those of the envelope e.
func (b Heartbeat) Message(e *Envelope) *raftpb.Message {
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

// appendTo appends the encoding of b to buf: group, Answer, term, commit index, and number of the read request.
func (b Heartbeat) appendTo(buf []byte) []byte {
	buf = codec.AppendBool(binary.AppendUvarint(buf, b.Group), b.Answer)
	for _, n := range []uint64{b.Term, b.Commit, b.Reads} {
		buf = binary.AppendUvarint(buf, n)
	}
	return buf
}

// readHeartbeat decodes a Heartbeat that appendTo encoded.
func readHeartbeat(r *codec.Reader) Heartbeat {
	return Heartbeat{Group: r.Uvarint(), Answer: r.Bool(), Term: r.Uvarint(), Commit: r.Uvarint(), Reads: r.Uvarint()}
}
