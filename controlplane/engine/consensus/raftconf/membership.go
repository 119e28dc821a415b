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

// Membership lists the members of a group as of one entry. A Membership that others refer to is never modified: After
// returns a new one.
type Membership struct {
	Conf *raftpb.ConfState
	// DirIDs has the data-directory ID of each member that a membership change added. Members of the first
	// configuration are not in DirIDs: each host accepts only the directory from which it first received a message of
	// them.
	DirIDs map[uint64]uint64
	// Removed has the data-directory ID of each removed member, 0 if it is not known; 0 matches every directory.
	Removed map[uint64]uint64
}

// MaxRemoved limits the number of elements of Membership.Removed. Members that are removed beyond the limit are not
// added to it, so their messages are not recognized as those of removed members.
const MaxRemoved = 1000

// IsJoint reports whether conf is a joint configuration, in which majorities of the old and of the new voters are
// needed.
func IsJoint(conf *raftpb.ConfState) bool { return len(conf.GetVotersOutgoing()) > 0 }

// Has reports whether a member is a voter or a learner, in either half of a joint configuration.
func (m Membership) Has(member uint64) bool {
	return slices.Contains(m.Conf.GetVoters(), member) || slices.Contains(m.Conf.GetLearners(), member) ||
		slices.Contains(m.Conf.GetVotersOutgoing(), member)
}

// After returns the membership that the change cc makes of m. The tables of directory IDs are copied; RecordDirIDs
// updates them.
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

// RecordDirIDs updates DirIDs and Removed after a membership change. dirIDs has the directories of added members,
// before is the membership before the change, and peerDirIDs has the directories of members of the first configuration.
func (m *Membership) RecordDirIDs(dirIDs, peerDirIDs map[uint64]uint64, before Membership) {
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
				dirID = peerDirIDs[member]
			}
			delete(m.DirIDs, member)
			if len(m.Removed) < MaxRemoved {
				m.Removed[member] = dirID
			}
		}
	}
}

// Refuses reports whether messages of a member must be dropped because the member was removed with the data directory
// dirID.
func (m Membership) Refuses(member, dirID uint64) bool {
	if m.Has(member) {
		return false
	}
	gone, ok := m.Removed[member]
	return ok && (gone == 0 || gone == dirID)
}

// AppendTo appends the encoding of m to b: DirIDs, Removed, ConfState.
func (m Membership) AppendTo(b []byte) ([]byte, error) {
	b = AppendDirIDs(b, m.DirIDs)
	b = AppendDirIDs(b, m.Removed)
	return proto.MarshalOptions{}.MarshalAppend(b, m.Conf)
}

// ParseMembership decodes a Membership that AppendTo encoded.
func ParseMembership(b []byte) (m Membership, err error) {
	r := codec.Reader{Rest: b}
	m.DirIDs, m.Removed = ReadDirIDs(&r), ReadDirIDs(&r)
	if r.Short || r.Malformed {
		return m, errors.New("the membership is malformed")
	}
	m.Conf = &raftpb.ConfState{}
	return m, proto.Unmarshal(r.Rest, m.Conf)
}

// AppendDirIDs appends to b the encoding of a table that maps member IDs to data-directory IDs, in the order of member
// IDs.
func AppendDirIDs(b []byte, dirIDs map[uint64]uint64) []byte {
	b = binary.AppendUvarint(b, uint64(len(dirIDs)))
	for _, member := range slices.Sorted(maps.Keys(dirIDs)) {
		b = binary.AppendUvarint(b, member)
		b = binary.LittleEndian.AppendUint64(b, dirIDs[member])
	}
	return b
}

// ReadDirIDs decodes a table that AppendDirIDs encoded.
func ReadDirIDs(r *codec.Reader) map[uint64]uint64 {
	out := map[uint64]uint64{}
	for n := r.Uvarint(); n > 0 && !r.Short && !r.Malformed; n-- {
		member := r.Uvarint()
		out[member] = r.Fixed64()
	}
	return out
}
