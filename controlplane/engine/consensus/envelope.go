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

// Refusal says why a leader did not append what was forwarded to it.
type Refusal uint8

// The refusals. Their numbers are on the wire.
const (
	RefusedNotLeader  Refusal = 1 // it does not lead in that term, or is about to hand over
	RefusedOverloaded Refusal = 2
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
			e.Beats = append(e.Beats, readBeat(&r))
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
