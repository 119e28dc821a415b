package message

import (
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/internal/codec"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
)

// snapshotVersion is the first byte of the data of a raft snapshot (raftpb.Snapshot.Data). The data has what raft's
// metadata lacks: index and term of the state machine, Membership.DirIDs and Membership.Removed. The files of the state
// machine are sent separately. The state machine's index is lower than the snapshot's if the last entries were not for
// the state machine: raft's own entries and membership changes.
const snapshotVersion = 1

// AppendSnapshotData returns the data of a snapshot whose state machine has reached state and whose membership is m.
func AppendSnapshotData(state raftconf.Position, m raftconf.Membership) []byte {
	b := []byte{snapshotVersion}
	b = binary.AppendUvarint(b, state.Index)
	b = binary.AppendUvarint(b, state.Term)
	return raftconf.AppendDirIDs(raftconf.AppendDirIDs(b, m.DirIDs), m.Removed)
}

// ParseSnapshot returns the position where the log begins when the snapshot is installed, with the state machine's
// position and the membership.
func ParseSnapshot(s *raftpb.Snapshot) (p raftconf.LogStart, err error) {
	meta := s.GetMetadata()
	p.At = raftconf.Position{Index: meta.GetIndex(), Term: meta.GetTerm()}
	p.State, p.Members.Conf = p.At, meta.GetConfState()
	if len(s.GetData()) == 0 {
		return p, nil // sent by a version that did not support membership changes
	}
	if v := s.Data[0]; v != snapshotVersion {
		return p, fmt.Errorf("the snapshot has version %d, this program knows %d only", v, snapshotVersion)
	}
	r := codec.Reader{Rest: s.Data[1:]}
	p.State = raftconf.Position{Index: r.Uvarint(), Term: r.Uvarint()}
	p.Members.DirIDs, p.Members.Removed = raftconf.ReadDirIDs(&r), raftconf.ReadDirIDs(&r)
	if r.Short || r.Malformed || len(r.Rest) > 0 || p.State.Index > p.At.Index || p.State.Term > p.At.Term {
		return p, errors.New("the snapshot's position is malformed")
	}
	return p, nil
}
