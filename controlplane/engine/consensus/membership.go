package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"
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
	m.births, m.gone = r.births(), r.births()
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

func (r *reader) births() map[uint64]uint64 {
	out := map[uint64]uint64{}
	for n := r.uvarint(); n > 0 && !r.short && !r.bad; n-- {
		member := r.uvarint()
		out[member] = r.fixed64()
	}
	return out
}

// changeVersion is the first byte of what travels with a change.
const changeVersion = 1

// appendChange encodes what raft's change does not say: the proposal it is, and the births of those who are added.
func appendChange(b []byte, token uint64, changes []Change) []byte {
	births := map[uint64]uint64{}
	for _, c := range changes {
		if c.Kind == AddLearner {
			births[c.Member] = c.Birth
		}
	}
	b = append(b, changeVersion)
	b = binary.LittleEndian.AppendUint64(b, token)
	return appendBirths(b, births)
}

// parseChange reads an entry that changes the members. One without data leaves a joint configuration.
func parseChange(ent *raftpb.Entry) (cc *raftpb.ConfChangeV2, token uint64, births map[uint64]uint64, err error) {
	cc = &raftpb.ConfChangeV2{}
	if ent.GetType() != raftpb.EntryConfChangeV2 {
		return nil, 0, nil, fmt.Errorf("%s is not known to this version", ent.GetType())
	}
	if err := proto.Unmarshal(ent.Data, cc); err != nil {
		return nil, 0, nil, err
	}
	if len(cc.Context) == 0 {
		return cc, 0, nil, nil
	}
	if cc.Context[0] != changeVersion {
		return nil, 0, nil, fmt.Errorf("version %d is not known to this program: start the version that wrote it", cc.Context[0])
	}
	r := reader{b: cc.Context[1:]}
	token, births = r.fixed64(), r.births()
	if r.short || r.bad || len(r.b) > 0 {
		return nil, 0, nil, errors.New("it is malformed")
	}
	return cc, token, births, nil
}

// membersAt is a membership and the entry that brought it.
type membersAt struct {
	index uint64
	membership
}

// history is the membership over the entries of a log: the first is what was when the log began.
type history []membersAt

// at is the membership as of an entry.
func (h history) at(index uint64) membership {
	for i := len(h) - 1; i > 0; i-- {
		if h[i].index <= index {
			return h[i].membership
		}
	}
	return h[0].membership
}

// cut forgets what was before an entry.
func (h history) cut(index uint64) history {
	first := membersAt{index, h.at(index)}
	out := history{first}
	for _, m := range h[1:] {
		if m.index > index {
			out = append(out, m)
		}
	}
	return out
}
