package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// addNewMember adds a member with an empty disk to the cluster and starts it with Options.Join.
func (c *cluster) addNewMember(id uint64) *member {
	if c.first == nil {
		c.first = slices.Clone(c.ids)
	}
	if !slices.Contains(c.ids, id) {
		c.ids = append(c.ids, id)
	}
	m := &member{c: c, id: id, fs: vfs.NewCrashableMem(), joins: true}
	c.members[id] = m
	m.start()
	return m
}

// change calls ChangeMembers on the member, without a call of Process. The answer is filled in when the callback is
// called.
func (m *member) change(force bool, changes ...Change) *answer {
	a := &answer{}
	m.group.ChangeMembers(changes, force, func(err error) {
		a.n++
		a.err = err
	})
	return a
}

// mustChange proposes changes on m with force and requires that they are applied.
func (c *cluster) mustChange(m *member, changes ...Change) {
	c.t.Helper()
	a := m.change(true, changes...)
	c.settle()
	require.Equal(c.t, 1, a.n)
	require.NoError(c.t, a.err)
}

// grow adds m to the group as a learner and promotes it to a voter. l must be the leader.
func (c *cluster) grow(l, m *member) {
	c.t.Helper()
	c.mustChange(l, Change{Kind: AddLearner, Member: m.id, DirID: m.host.dirIDs.own})
	c.tick(3)
	c.mustChange(l, Change{Kind: Promote, Member: m.id})
}

func reason(err error) MembersReason {
	var refused *MembersError
	if errors.As(err, &refused) {
		return refused.Reason
	}
	return 0
}

// voters returns the sorted voters of the group. All members in among must agree on them.
func (c *cluster) voters(among ...*member) []uint64 {
	c.t.Helper()
	want := slices.Sorted(slices.Values(among[0].group.Status().Voters))
	for _, m := range among[1:] {
		require.Equal(c.t, want, slices.Sorted(slices.Values(m.group.Status().Voters)), "member %d has other voters", m.id)
	}
	return want
}

// TestGrowAndShrink changes the group from one member to three and back to one, while proposals are made. No proposal
// may be lost.
func TestGrowAndShrink(t *testing.T) {
	c := startCluster(t, 1, 1)
	c.limits.TailEntries = 8
	l := c.leader()
	var all []string
	put := func(m *member) {
		p := fmt.Sprintf("a=%d", len(all))
		all = append(all, p)
		c.put(m, p)
	}
	put(l)
	for _, id := range []uint64{2, 3} {
		m := c.addNewMember(id)
		put(l)
		c.grow(l, m)
		put(l)
	}
	members := []*member{c.members[1], c.members[2], c.members[3]}
	c.tick(3)
	require.Equal(t, []uint64{1, 2, 3}, c.voters(members...))
	c.converge(all...)

	// Two of the three members are a quorum now.
	c.members[1].crash()
	l = c.elect(c.members[2], c.members[3])
	put(l)
	c.members[1].start()
	c.elect()
	c.converge(all...)

	for _, id := range []uint64{1, 2} {
		l = c.elect()
		a := l.change(true, Change{Kind: Remove, Member: id})
		asked := l.propose(fmt.Sprintf("b=%d", id))
		c.settle()
		require.NoError(t, a.err)
		if asked[0].err == nil {
			all = append(all, fmt.Sprintf("b=%d", id))
		}
		c.tick(30)
		if c.members[id].host.Err() == nil {
			c.members[id].stop() // the removed member did not learn of its removal
		}
	}
	l = c.elect(c.members[3])
	put(l)
	require.Equal(t, []uint64{3}, c.voters(l))
	require.Equal(t, all, c.members[3].machine.Log)
	c.members[3].crash()
	c.members[3].start()
	l = c.elect(c.members[3])
	put(l)
	require.Equal(t, all, c.members[3].machine.Log)
}

// TestLearnerDoesNotCountForQuorum checks that the only voter can commit although a learner never starts.
func TestLearnerDoesNotCountForQuorum(t *testing.T) {
	c := startCluster(t, 1, 1)
	c.first = []uint64{1}
	l := c.leader()
	c.mustChange(l, Change{Kind: AddLearner, Member: 9, DirID: 99})
	c.tick(50)
	c.put(l, "a=1")
	require.Equal(t, []uint64{9}, l.group.Status().Learners)
	require.Equal(t, ReasonNotCaughtUp, reason(l.change(false, Change{Kind: Promote, Member: 9}).err))
}

// TestPromoteTooEarly checks that a learner is not promoted before it has nearly all of the log and while it sends no
// messages.
func TestPromoteTooEarly(t *testing.T) {
	c := startCluster(t, 1, 1)
	l := c.leader()
	c.putMany(l, 0, 40)
	m := c.addNewMember(2)
	promote := Change{Kind: Promote, Member: 2}
	require.Equal(t, ReasonUnknown, reason(l.change(false, promote).err))
	c.isolate(m)
	c.mustChange(l, Change{Kind: AddLearner, Member: 2, DirID: m.host.dirIDs.own})
	c.tick(5)
	require.Equal(t, ReasonNotCaughtUp, reason(l.change(false, promote).err))
	c.heal()
	c.tick(5)
	require.Equal(t, l.group.Status().Last, l.group.Status().Match[2])
	c.isolate(m)
	c.tick(20)
	require.Equal(t, ReasonNotCaughtUp, reason(l.change(false, promote).err), "a learner that does not respond cannot be promoted")
	c.heal()
	c.tick(5)
	c.mustChange(l, promote)
	require.Equal(t, []uint64{1, 2}, c.voters(l, m))
	c.mustChange(l, promote) // repeated: the change is applied already
}

// TestChangeThatLosesQuorumIsRefused checks that a change is refused if it would leave fewer than a quorum of reachable
// voters, or remove the last voter.
func TestChangeThatLosesQuorumIsRefused(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	a, b := c.others(l)[0], c.others(l)[1]
	c.tick(2)
	require.NoError(t, l.group.VerifyMembers([]Change{{Kind: Remove, Member: a.id}}, false))
	b.crash()
	c.tick(15)
	require.Equal(t, l, c.leader(l, a))
	require.Equal(t, ReasonNoQuorum, reason(l.group.VerifyMembers([]Change{{Kind: Remove, Member: a.id}}, true)), "b, which is down, would be one of two voters")
	c.mustChange(l, Change{Kind: Remove, Member: b.id})
	require.Equal(t, ReasonLastVoter, reason(l.group.VerifyMembers([]Change{{Kind: Remove, Member: a.id}}, false)))
	c.mustChange(l, Change{Kind: Remove, Member: a.id})
	require.Equal(t, ReasonLastVoter, reason(l.group.VerifyMembers([]Change{{Kind: Remove, Member: l.id}}, true)))
	require.NoError(t, l.group.VerifyMembers([]Change{{Kind: Remove, Member: 77}}, false), "removing a member that does not exist changes nothing")
	require.Equal(t, ReasonMalformed, reason(l.group.VerifyMembers(nil, false)))
	require.Equal(t, ReasonMalformed, reason(l.group.VerifyMembers([]Change{{Kind: AddLearner, Member: 5}}, false)))
	require.Equal(t, ReasonMalformed, reason(l.group.VerifyMembers([]Change{{Kind: 9, Member: 5}}, false)))
	c.put(l, "a=1")
}

// TestLeaderRemovesItself checks that a leader that removes itself stops with a RemovedError, and that the other
// members continue.
func TestLeaderRemovesItself(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	rest := c.others(l)
	c.put(l, "a=1")
	late := l.propose("a=2")[0]
	c.mustChange(l, Change{Kind: Remove, Member: l.id})
	require.NoError(t, late.err)
	c.tick(1)
	var removed *RemovedError
	require.ErrorAs(t, l.host.Err(), &removed)
	next := c.elect(rest...)
	c.put(next, "a=3")
	require.Equal(t, []string{"a=1", "a=2", "a=3"}, next.machine.Log)
	require.Len(t, c.voters(rest...), 2)

	// After a restart the member is informed again, because the applied removal may not have been durable.
	l.crash()
	l.start()
	c.tick(30)
	require.ErrorAs(t, l.host.Err(), &removed)
}

// TestLastVoterAfterCrash checks that after the removal of one of two members the other one can crash, restart and lead
// as the only voter.
func TestLastVoterAfterCrash(t *testing.T) {
	c := startCluster(t, 1, 1)
	l := c.leader()
	c.put(l, "a=1")
	other := c.addNewMember(2)
	c.grow(l, other)
	c.mustChange(l, Change{Kind: Remove, Member: 2})
	other.stop()
	l.crash()
	l.start()
	c.put(c.elect(l), "a=2")
	require.Equal(t, []string{"a=1", "a=2"}, l.machine.Log)
}

// TestJointChange checks that a change of several members goes through a joint configuration, which the group leaves
// without a further call.
func TestJointChange(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	gone := c.others(l)[0]
	stays := c.others(l)[1]
	four, five := c.addNewMember(4), c.addNewMember(5)
	c.mustChange(l, Change{Kind: AddLearner, Member: 4, DirID: four.host.dirIDs.own}, Change{Kind: AddLearner, Member: 5, DirID: five.host.dirIDs.own})
	c.tick(5)
	second := l.change(false, Change{Kind: Promote, Member: 4}, Change{Kind: Remove, Member: gone.id})
	require.Equal(t, ReasonPending, reason(l.change(false, Change{Kind: Promote, Member: 5}).err), "a second change is refused while one is under way")
	c.settle()
	require.NoError(t, second.err)
	c.tick(2)
	require.Empty(t, l.group.Status().Outgoing, "the group leaves the joint configuration without another call")
	c.mustChange(l, Change{Kind: Promote, Member: 5}, Change{Kind: Remove, Member: stays.id})
	c.tick(2)
	gone.stop()
	stays.stop()
	c.put(l, "a=1")
	want := slices.Sorted(slices.Values([]uint64{l.id, 4, 5}))
	c.tick(3)
	require.Equal(t, want, c.voters(l, four, five))
	for _, m := range []*member{l, four, five} {
		require.Equal(t, []string{"a=1"}, m.machine.Log)
	}
	// The memberships are correct after a restart, when they are computed from the log.
	for _, m := range []*member{l, four, five} {
		m.crash()
		m.start()
		require.Subset(t, []uint64{1, 2, 3, 4, 5}, m.group.Status().Voters)
	}
	c.put(c.elect(l, four, five), "a=2")
	c.tick(3)
	require.Equal(t, want, c.voters(l, four, five))
}

// TestCrashDuringMembershipChange crashes each member after each number of packets of a change. All members must then
// agree on the membership, with all or none of the change, and no acknowledged proposal may be lost.
func TestCrashDuringMembershipChange(t *testing.T) {
	for victim := range uint64(4) {
		for after := range 14 {
			c := startCluster(t, 3, byte(after))
			c.limits.TailEntries = 3
			l := c.leader()
			c.put(l, "a=1")
			m := c.addNewMember(4)
			c.mustChange(l, Change{Kind: AddLearner, Member: 4, DirID: m.host.dirIDs.own})
			c.tick(3)
			l = c.leader(c.members[1], c.members[2], c.members[3], m)
			require.NotNil(t, l)
			gone := c.others(l)[0]
			l.change(false, Change{Kind: Promote, Member: 4}, Change{Kind: Remove, Member: gone.id})
			asked := l.propose("a=2")[0]
			c.frozen = true
			crash := c.members[victim+1]
			n := 0
			for i := 0; n < after && i < 100; i++ {
				c.settle()
				if len(c.net) == 0 {
					break
				}
				p := c.net[0]
				c.net = c.net[1:]
				c.deliverOne(p)
				n++
			}
			crash.crash()
			c.frozen = false
			c.net = slices.DeleteFunc(c.net, func(p packet) bool { return p.dir != "" })
			crash.start()
			c.tick(60)
			var up []*member
			for _, id := range c.ids {
				m := c.members[id]
				if m.host.Err() == nil {
					up = append(up, m)
					continue
				}
				var removed *RemovedError
				require.ErrorAs(t, m.host.Err(), &removed)
			}
			for len(up) > 3 { // the removed member may not have learned of its removal
				up = slices.DeleteFunc(up, func(m *member) bool {
					return m == gone && !slices.Contains(c.members[4].group.Status().Voters, gone.id)
				})
				if len(up) > 3 {
					break
				}
			}
			l = c.elect(up...)
			c.put(l, "a=3")
			c.tick(10)
			require.Empty(t, l.group.Status().Outgoing)
			want := c.voters(up...)
			if slices.Contains(want, 4) {
				require.NotContains(t, want, gone.id, "both changes are applied or neither")
			}
			log := l.machine.Log
			if asked.err == nil && asked.n > 0 {
				require.Contains(t, log, "a=2")
			}
			for _, m := range up {
				require.Equal(t, log, m.machine.Log, "crash of member %d after %d messages: member %d has another log", victim+1, after, m.id)
			}
		}
	}
}

// TestReplacedMember checks that a member that lost its disk takes part again only after it was removed and added with
// its new directory, and that messages of the lost directory are dropped.
func TestReplacedMember(t *testing.T) {
	c := startCluster(t, 3, 1)
	c.put(c.leader(), "a=1")
	c.tick(2)
	victim := c.follower()
	old := victim.host.dirIDs.own
	l := c.leader()
	other := c.others(l)[0]
	if other == victim {
		other = c.others(l)[1]
	}
	victim.crash()

	// The member has an empty directory now. Its messages must be ignored, and it must get none.
	m := c.addNewMember(victim.id)
	c.tick(30)
	require.Zero(t, m.group.Status().Term)
	require.Empty(t, m.group.Status().Voters)
	require.Equal(t, ReasonOtherDirID, reason(l.change(false, Change{Kind: AddLearner, Member: m.id, DirID: m.host.dirIDs.own}).err))

	// Messages of the lost directory are still on the network.
	var kept []message.Envelope
	for _, typ := range []raftpb.MessageType{raftpb.MsgPreVote, raftpb.MsgVote} {
		kept = append(kept, message.Envelope{From: m.id, To: other.id, FromDirID: old, ToDirID: other.host.dirIDs.own, Kind: message.KindRaft, Group: testGroup,
			Raft: &raftpb.Message{Type: typ.Enum(), From: &m.id, To: &other.id, Term: new(l.group.term + 9), Index: new(uint64(99)), LogTerm: new(l.group.term)}})
	}
	c.mustChange(l, Change{Kind: Remove, Member: m.id})
	c.tick(2)
	c.mustChange(l, Change{Kind: AddLearner, Member: m.id, DirID: m.host.dirIDs.own})
	c.tick(5)
	require.Equal(t, []string{"a=1"}, m.machine.Log)
	term := other.group.term
	for _, e := range kept {
		require.NoError(t, other.host.Step(e))
	}
	c.settle()
	require.Equal(t, term, other.group.term, "messages of the lost directory are ignored")
	c.mustChange(l, Change{Kind: Promote, Member: m.id})
	c.put(l, "a=2")
	c.tick(3)

	// The member counts for the quorum, because the old leader is down.
	l.crash()
	next := c.elect(other, m)
	c.put(next, "a=3")
	l.start()
	c.tick(30)
	for _, m := range []*member{l, other, m} {
		require.Equal(t, []string{"a=1", "a=2", "a=3"}, m.machine.Log)
		require.Equal(t, m.host.dirIDs.own, c.members[m.id].host.dirIDs.own)
	}

	// The member is wiped again. Messages of its third directory must be ignored.
	m = c.addNewMember(m.id)
	c.tick(30)
	require.Zero(t, m.group.Status().Term)
}

// TestReplacementLearnedFromSnapshot checks that a member that was down while another was replaced gets the new
// data-directory IDs with a snapshot.
func TestReplacementLearnedFromSnapshot(t *testing.T) {
	c := newCluster(t, 3, 1)
	c.limits.TailEntries = 4
	for _, id := range c.ids {
		c.members[id].start()
	}
	l := c.elect()
	away, lost := c.others(l)[0], c.others(l)[1]
	c.put(l, "a=1")
	c.tick(2)
	four := c.addNewMember(4)
	c.grow(l, four)
	away.crash()
	c.tick(2)
	c.mustChange(l, Change{Kind: Remove, Member: lost.id})
	lost.crash()
	lost = c.addNewMember(lost.id)
	c.mustChange(l, Change{Kind: AddLearner, Member: lost.id, DirID: lost.host.dirIDs.own})
	c.putMany(l, 0, 30)
	c.tick(3)
	c.mustChange(l, Change{Kind: Promote, Member: lost.id})
	c.putMany(l, 30, 30)
	away.start()
	c.tick(20)
	require.Positive(t, away.arrived, "the member has installed a snapshot")
	require.Equal(t, l.machine.Log, away.machine.Log)
	require.Equal(t, l.group.storage.Members().DirIDs, away.group.storage.Members().DirIDs)
	// The returned member, the replaced one and member 4 are a quorum of the four voters.
	l.crash()
	next := c.elect(away, lost, four)
	c.put(next, "b=1")
	c.tick(3)
	require.Equal(t, next.machine.Log, lost.machine.Log)
}

// TestEmptyGroupGrows checks that a member can join a group without proposals, by an empty snapshot.
func TestEmptyGroupGrows(t *testing.T) {
	c := startCluster(t, 1, 1)
	l := c.leader()
	require.Zero(t, l.machine.Index)
	m := c.addNewMember(2)
	c.grow(l, m)
	require.Equal(t, 1, m.arrived)
	m.crash()
	m.start()
	c.elect()
	require.Equal(t, []uint64{1, 2}, c.voters(l, m))
	c.put(c.elect(), "a=1")
	c.converge("a=1")
}

// TestSnapshotAfterChange installs a snapshot that is later than the state machine's last entry, because membership
// changes follow. An installation that a crash interrupts must be finished at the next start.
func TestSnapshotAfterChange(t *testing.T) {
	c := startCluster(t, 1, 1)
	l := c.leader()
	c.put(l, "a=1")
	m := c.addNewMember(2)
	var disk *vfs.MemFS
	m.machine.restored = func() { disk = m.fs.CrashClone(vfs.CrashCloneCfg{}) }
	c.mustChange(l, Change{Kind: AddLearner, Member: 2, DirID: m.host.dirIDs.own})
	c.tick(3)
	require.NotNil(t, disk)
	require.Greater(t, m.group.storage.Begin().Index, m.machine.Index)
	m.crashTo(disk)
	m.start()
	require.Contains(t, m.logged.String(), "finished the installation")
	require.Equal(t, []uint64{2}, m.group.Status().Learners)
	c.put(l, "a=2")
	c.tick(3)
	require.Equal(t, []string{"a=1", "a=2"}, m.machine.Log)
	m.crash()
	m.start()
	c.put(l, "a=3")
	c.tick(3)
	require.Equal(t, []string{"a=1", "a=2", "a=3"}, m.machine.Log)
}

// TestTruncationBetweenChanges checks that a truncation of the log at any position, followed by a restart, does not
// change the membership.
func TestTruncationBetweenChanges(t *testing.T) {
	c := newCluster(t, 1, 1)
	c.limits.TailEntries = 3
	c.first = []uint64{1}
	l := c.members[1]
	l.start()
	c.settle()
	for i := range 12 {
		kind := AddLearner
		if i%2 == 1 {
			kind = Remove
		}
		c.mustChange(l, Change{Kind: kind, Member: 9, DirID: uint64(90 + i)})
		c.putMany(l, i*2, 1+i%3)
		want := l.group.storage.Members()
		l.crash()
		l.start()
		c.elect(l)
		got := l.group.storage.Members()
		require.NoError(t, got.Conf.Equivalent(want.Conf))
		require.Equal(t, want.DirIDs, got.DirIDs)
		require.Equal(t, want.Removed, got.Removed)
	}
}

// TestLayout1IsConverted opens a directory of layout 1, which has no memberships and whose log begins with entry 1. It
// must be converted, so that a member can join.
func TestLayout1IsConverted(t *testing.T) {
	c := startCluster(t, 1, 1)
	m := c.members[1]
	c.put(m, "a=1")
	b := m.host.engine.NewBatch()
	require.NoError(t, b.Set([]byte("f"), []byte{1}, nil))
	conf, err := proto.Marshal(&raftpb.ConfState{Voters: []uint64{1}})
	require.NoError(t, err)
	require.NoError(t, b.Set(logKey(testGroup, 't'), append([]byte{0, 0}, conf...), nil))
	require.NoError(t, b.Set(logKey(testGroup, 'l', 1), []byte{byte(raftpb.EntryNormal), 1}, nil))
	require.NoError(t, m.host.engine.Commit(b))
	m.crash()
	m.start()
	c.put(c.elect(), "a=2")
	require.Equal(t, []string{"a=1", "a=2"}, m.machine.Log)
	c.grow(m, c.addNewMember(2))
	c.converge("a=1", "a=2")
}

// logKey returns a key of package raftlog's layout: group, kind and, for an entry, its index.
func logKey(group uint64, kind byte, index ...uint64) []byte {
	key := append(binary.BigEndian.AppendUint64([]byte{'g'}, group), kind)
	for _, i := range index {
		key = binary.BigEndian.AppendUint64(key, i)
	}
	return key
}
