package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
)

// A snapshot is at the last entry that was applied. The state machine is before that, if the entries since were not for
// it: raft's own, and changes of the members. What raft's message says beside the configuration:
//
//	version, index and term of the state machine, births, removed members
const snapshotVersion = 1

func appendSnapshot(state position, m membership) []byte {
	b := []byte{snapshotVersion}
	b = binary.AppendUvarint(b, state.index)
	b = binary.AppendUvarint(b, state.term)
	return appendBirths(appendBirths(b, m.births), m.gone)
}

// parseSnapshot is the place where the log begins after a snapshot.
func parseSnapshot(s *raftpb.Snapshot) (p begin, err error) {
	meta := s.GetMetadata()
	p.at = position{meta.GetIndex(), meta.GetTerm()}
	p.floor, p.members.conf = p.at, meta.GetConfState()
	if len(s.GetData()) == 0 {
		return p, nil // of a member that cannot change the members
	}
	if v := s.Data[0]; v != snapshotVersion {
		return p, fmt.Errorf("the snapshot has version %d, this program knows %d only", v, snapshotVersion)
	}
	r := reader{b: s.Data[1:]}
	p.floor = position{r.uvarint(), r.uvarint()}
	p.members.births, p.members.gone = readBirths(&r), readBirths(&r)
	if r.short || r.bad || len(r.b) > 0 || p.floor.index > p.at.index || p.floor.term > p.at.term {
		return p, errors.New("the snapshot's place is malformed")
	}
	return p, nil
}
