package message

import (
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/internal/codec"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
)

// A snapshot is at the last entry that was applied. The state machine is before that, if the entries since were not for
// it: raft's own, and changes of the members. What raft's message says beside the configuration:
//
//	version, index and term of the state machine, births, removed members
const snapshotVersion = 1

func AppendSnapshotData(state raftconf.Position, m raftconf.Membership) []byte {
	b := []byte{snapshotVersion}
	b = binary.AppendUvarint(b, state.Index)
	b = binary.AppendUvarint(b, state.Term)
	return raftconf.AppendDirIDs(raftconf.AppendDirIDs(b, m.DirIDs), m.Removed)
}

// ParseSnapshot is the place where the log begins after a snapshot.
func ParseSnapshot(s *raftpb.Snapshot) (p raftconf.LogStart, err error) {
	meta := s.GetMetadata()
	p.At = raftconf.Position{Index: meta.GetIndex(), Term: meta.GetTerm()}
	p.State, p.Members.Conf = p.At, meta.GetConfState()
	if len(s.GetData()) == 0 {
		return p, nil // of a member that cannot change the members
	}
	if v := s.Data[0]; v != snapshotVersion {
		return p, fmt.Errorf("the snapshot has version %d, this program knows %d only", v, snapshotVersion)
	}
	r := codec.Reader{Rest: s.Data[1:]}
	p.State = raftconf.Position{Index: r.Uvarint(), Term: r.Uvarint()}
	p.Members.DirIDs, p.Members.Removed = raftconf.ReadDirIDs(&r), raftconf.ReadDirIDs(&r)
	if r.Short || r.Malformed || len(r.Rest) > 0 || p.State.Index > p.At.Index || p.State.Term > p.At.Term {
		return p, errors.New("the snapshot's place is malformed")
	}
	return p, nil
}
