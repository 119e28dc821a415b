package consensus

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// TestPromoteLaggingLearner requests the promotion of a learner that responds to heartbeats but lacks much of the log.
// The promotion must be refused until the learner has nearly all of the log.
func TestPromoteLaggingLearner(t *testing.T) {
	c := startCluster(t, 1, 1)
	l := c.leader()
	c.putMany(l, 0, 40)
	m := c.addNewMember(2)
	promote := Change{Kind: Promote, Member: 2}
	loseEntries := func(e message.Envelope) bool {
		typ := e.Raft.GetType()
		return e.To == m.id && e.Kind == message.KindRaft && (typ == raftpb.MsgApp || typ == raftpb.MsgSnap)
	}
	c.drop = loseEntries
	c.mustChange(l, Change{Kind: AddLearner, Member: 2, DirID: m.host.dirIDs.own})
	c.tick(5)
	require.True(t, l.host.heardRecently(2), "the learner answers")
	require.Zero(t, l.group.Status().Match[2])
	require.Equal(t, ReasonNotCaughtUp, reason(l.change(false, promote).err), "the learner has no entry")
	c.heal()
	c.tick(5)
	require.Equal(t, l.group.Status().Last, l.group.Status().Match[2])
	c.drop = loseEntries
	c.putMany(l, 40, 40)
	c.tick(5)
	require.True(t, l.host.heardRecently(2), "the learner answers")
	require.Equal(t, ReasonNotCaughtUp, reason(l.change(false, promote).err), "the learner has half of the entries")
	c.heal()
	c.tick(5)
	c.mustChange(l, promote)
	require.Equal(t, []uint64{1, 2}, c.voters(l, m))
}

// TestRemovedDirectoryReturns starts a member again with the data directory that it had when it was removed. The
// directory must not be added again, and the group must not process messages from it.
func TestRemovedDirectoryReturns(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	gone := c.others(l)[0]
	c.put(l, "a=1")
	c.tick(2)
	gone.crash()
	c.mustChange(l, Change{Kind: Remove, Member: gone.id})
	c.put(l, "a=2")
	again := l.change(false, Change{Kind: AddLearner, Member: gone.id, DirID: l.group.storage.Members().Removed[gone.id]})
	c.settle()
	require.Equal(t, ReasonOtherDirID, reason(again.err))
	term := l.group.term
	gone.start()
	c.tick(50)
	var removed *RemovedError
	require.ErrorAs(t, gone.host.Err(), &removed, "the others have told the member that it was removed")
	require.Equal(t, l, c.leader(l, c.others(l)[1]))
	require.Equal(t, term, l.group.term, "the removed member has caused no election")
	require.NotContains(t, l.group.Status().Learners, gone.id)
}
