package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// begin is a place where a log begins, or will begin when a snapshot is installed.
type begin struct {
	at      position
	floor   position // where the state machine is at least
	members membership
}

// appendTo encodes a begin: index, term, index and term of the floor, members.
func (p begin) appendTo(v []byte) ([]byte, error) {
	for _, n := range []uint64{p.at.index, p.at.term, p.floor.index, p.floor.term} {
		v = binary.AppendUvarint(v, n)
	}
	v, err := p.members.appendTo(v)
	if err != nil {
		return nil, fmt.Errorf("encode the members: %w", err)
	}
	return v, nil
}

func decodeBegin(v []byte) (p begin, err error) {
	r := reader{b: v}
	p.at, p.floor = position{r.uvarint(), r.uvarint()}, position{r.uvarint(), r.uvarint()}
	if r.short || r.bad {
		return p, errors.New("broken place")
	}
	p.members, err = parseMembership(r.b)
	return p, err
}

// decodeBegin1 decodes what layout 1 had: index, term, configuration.
func decodeBegin1(v []byte) (p begin, err error) {
	r := reader{b: v}
	p.at = position{r.uvarint(), r.uvarint()}
	if r.short || r.bad {
		return p, errors.New("broken place")
	}
	p.floor, p.members.conf = p.at, &raftpb.ConfState{}
	return p, proto.Unmarshal(r.b, p.members.conf)
}
