package raftconf

import (
	"encoding/binary"
	"errors"
	"maps"
	"slices"

	"go.etcd.io/raft/v3/confchange"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/internal/codec"
)

// Membership is who belongs to a group, as of one entry. It is not changed: see after.
type Membership struct {
	Conf *raftpb.ConfState
	// births binds members that were added to their directories. Those of the first configuration are bound by whom
	// each host heard first.
	DirIDs map[uint64]uint64
	// gone are the members that were removed, and their directories; 0 is any.
	Removed map[uint64]uint64
}

// MaxRemoved members that were removed are remembered. More would be heard again, were they still running.
const MaxRemoved = 1000

func IsJoint(conf *raftpb.ConfState) bool { return len(conf.GetVotersOutgoing()) > 0 }

// Has says whether a member belongs to the group in any role.
func (m Membership) Has(member uint64) bool {
	return slices.Contains(m.Conf.GetVoters(), member) || slices.Contains(m.Conf.GetLearners(), member) ||
		slices.Contains(m.Conf.GetVotersOutgoing(), member)
}

// After is the membership after a change.
func (m Membership) After(cc *raftpb.ConfChangeV2) (Membership, error) {
	track := tracker.MakeProgressTracker(1, 0)
	config, progress, err := confchange.Restore(confchange.Changer{Tracker: track, LastIndex: 1}, m.Conf)
	if err != nil {
		return m, err
	}
	track.Config, track.Progress = config, progress
	changer := confchange.Changer{Tracker: track, LastIndex: 1}
	if cc.LeaveJoint() {
		config, _, err = changer.LeaveJoint()
	} else if autoLeave, ok := cc.EnterJoint(); ok {
		config, _, err = changer.EnterJoint(autoLeave, cc.Changes...)
	} else {
		config, _, err = changer.Simple(cc.Changes...)
	}
	if err != nil {
		return m, err
	}
	track.Config = config
	return Membership{Conf: track.ConfState(), DirIDs: maps.Clone(m.DirIDs), Removed: maps.Clone(m.Removed)}, nil
}

// RecordDirIDs notes the directories of those who were added, and who is gone. heard are the directories by whom was heard first.
func (m *Membership) RecordDirIDs(dirIDs, heard map[uint64]uint64, before Membership) {
	if m.DirIDs == nil {
		m.DirIDs = map[uint64]uint64{}
	}
	if m.Removed == nil {
		m.Removed = map[uint64]uint64{}
	}
	for member, dirID := range dirIDs {
		if m.Has(member) {
			m.DirIDs[member] = dirID
			delete(m.Removed, member)
		}
	}
	for _, set := range [][]uint64{before.Conf.GetVoters(), before.Conf.GetLearners(), before.Conf.GetVotersOutgoing()} {
		for _, member := range set {
			if m.Has(member) {
				continue
			}
			dirID, added := before.DirIDs[member]
			if !added {
				dirID = heard[member]
			}
			delete(m.DirIDs, member)
			if len(m.Removed) < MaxRemoved {
				m.Removed[member] = dirID
			}
		}
	}
}

// Refuses says whether a directory is that of a member that was removed.
func (m Membership) Refuses(member, dirID uint64) bool {
	if m.Has(member) {
		return false
	}
	gone, ok := m.Removed[member]
	return ok && (gone == 0 || gone == dirID)
}

// AppendTo encodes who belongs to the group: births, removed members, configuration.
func (m Membership) AppendTo(b []byte) ([]byte, error) {
	b = AppendDirIDs(b, m.DirIDs)
	b = AppendDirIDs(b, m.Removed)
	return proto.MarshalOptions{}.MarshalAppend(b, m.Conf)
}

// ParseMembership decodes what appendTo wrote.
func ParseMembership(b []byte) (m Membership, err error) {
	r := codec.Reader{Rest: b}
	m.DirIDs, m.Removed = ReadDirIDs(&r), ReadDirIDs(&r)
	if r.Short || r.Malformed {
		return m, errors.New("the list of members is broken")
	}
	m.Conf = &raftpb.ConfState{}
	return m, proto.Unmarshal(r.Rest, m.Conf)
}

func AppendDirIDs(b []byte, dirIDs map[uint64]uint64) []byte {
	b = binary.AppendUvarint(b, uint64(len(dirIDs)))
	for _, member := range slices.Sorted(maps.Keys(dirIDs)) {
		b = binary.AppendUvarint(b, member)
		b = binary.LittleEndian.AppendUint64(b, dirIDs[member])
	}
	return b
}

func ReadDirIDs(r *codec.Reader) map[uint64]uint64 {
	out := map[uint64]uint64{}
	for n := r.Uvarint(); n > 0 && !r.Short && !r.Malformed; n-- {
		member := r.Uvarint()
		out[member] = r.Fixed64()
	}
	return out
}
