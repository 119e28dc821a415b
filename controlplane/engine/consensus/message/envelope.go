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

// Kind says what an Envelope contains.
type Kind uint8

// Values of Envelope.Kind. The numbers are part of the wire format.
const (
	KindRaft          Kind = 1 // a raft message of one group
	KindDirIDRequest  Kind = 2 // requests the ID of the sender's data directory that the receiver has recorded
	KindDirIDResponse Kind = 3 // the response to a KindDirIDRequest
	KindForward       Kind = 4 // proposals of one group, for the leader to append, all or none
	KindRefuse        Kind = 5 // the response that the proposals of a KindForward were not appended
	KindRemoved       Kind = 6 // tells the receiver that the group has removed it with its data directory
	KindHeartbeats    Kind = 7 // heartbeats, and responses to heartbeats, of many groups
)

// Refusal says why a leader has not appended the proposals that were forwarded to it.
type Refusal uint8

// Values of Envelope.Refusal. The numbers are part of the wire format.
const (
	RefusedNotLeader  Refusal = 1 // the member does not lead in the term of the request, or transfers leadership
	RefusedOverloaded Refusal = 2 // too many proposals are not committed yet
)

// Envelope is a set of messages that one host sends to another. The transport must have verified that the sender is the
// member From.
type Envelope struct {
	From, To uint64
	// FromDirID is the data-directory ID of the sender. ToDirID is the data-directory ID of the receiver, as the sender
	// knows it, or 0 if the sender knows none. A response about data-directory IDs has the ToDirID that the request
	// named as FromDirID.
	FromDirID, ToDirID uint64
	Kind               Kind

	// Group is the ID of the raft group. It is not set if Kind is KindDirIDRequest, KindDirIDResponse or
	// KindHeartbeats.
	Group uint64

	// Raft is set if Kind is KindRaft. raft uses the same message and entries, so they must not be modified.
	Raft *raftpb.Message

	// Term, Life and Number are set if Kind is KindForward or KindRefuse. Term is the only term in which the receiver
	// may append the proposals. Life is a random number that identifies the run of the requester's process. Number is
	// the sequence number of the request in that run. Payloads is set if Kind is KindForward: the data of entries,
	// which must not be modified. Refusal is set if Kind is KindRefuse.
	Term, Life, Number uint64
	Payloads           [][]byte
	Refusal            Refusal

	// Heartbeats is set only if Kind is KindHeartbeats.
	Heartbeats []Heartbeat

	// Claim and Known are used if Kind is KindDirIDRequest or KindDirIDResponse. In a request, Claim is true if the
	// receiver is to record the sender's directory unless it has recorded one already; a response repeats the Claim of
	// the request. Known, in a response only, is the recorded directory ID; 0 if none is recorded.
	Claim bool
	Known uint64
}

const (
	envelopeVersion = 1
	// MaxBytes is the maximum size of an encoded envelope in bytes. It suffices for the largest proposal that
	// consensus.Limits allows.
	MaxBytes = 32 << 20
)

// AppendTo appends the encoding of e to buf: the version, Kind, From, To, FromDirID and ToDirID, and then the fields
// that belong to Kind.
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

// Parse decodes an envelope from b. b must contain exactly one. The result does not refer to b.
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
		r.Rest = slices.Clone(r.Rest) // one copy for all payloads
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
		return Envelope{}, errors.New("decode an envelope: cut short")
	}
	if r.Malformed || len(r.Rest) > 0 {
		return Envelope{}, errors.New("decode an envelope: it is malformed")
	}
	return e, nil
}
