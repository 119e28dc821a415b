package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

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
	KindForward   Kind = 4 // proposals of one group, for its leader to append, all or none
	KindRefuse    Kind = 5 // the leader has not appended those
	KindRemoved   Kind = 6 // the group has removed the member, in the directory that it is
	KindBeats     Kind = 7 // heartbeats of many groups, and answers
)

// Envelope is all that travels between two hosts. Whoever receives one must have proven that it comes from member From.
type Envelope struct {
	From, To uint64
	// FromBirth is the directory of the sender. ToBirth is the directory that it means to reach: in an answer the one
	// that asked, otherwise the one that it knows, 0 if none.
	FromBirth, ToBirth uint64
	Kind               Kind

	// Of all kinds but those of births and beats.
	Group uint64

	// Of KindRaft. The message and its entries are shared with raft and must not be changed.
	Raft *raftpb.Message

	// Of KindForward and KindRefuse: the term that the receiver is asked to append in, the life of the member that asks,
	// and the envelope's number in that life. Payloads are entries, shared like Raft; Refusal is the answer.
	Term, Life, Number uint64
	Payloads           [][]byte
	Refusal            Refusal

	// Of KindBeats.
	Beats []Beat

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
	case KindRemoved:
		buf = binary.AppendUvarint(buf, e.Group)
	case KindBeats:
		for _, b := range e.Beats {
			buf = b.appendTo(buf)
		}
	case KindForward, KindRefuse:
		buf = binary.AppendUvarint(buf, e.Group)
		buf = binary.AppendUvarint(buf, e.Term)
		buf = binary.LittleEndian.AppendUint64(buf, e.Life)
		buf = binary.AppendUvarint(buf, e.Number)
		if e.Kind == KindRefuse {
			buf = append(buf, byte(e.Refusal))
			break
		}
		for _, p := range e.Payloads {
			buf = binary.AppendUvarint(buf, uint64(len(p)))
			buf = append(buf, p...)
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
	case KindRemoved:
		e.Group = r.uvarint()
	case KindBeats:
		for len(r.b) > 0 && !r.short && !r.bad {
			e.Beats = append(e.Beats, r.beat())
		}
	case KindForward, KindRefuse:
		e.Group, e.Term, e.Life, e.Number = r.uvarint(), r.uvarint(), r.fixed64(), r.uvarint()
		if e.Kind == KindRefuse {
			e.Refusal = Refusal(r.byte())
			r.bad = r.bad || e.Refusal != RefusedNotLeader && e.Refusal != RefusedOverloaded
			break
		}
		r.b = slices.Clone(r.b) // once for all payloads
		for len(r.b) > 0 && !r.short && !r.bad {
			n := r.uvarint()
			e.Payloads = append(e.Payloads, r.take(int(min(n, MaxEnvelopeBytes+1))))
		}
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

// peerTypes are the raft messages that a peer may send. The others are local to a host, forwarded
// proposals, which no member of ours sends, or heartbeats, which go by KindBeats.
var peerTypes = map[raftpb.MessageType]bool{
	raftpb.MsgApp: true, raftpb.MsgAppResp: true, raftpb.MsgVote: true, raftpb.MsgVoteResp: true, raftpb.MsgSnap: true,
	raftpb.MsgTimeoutNow: true, raftpb.MsgReadIndex: true, raftpb.MsgReadIndexResp: true, raftpb.MsgPreVote: true, raftpb.MsgPreVoteResp: true,
}

// check refuses what raft would trust and fall over.
func (e *Envelope) check(limits *Limits) error {
	switch e.Kind {
	case KindForward:
		return e.checkForward(limits.ProposalBytes)
	case KindRefuse:
		return nil
	case KindBeats:
		if e.Raft.GetTerm() == 0 {
			return errors.New("a heartbeat without a term")
		}
		return nil
	}
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
	case raftpb.MsgSnap:
		if m.GetSnapshot().GetMetadata().GetIndex() == 0 || m.GetSnapshot().GetMetadata().GetConfState() == nil {
			return errors.New("snapshot without a place")
		}
		if _, err := parseSnapshot(m.GetSnapshot()); err != nil {
			return err
		}
	}
	return nil
}
