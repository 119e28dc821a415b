package consensus

import (
	"encoding/binary"

	"go.etcd.io/raft/v3/raftpb"
)

// Beat is one of them.
type Beat struct {
	Group  uint64
	Answer bool
	Term   uint64
	Commit uint64 // of a heartbeat: what the receiver may take for committed
	Reads  uint64 // the reads that the answer confirms, by the leader's count; 0: none
}

// isBeat says whether a message goes as a Beat.
func isBeat(m *raftpb.Message) bool {
	return m.GetType() == raftpb.MsgHeartbeat || m.GetType() == raftpb.MsgHeartbeatResp
}

// heartbeatOf converts raft's heartbeat, or raft's answer to one, of a group.
func heartbeatOf(group uint64, m *raftpb.Message) Beat {
	b := Beat{Group: group, Answer: m.GetType() == raftpb.MsgHeartbeatResp, Term: m.GetTerm(), Commit: m.GetCommit()}
	if len(m.Context) == 8 {
		b.Reads = binary.LittleEndian.Uint64(m.Context)
	}
	return b
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

func readBeat(r *reader) Beat {
	return Beat{Group: r.uvarint(), Answer: r.bool(), Term: r.uvarint(), Commit: r.uvarint(), Reads: r.uvarint()}
}
