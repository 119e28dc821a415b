package consensus

import (
	"encoding/binary"
	"errors"
	"maps"
	"slices"

	"go.etcd.io/raft/v3/confchange"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
	"google.golang.org/protobuf/proto"
)

// membership is who belongs to a group, as of one entry. It is not changed: see after.
type membership struct {
	conf *raftpb.ConfState
	// births binds members that were added to their directories. Those of the first configuration are bound by whom
	// each host heard first.
	births map[uint64]uint64
	// gone are the members that were removed, and their directories; 0 is any.
	gone map[uint64]uint64
}

// maxGone members that were removed are remembered. More would be heard again, were they still running.
const maxGone = 1000

func joint(conf *raftpb.ConfState) bool { return len(conf.GetVotersOutgoing()) > 0 }

// has says whether a member belongs to the group in any role.
func (m membership) has(member uint64) bool {
	return slices.Contains(m.conf.GetVoters(), member) || slices.Contains(m.conf.GetLearners(), member) ||
		slices.Contains(m.conf.GetVotersOutgoing(), member)
}

// after is the membership after a change.
func (m membership) after(cc *raftpb.ConfChangeV2) (membership, error) {
	track := tracker.MakeProgressTracker(1, 0)
	config, progress, err := confchange.Restore(confchange.Changer{Tracker: track, LastIndex: 1}, m.conf)
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
	return membership{conf: track.ConfState(), births: maps.Clone(m.births), gone: maps.Clone(m.gone)}, nil
}

// bind notes the directories of those who were added, and who is gone. heard are the directories by whom was heard first.
func (m *membership) bind(births, heard map[uint64]uint64, before membership) {
	if m.births == nil {
		m.births = map[uint64]uint64{}
	}
	if m.gone == nil {
		m.gone = map[uint64]uint64{}
	}
	for member, birth := range births {
		if m.has(member) {
			m.births[member] = birth
			delete(m.gone, member)
		}
	}
	for _, set := range [][]uint64{before.conf.GetVoters(), before.conf.GetLearners(), before.conf.GetVotersOutgoing()} {
		for _, member := range set {
			if m.has(member) {
				continue
			}
			birth, added := before.births[member]
			if !added {
				birth = heard[member]
			}
			delete(m.births, member)
			if len(m.gone) < maxGone {
				m.gone[member] = birth
			}
		}
	}
}

// refuses says whether a directory is that of a member that was removed.
func (m membership) refuses(member, birth uint64) bool {
	if m.has(member) {
		return false
	}
	gone, ok := m.gone[member]
	return ok && (gone == 0 || gone == birth)
}

// appendTo encodes who belongs to the group: births, removed members, configuration.
func (m membership) appendTo(b []byte) ([]byte, error) {
	b = appendBirths(b, m.births)
	b = appendBirths(b, m.gone)
	return proto.MarshalOptions{}.MarshalAppend(b, m.conf)
}

// parseMembership decodes what appendTo wrote.
func parseMembership(b []byte) (m membership, err error) {
	r := reader{b: b}
	m.births, m.gone = readBirths(&r), readBirths(&r)
	if r.short || r.bad {
		return m, errors.New("the list of members is broken")
	}
	m.conf = &raftpb.ConfState{}
	return m, proto.Unmarshal(r.b, m.conf)
}

func appendBirths(b []byte, births map[uint64]uint64) []byte {
	b = binary.AppendUvarint(b, uint64(len(births)))
	for _, member := range slices.Sorted(maps.Keys(births)) {
		b = binary.AppendUvarint(b, member)
		b = binary.LittleEndian.AppendUint64(b, births[member])
	}
	return b
}

func readBirths(r *reader) map[uint64]uint64 {
	out := map[uint64]uint64{}
	for n := r.uvarint(); n > 0 && !r.short && !r.bad; n-- {
		member := r.uvarint()
		out[member] = r.fixed64()
	}
	return out
}
