package raftconf

import (
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/internal/codec"
)

// LogStart describes the begin of a log: the position before its first entry, the position of the state machine there,
// and the membership. During the installation of a snapshot, it describes how the log will begin afterwards.
type LogStart struct {
	At      Position
	State   Position // a position that the state machine has reached: At, or before it if no entry in between was for it
	Members Membership
}

// AppendTo appends the encoding of p to v: index and term of At, index and term of State, and Members.
func (p LogStart) AppendTo(v []byte) ([]byte, error) {
	for _, n := range []uint64{p.At.Index, p.At.Term, p.State.Index, p.State.Term} {
		v = binary.AppendUvarint(v, n)
	}
	v, err := p.Members.AppendTo(v)
	if err != nil {
		return nil, fmt.Errorf("encode the members: %w", err)
	}
	return v, nil
}

// ParseLogStart decodes a LogStart that AppendTo has encoded.
func ParseLogStart(v []byte) (p LogStart, err error) {
	r := codec.Reader{Rest: v}
	p.At, p.State = Position{r.Uvarint(), r.Uvarint()}, Position{r.Uvarint(), r.Uvarint()}
	if r.Short || r.Malformed {
		return p, errors.New("the position is malformed")
	}
	p.Members, err = ParseMembership(r.Rest)
	return p, err
}

// ParseLogStart1 decodes a LogStart in the older format, layout 1 of package raftlog: index and term of At, and a
// ConfState. It sets State to At, because layout 1 does not contain State.
func ParseLogStart1(v []byte) (p LogStart, err error) {
	r := codec.Reader{Rest: v}
	p.At = Position{r.Uvarint(), r.Uvarint()}
	if r.Short || r.Malformed {
		return p, errors.New("the position is malformed")
	}
	p.State, p.Members.Conf = p.At, &raftpb.ConfState{}
	return p, proto.Unmarshal(r.Rest, p.Members.Conf)
}
