package message

import (
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/internal/codec"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
)

// snapshotVersion is the first byte of the data of a raft snapshot (raftpb.Snapshot.Data). The data contains what
// raft's metadata lacks: the index and term of the state machine, Membership.DirIDs and Membership.Removed. The files
// of the state machine are sent separately.
//
// The index of the state machine can be lower than the index of the snapshot. This is so if the entries between the two
// were not passed to the state machine, because they are membership changes or raft's own entries.
const snapshotVersion = 1

// AppendSnapshotData returns the data of a raft snapshot. state is the position of the last entry that the state
// machine has applied, and m is the membership as of the snapshot.
func AppendSnapshotData(state raftconf.Position, m raftconf.Membership) []byte {
	b := []byte{snapshotVersion}
	b = binary.AppendUvarint(b, state.Index)
	b = binary.AppendUvarint(b, state.Term)
	return raftconf.AppendDirIDs(raftconf.AppendDirIDs(b, m.DirIDs), m.Removed)
}

// ParseSnapshot decodes what a raft snapshot says about the log: the position where the log begins once the snapshot is
// installed, and the position of the state machine and the membership there.
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
