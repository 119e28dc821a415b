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

// Membership is the membership of a group as of one entry of its log. It is immutable once it is shared: the method
// After returns a new Membership.
type Membership struct {
	Conf *raftpb.ConfState
	// DirIDs maps each member that a membership change added to its data-directory ID. It does not contain members of
	// the first configuration. For each of those, a host accepts only the data directory from which it first received a
	// message.
	DirIDs map[uint64]uint64
	// Removed maps each removed member to the ID of the data directory that it had. The value 0 means that the ID is
	// not known; then the member is treated as removed with every data directory.
	Removed map[uint64]uint64
}

// MaxRemoved is the maximum number of elements of Membership.Removed. A member that is removed when the map is full is
// not added. Other members then do not recognize its messages as those of a removed member, and do not notify it.
const MaxRemoved = 1000

// IsJoint reports whether conf is a joint configuration. In such a configuration, a decision needs a majority of the
// old voters and a majority of the new voters.
func IsJoint(conf *raftpb.ConfState) bool { return len(conf.GetVotersOutgoing()) > 0 }

// Has reports whether a member is a voter or a learner. In a joint configuration, the old and the new voters count.
func (m Membership) Has(member uint64) bool {
	return slices.Contains(m.Conf.GetVoters(), member) || slices.Contains(m.Conf.GetLearners(), member) ||
		slices.Contains(m.Conf.GetVotersOutgoing(), member)
}

// After returns the membership that results when the change cc is applied to m. The new membership has copies of DirIDs
// and Removed, which the caller must update with RecordDirIDs.
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

// RecordDirIDs updates DirIDs and Removed of m, the membership after a change. dirIDs has the data-directory IDs of the
// members that the change added. before is the membership before the change. peerDirIDs has the recorded data-directory
// IDs of members of the first configuration, for the case that the change removed one of these.
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

// Refuses reports whether messages of a member with the data-directory ID dirID must be dropped. That is so if the
// member was removed with this data directory, or with an unknown one.
func (m Membership) Refuses(member, dirID uint64) bool {
	if m.Has(member) {
		return false
	}
	gone, ok := m.Removed[member]
	return ok && (gone == 0 || gone == dirID)
}

// AppendTo appends the encoding of m to b: DirIDs, Removed and Conf.
func (m Membership) AppendTo(b []byte) ([]byte, error) {
	b = AppendDirIDs(b, m.DirIDs)
	b = AppendDirIDs(b, m.Removed)
	return proto.MarshalOptions{}.MarshalAppend(b, m.Conf)
}

// ParseMembership decodes a Membership that AppendTo has encoded.
func ParseMembership(b []byte) (m Membership, err error) {
	r := codec.Reader{Rest: b}
	m.DirIDs, m.Removed = ReadDirIDs(&r), ReadDirIDs(&r)
	if r.Short || r.Malformed {
		return m, errors.New("the membership is malformed")
	}
	m.Conf = &raftpb.ConfState{}
	return m, proto.Unmarshal(r.Rest, m.Conf)
}

// AppendDirIDs appends to b the encoding of a map from member IDs to data-directory IDs. The elements are ordered by
// member ID, so that equal maps have equal encodings.
func AppendDirIDs(b []byte, dirIDs map[uint64]uint64) []byte {
	b = binary.AppendUvarint(b, uint64(len(dirIDs)))
	for _, member := range slices.Sorted(maps.Keys(dirIDs)) {
		b = binary.AppendUvarint(b, member)
		b = binary.LittleEndian.AppendUint64(b, dirIDs[member])
	}
	return b
}

// ReadDirIDs decodes a map that AppendDirIDs has encoded.
func ReadDirIDs(r *codec.Reader) map[uint64]uint64 {
	out := map[uint64]uint64{}
	for n := r.Uvarint(); n > 0 && !r.Short && !r.Malformed; n-- {
		member := r.Uvarint()
		out[member] = r.Fixed64()
	}
	return out
}
