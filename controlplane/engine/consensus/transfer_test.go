package consensus

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// ends collects the results of leadership transfers.
type ends []error

func (e *ends) done(err error) { *e = append(*e, err) }

// TestTransferTriesAnotherMember checks that a transfer to any member tries another voter at once if the chosen one
// cannot be reached, and fails with ErrAlone at once if none is left.
func TestTransferTriesAnotherMember(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	var ends ends
	first := l.group.mostCurrentVoter()
	c.members[first].stop()
	l.group.TransferLeader(0, ends.done)
	c.settle()
	require.Empty(t, ends)
	require.Equal(t, first, l.group.Status().Transferee)
	require.NoError(t, l.host.ReportUnreachable(first))
	c.settle()
	require.Equal(t, []error{nil}, []error(ends))
	next := c.members[l.group.leader]
	require.NotSame(t, l, next)
	c.put(next, "a=1")

	l.stop()
	next.group.TransferLeader(0, ends.done)
	c.settle()
	for _, gone := range []uint64{first, l.id} {
		require.NoError(t, next.host.ReportUnreachable(gone))
		c.settle()
	}
	require.Len(t, ends, 2)
	require.ErrorIs(t, ends[1], ErrAlone)
	require.ErrorIs(t, ends[1], ErrTransferFailed)
	require.Zero(t, next.group.Status().Transferee)
	next.group.TransferLeader(0, ends.done)
	require.ErrorIs(t, ends[2], ErrAlone, "no other member can be reached")

	// A member that has restarted is a possible target again.
	l.start()
	c.put(c.elect(), "a=2")
	c.tick(2)
	c.leader().group.TransferLeader(0, ends.done)
	c.settle()
	require.NoError(t, ends[3])
}

// TestTransferToAnUnreachableMember checks that a transfer to a given member fails at once if the member cannot be
// reached. The leader must then continue to lead.
func TestTransferToAnUnreachableMember(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	to, other := c.others(l)[0], c.others(l)[1]
	to.stop()
	var ends ends
	l.group.TransferLeader(to.id, ends.done)
	c.settle()
	require.NoError(t, l.host.ReportUnreachable(other.id))
	c.settle()
	require.Empty(t, ends, "another member is unreachable, not the target")
	require.NoError(t, l.host.ReportUnreachable(to.id))
	c.settle()
	require.Len(t, ends, 1)
	require.ErrorIs(t, ends[0], ErrTransferFailed)
	require.NotErrorIs(t, ends[0], ErrAlone)
	require.ErrorContains(t, ends[0], "cannot be reached")
	a := l.propose("a=1")[0]
	c.settle()
	require.NoError(t, a.err)
	require.Equal(t, 1, a.n)
}

// TestTransfereeFailsAfterElection loses the new leader after its election and before its first message. The old leader
// must not lead any more, and its TransferLeader must end.
func TestTransfereeFailsAfterElection(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	to := c.others(l)[0]
	c.drop = func(e message.Envelope) bool {
		return e.From == to.id && (e.Kind != message.KindRaft || e.Raft.GetType() != raftpb.MsgVote)
	}
	var ends ends
	l.group.TransferLeader(to.id, ends.done)
	c.settle()
	require.Empty(t, ends)
	require.Equal(t, "Follower", l.group.Status().Role)
	to.stop()
	require.NoError(t, l.host.ReportUnreachable(to.id))
	c.settle()
	require.Equal(t, []error{&NotLeaderError{}}, []error(ends))
	c.heal()
	c.put(c.elect(), "a=1")
}
