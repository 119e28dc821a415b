package message

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/internal/codec"
)

// Kind says what an Envelope carries.
type Kind uint8

// The kinds of envelope. Their numbers are on the wire.
const (
	KindRaft          Kind = 1 // a raft message of one group
	KindDirIDRequest  Kind = 2 // "which directory of mine do you know?"
	KindDirIDResponse Kind = 3 // the answer
	KindForward       Kind = 4 // proposals of one group, for its leader to append, all or none
	KindRefuse        Kind = 5 // the leader has not appended those
	KindRemoved       Kind = 6 // the group has removed the member, in the directory that it is
	KindHeartbeats    Kind = 7 // heartbeats of many groups, and answers
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
	FromDirID, ToDirID uint64
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
	Heartbeats []Heartbeat

	// Of KindBirthAsk and KindBirthTell. A claim asks to be recorded, not only looked up; Known is the directory that
	// the sender of the answer listens to, 0 if none.
	Claim bool
	Known uint64
}

const (
	envelopeVersion = 1
	// MaxEnvelopeBytes bounds an encoded envelope: it holds the largest entry and its surroundings.
	MaxBytes = 32 << 20
)

// AppendTo appends the encoding of e to buf: version, kind, from, to, births, then what the kind needs.
func (e *Envelope) AppendTo(buf []byte) ([]byte, error) {
	start := len(buf)
	buf = append(buf, envelopeVersion, byte(e.Kind))
	buf = binary.AppendUvarint(buf, e.From)
	buf = binary.AppendUvarint(buf, e.To)
	buf = binary.LittleEndian.AppendUint64(buf, e.FromDirID)
	buf = binary.LittleEndian.AppendUint64(buf, e.ToDirID)
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
	case KindHeartbeats:
		for _, b := range e.Heartbeats {
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
	case KindDirIDRequest:
		buf = codec.AppendBool(buf, e.Claim)
	case KindDirIDResponse:
		buf = codec.AppendBool(buf, e.Claim)
		buf = binary.LittleEndian.AppendUint64(buf, e.Known)
	default:
		return nil, fmt.Errorf("encode an envelope: kind %d is unknown", e.Kind)
	}
	if n := len(buf) - start; n > MaxBytes {
		return nil, fmt.Errorf("encode an envelope: %d bytes are more than %d", n, MaxBytes)
	}
	return buf, nil
}

// Parse decodes one envelope, which must fill b. The envelope does not refer to b.
func Parse(b []byte) (Envelope, error) {
	if len(b) > MaxBytes {
		return Envelope{}, fmt.Errorf("decode an envelope: %d bytes are more than %d", len(b), MaxBytes)
	}
	if len(b) > 0 && b[0] != envelopeVersion {
		return Envelope{}, fmt.Errorf("decode an envelope: the peer speaks version %d, this program version %d", b[0], envelopeVersion)
	}
	r := codec.Reader{Rest: b}
	r.Byte()
	e := Envelope{Kind: Kind(r.Byte()), From: r.Uvarint(), To: r.Uvarint(), FromDirID: r.Fixed64(), ToDirID: r.Fixed64()}
	switch e.Kind {
	case KindRaft:
		e.Group = r.Uvarint()
		if r.Short {
			break
		}
		e.Raft = &raftpb.Message{}
		if err := proto.Unmarshal(r.Rest, e.Raft); err != nil {
			return Envelope{}, fmt.Errorf("decode an envelope: %w", err)
		}
		r.Rest = nil
	case KindRemoved:
		e.Group = r.Uvarint()
	case KindHeartbeats:
		for len(r.Rest) > 0 && !r.Short && !r.Malformed {
			e.Heartbeats = append(e.Heartbeats, readHeartbeat(&r))
		}
	case KindForward, KindRefuse:
		e.Group, e.Term, e.Life, e.Number = r.Uvarint(), r.Uvarint(), r.Fixed64(), r.Uvarint()
		if e.Kind == KindRefuse {
			e.Refusal = Refusal(r.Byte())
			r.Malformed = r.Malformed || e.Refusal != RefusedNotLeader && e.Refusal != RefusedOverloaded
			break
		}
		r.Rest = slices.Clone(r.Rest) // once for all payloads
		for len(r.Rest) > 0 && !r.Short && !r.Malformed {
			n := r.Uvarint()
			e.Payloads = append(e.Payloads, r.Take(int(min(n, MaxBytes+1))))
		}
	case KindDirIDRequest:
		e.Claim = r.Bool()
	case KindDirIDResponse:
		e.Claim = r.Bool()
		e.Known = r.Fixed64()
	default:
		if !r.Short {
			return Envelope{}, fmt.Errorf("decode an envelope: kind %d is unknown", e.Kind)
		}
	}
	if r.Short {
		return Envelope{}, errors.New("decode an envelope: it is cut short")
	}
	if r.Malformed || len(r.Rest) > 0 {
		return Envelope{}, errors.New("decode an envelope: it is malformed")
	}
	return e, nil
}
