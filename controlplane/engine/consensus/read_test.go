package consensus

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

func TestReadOnEveryMember(t *testing.T) {
	c := startCluster(t, 3, 1)
	c.put(c.leader(), "a=1")
	for _, id := range c.ids {
		m := c.members[id]
		_, a := m.read()
		require.Zero(t, a.n, "the read is not answered before the other members have responded")
		c.settle()
		require.Equal(t, 1, a.n)
		require.NoError(t, a.err)
		require.Equal(t, uint64(3), a.result.Index)
		require.Equal(t, "1", m.machine.Values["a"], "the state includes the write when the callback is called")
		require.Zero(t, m.group.reads.count)
	}
}

// TestReadsShareRequests checks that reads that arrive while a ReadIndex request is pending share the next request.
func TestReadsShareRequests(t *testing.T) {
	c := startCluster(t, 3, 1)
	f := c.follower()
	questions := 0
	c.drop = func(e message.Envelope) bool {
		if e.Kind == message.KindRaft && e.Raft.GetType() == raftpb.MsgReadIndex {
			questions++
		}
		return false
	}
	c.frozen = true
	_, first := f.read()
	c.settle()
	var rest []*answer
	for range 100 {
		_, a := f.read()
		rest = append(rest, a)
	}
	c.settle()
	require.Equal(t, 1, c.count(raftpb.MsgReadIndex))
	c.frozen = false
	c.settle()
	require.Equal(t, 1, first.n)
	for _, a := range rest {
		require.Equal(t, 1, a.n)
		require.NoError(t, a.err)
	}
	require.Equal(t, 2, questions)
}

// TestReadSeesEarlierWrite makes a write after a ReadIndex request and then a second read. The second read must not use
// the response to that request, which does not cover the write.
func TestReadSeesEarlierWrite(t *testing.T) {
	c := startCluster(t, 3, 1)
	f := c.follower()
	_, first := f.read()
	c.frozen = true
	c.settle()
	asked := c.net
	c.net = nil
	c.frozen = false
	c.put(c.leader(), "a=1")
	_, second := f.read()
	c.settle()
	require.Zero(t, second.n)
	c.net = asked
	c.settle()
	require.Equal(t, 1, first.n)
	require.Equal(t, 1, second.n)
	require.GreaterOrEqual(t, second.result.Index, uint64(2))
}

func TestLostReadRequestIsRepeated(t *testing.T) {
	c := startCluster(t, 3, 1)
	f := c.follower()
	lost := 0
	c.drop = func(e message.Envelope) bool {
		if lost < 2 && e.Kind == message.KindRaft && (e.Raft.GetType() == raftpb.MsgReadIndex || e.Raft.GetType() == raftpb.MsgReadIndexResp) {
			lost++
			return true
		}
		return false
	}
	_, a := f.read()
	c.settle()
	require.Zero(t, a.n)
	c.tick(10)
	require.Equal(t, 2, lost)
	require.Equal(t, 1, a.n)
	require.NoError(t, a.err)
}

func TestReadWithoutLeader(t *testing.T) {
	c := startCluster(t, 3, 1)
	f := c.follower()
	c.isolate(f)
	_, a := f.read()
	c.tick(49)
	require.Zero(t, a.n)
	c.tick(1)
	require.Equal(t, 1, a.n)
	require.ErrorIs(t, a.err, ErrNoLeader)
	require.Zero(t, f.group.reads.count)
}

// TestDeposedLeaderDoesNotAnswerReads checks that a leader that is isolated from its followers does not confirm reads.
func TestDeposedLeaderDoesNotAnswerReads(t *testing.T) {
	c := startCluster(t, 3, 1)
	old := c.leader()
	c.isolate(old)
	// The old leader gets no ticks, so it does not step down.
	for range 40 {
		for _, m := range c.others(old) {
			require.NoError(t, m.host.Tick())
		}
		c.settle()
	}
	c.put(c.leader(c.others(old)...), "a=1")
	_, a := old.read()
	c.settle()
	require.Equal(t, "Leader", old.group.Status().Role)
	require.Zero(t, a.n)
	c.heal()
	c.tick(20)
	require.Equal(t, 1, a.n)
	require.NoError(t, a.err)
	require.Equal(t, "1", old.machine.Values["a"])
}

// TestReadWaitsUntilApplied checks that a read does not succeed before this member has applied the read's index.
func TestReadWaitsUntilApplied(t *testing.T) {
	c := startCluster(t, 3, 1)
	f := c.follower()
	c.drop = func(e message.Envelope) bool {
		return e.To == f.id && e.Kind == message.KindRaft && e.Raft.GetType() == raftpb.MsgApp
	}
	c.put(c.leader(), "a=1")
	_, a := f.read()
	c.settle()
	require.Zero(t, a.n)
	require.Len(t, f.group.reads.waiting, 1)
	c.heal()
	c.tick(2)
	require.Equal(t, 1, a.n)
	require.Equal(t, "1", f.machine.Values["a"])
}

func TestCancelledReads(t *testing.T) {
	c := newCluster(t, 3, 1)
	c.limits.Reads = 10
	for _, id := range c.ids {
		c.members[id].start()
	}
	c.elect()
	f := c.follower()
	c.isolate(f)
	var reads []*Read
	var as []*answer
	for range 10 {
		r, a := f.read()
		reads, as = append(reads, r), append(as, a)
	}
	_, a := f.read()
	require.ErrorIs(t, a.err, ErrOverloaded)
	c.settle()
	for _, r := range reads {
		r.Cancel()
	}
	c.tick(60)
	require.Zero(t, f.group.reads.count, "cancelled reads are removed")
	for _, a := range as {
		require.Zero(t, a.n)
	}
}

// TestReadOnNewLeader checks that a read on a new leader waits until the leader has committed an entry of its own term.
func TestReadOnNewLeader(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	c.put(l, "a=1")
	to := c.others(l)[0]
	l.group.TransferLeader(to.id, func(error) {})
	var a *answer
	c.drop = func(e message.Envelope) bool {
		if a == nil && to.group.Status().Role == "Leader" {
			_, a = to.read()
		}
		return false
	}
	c.settle()
	require.NotNil(t, a)
	require.Equal(t, 1, a.n)
	require.GreaterOrEqual(t, a.result.Index, uint64(2))
}
