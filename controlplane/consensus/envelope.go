package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// Kind says what an Envelope carries.
type Kind uint8

// The kinds of envelope. Their numbers are on the wire.
const (
	KindRaft      Kind = 1 // a raft message of one group
	KindBirthAsk  Kind = 2 // "which directory of mine do you know?"
	KindBirthTell Kind = 3 // the answer
)

// Envelope is all that travels between two hosts. Whoever receives one must have proven that it comes from member From.
type Envelope struct {
	From, To uint64
	// FromBirth is the directory of the sender. ToBirth is the directory that it means to reach: in an answer the one
	// that asked, otherwise the one that it knows, 0 if none.
	FromBirth, ToBirth uint64
	Kind               Kind

	// Of KindRaft. The message and its entries are shared with raft and must not be changed.
	Group uint64
	Raft  *raftpb.Message

	// Of KindBirthAsk and KindBirthTell. A claim asks to be recorded, not only looked up; Known is the directory that
	// the sender of the answer listens to, 0 if none.
	Claim bool
	Known uint64
}

const (
	envelopeVersion = 1
	// MaxEnvelopeBytes bounds an encoded envelope: it holds the largest entry and its surroundings.
	MaxEnvelopeBytes = 32 << 20
)

// AppendTo appends the encoding of e to buf: version, kind, from, to, births, then what the kind needs.
func (e *Envelope) AppendTo(buf []byte) ([]byte, error) {
	start := len(buf)
	buf = append(buf, envelopeVersion, byte(e.Kind))
	buf = binary.AppendUvarint(buf, e.From)
	buf = binary.AppendUvarint(buf, e.To)
	buf = binary.LittleEndian.AppendUint64(buf, e.FromBirth)
	buf = binary.LittleEndian.AppendUint64(buf, e.ToBirth)
	switch e.Kind {
	case KindRaft:
		if e.Raft == nil {
			return nil, errors.New("encode an envelope: no raft message in it")
		}
		buf = binary.AppendUvarint(buf, e.Group)
		var err error
		if buf, err = (proto.MarshalOptions{}).MarshalAppend(buf, e.Raft); err != nil {
			return nil, fmt.Errorf("encode an envelope: %w", err)
		}
	case KindBirthAsk:
		buf = appendBool(buf, e.Claim)
	case KindBirthTell:
		buf = appendBool(buf, e.Claim)
		buf = binary.LittleEndian.AppendUint64(buf, e.Known)
	default:
		return nil, fmt.Errorf("encode an envelope: kind %d is unknown", e.Kind)
	}
	if n := len(buf) - start; n > MaxEnvelopeBytes {
		return nil, fmt.Errorf("encode an envelope: %d bytes are more than %d", n, MaxEnvelopeBytes)
	}
	return buf, nil
}

// ParseEnvelope decodes one envelope, which must fill b. The envelope does not refer to b.
func ParseEnvelope(b []byte) (Envelope, error) {
	if len(b) > MaxEnvelopeBytes {
		return Envelope{}, fmt.Errorf("decode an envelope: %d bytes are more than %d", len(b), MaxEnvelopeBytes)
	}
	if len(b) > 0 && b[0] != envelopeVersion {
		return Envelope{}, fmt.Errorf("decode an envelope: the peer speaks version %d, this program version %d", b[0], envelopeVersion)
	}
	r := reader{b: b}
	r.byte()
	e := Envelope{Kind: Kind(r.byte()), From: r.uvarint(), To: r.uvarint(), FromBirth: r.fixed64(), ToBirth: r.fixed64()}
	switch e.Kind {
	case KindRaft:
		e.Group = r.uvarint()
		if r.short {
			break
		}
		e.Raft = &raftpb.Message{}
		if err := proto.Unmarshal(r.b, e.Raft); err != nil {
			return Envelope{}, fmt.Errorf("decode an envelope: %w", err)
		}
		r.b = nil
	case KindBirthAsk:
		e.Claim = r.bool()
	case KindBirthTell:
		e.Claim = r.bool()
		e.Known = r.fixed64()
	default:
		if !r.short {
			return Envelope{}, fmt.Errorf("decode an envelope: kind %d is unknown", e.Kind)
		}
	}
	if r.short {
		return Envelope{}, errors.New("decode an envelope: it is cut short")
	}
	if r.bad || len(r.b) > 0 {
		return Envelope{}, errors.New("decode an envelope: it is malformed")
	}
	return e, nil
}

func appendBool(buf []byte, v bool) []byte {
	if v {
		return append(buf, 1)
	}
	return append(buf, 0)
}

// reader takes fields off a buffer and remembers whether one was missing or malformed.
type reader struct {
	b          []byte
	short, bad bool
}

func (r *reader) take(n int) []byte {
	if len(r.b) < n {
		r.short, r.b = true, nil
		return nil
	}
	v := r.b[:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) byte() byte {
	if v := r.take(1); v != nil {
		return v[0]
	}
	return 0
}

func (r *reader) bool() bool {
	v := r.byte()
	r.bad = r.bad || v > 1
	return v == 1
}

func (r *reader) fixed64() uint64 {
	if v := r.take(8); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	switch {
	case n == 0:
		r.short = true
		return 0
	case n < 0:
		r.bad = true
		r.b = nil
		return 0
	}
	r.b = r.b[n:]
	return v
}

// peerTypes are the raft messages that a peer may send. The others are local to a host, or forwarded proposals, which
// no member of ours sends.
var peerTypes = map[raftpb.MessageType]bool{
	raftpb.MsgApp: true, raftpb.MsgAppResp: true, raftpb.MsgVote: true, raftpb.MsgVoteResp: true, raftpb.MsgSnap: true,
	raftpb.MsgHeartbeat: true, raftpb.MsgHeartbeatResp: true, raftpb.MsgTimeoutNow: true, raftpb.MsgReadIndex: true,
	raftpb.MsgReadIndexResp: true, raftpb.MsgPreVote: true, raftpb.MsgPreVoteResp: true,
}

// check refuses a raft message that raft would trust and fall over.
func (e *Envelope) check() error {
	m := e.Raft
	switch {
	case m == nil:
		return errors.New("no message")
	case m.GetFrom() != e.From || m.GetTo() != e.To:
		return fmt.Errorf("message from %d to %d in an envelope from %d to %d", m.GetFrom(), m.GetTo(), e.From, e.To)
	case !peerTypes[m.GetType()]:
		return fmt.Errorf("%s is not for peers", m.GetType())
	case m.GetTerm() == 0 && m.GetType() != raftpb.MsgReadIndex:
		return fmt.Errorf("%s without a term", m.GetType())
	}
	switch m.GetType() {
	case raftpb.MsgApp:
		for i, ent := range m.Entries {
			if ent.GetIndex() != m.GetIndex()+uint64(i)+1 || ent.GetTerm() < m.GetLogTerm() || ent.GetTerm() > m.GetTerm() {
				return fmt.Errorf("entry %d of term %d out of order", ent.GetIndex(), ent.GetTerm())
			}
		}
	case raftpb.MsgReadIndex, raftpb.MsgReadIndexResp:
		if len(m.Entries) != 1 {
			return fmt.Errorf("%s with %d entries", m.GetType(), len(m.Entries))
		}
	case raftpb.MsgHeartbeat, raftpb.MsgHeartbeatResp:
		if n := len(m.Context); n != 0 && n != 8 {
			return fmt.Errorf("%s with a context of %d bytes", m.GetType(), n)
		}
	case raftpb.MsgSnap:
		if m.GetSnapshot().GetMetadata().GetIndex() == 0 || m.GetSnapshot().GetMetadata().GetConfState() == nil {
			return errors.New("snapshot without a place")
		}
	}
	return nil
}
