package consensus

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

func TestElectAndPropose(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	as := l.propose("a=1", "a=2", "b=1")
	require.Zero(t, as[0].n, "a proposal is not answered before Process")
	c.settle()
	require.Equal(t, answer{1, Result{3, l.group.term, `a was ""`}, nil}, *as[0])
	require.Equal(t, answer{1, Result{4, l.group.term, `a was "1"`}, nil}, *as[1])
	require.Equal(t, answer{1, Result{5, l.group.term, `b was ""`}, nil}, *as[2])
	c.converge("a=1", "a=2", "b=1")
	for _, m := range c.members {
		require.Equal(t, []int{3}, m.machine.batches, "all three proposals are applied in one batch")
		require.Equal(t, Leadership{testGroup, l.id, l.group.term}, m.leads[len(m.leads)-1])
	}
}

func TestOneMember(t *testing.T) {
	c := newCluster(t, 1, 1)
	m := c.members[1]
	m.start()
	c.settle()
	require.Equal(t, "Leader", m.group.Status().Role, "a single member becomes leader without an election timeout")
	c.put(m, "a=1")
	_, a := m.read()
	c.settle()
	require.Equal(t, answer{1, Result{Index: 3}, nil}, *a)
	m.crash()
	m.start()
	c.settle()
	require.Equal(t, []string{"a=1"}, m.machine.Log)
	_, a = m.read()
	c.settle()
	require.GreaterOrEqual(t, a.result.Index, uint64(2))
}

func TestProposeOnAFollower(t *testing.T) {
	c := newCluster(t, 3, 1)
	for _, id := range c.ids {
		c.members[id].start()
	}
	a := c.members[1].propose("a=1")[0]
	require.Equal(t, &NotLeaderError{}, a.err, "no leader is elected yet")
	c.elect()
	a = c.follower().propose("a=1")[0]
	require.Equal(t, &NotLeaderError{c.leader().id}, a.err)
	require.Equal(t, 1, a.n, "the refusal is immediate")
	c.converge()
}

// TestProposalsShareMessages checks that proposals that are queued between two calls of Process share messages of up to
// Limits.MessageBytes.
func TestProposalsShareMessages(t *testing.T) {
	c := newCluster(t, 3, 1)
	c.limits.MessageBytes = 3000
	for _, id := range c.ids {
		c.members[id].start()
	}
	l := c.elect()
	var data []string
	for i := range 10 {
		data = append(data, fmt.Sprintf("%d=%s", i, strings.Repeat("x", 700)))
	}
	c.frozen = true
	l.propose(data...)
	c.settle()
	require.Equal(t, 2*3, c.count(raftpb.MsgApp), "four of the ten proposals fit into a message, and two members get three messages each")
	c.frozen = false
	c.converge(data...)
}

func TestProposalLimits(t *testing.T) {
	c := newCluster(t, 3, 1)
	c.limits = Limits{ProposalBytes: 100, UncommittedBytes: 400}
	for _, id := range c.ids {
		c.members[id].start()
	}
	l := c.elect()
	require.ErrorIs(t, l.propose(strings.Repeat("x", 101))[0].err, ErrTooLarge)
	big := strings.Repeat("x", 83)
	as := l.propose(big, big, big, big, big)
	require.ErrorIs(t, as[4].err, ErrOverloaded)
	c.settle()
	for _, a := range as[:4] {
		require.NoError(t, a.err)
	}
	require.NoError(t, l.propose(big)[0].err, "committed proposals no longer count for the limit")
	c.settle()

	c.isolate(l)
	as = l.propose(big, big, big, big)
	c.settle()
	require.ErrorIs(t, l.propose(big)[0].err, ErrOverloaded, "proposals that raft has not committed count for the limit")
	c.tick(60)
	for _, a := range as {
		require.ErrorIs(t, a.err, ErrUncertain)
	}
	require.Zero(t, l.group.proposalBytes)
}

// TestDeposedLeaderAnswersProposalsOnce checks that the proposal of an isolated leader fails once with ErrUncertain,
// and is not applied later.
func TestDeposedLeaderAnswersProposalsOnce(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	c.isolate(l)
	a := l.propose("a=lost")[0]
	c.settle()
	require.Zero(t, a.n)
	for range 30 {
		c.tick(1)
		if a.n > 0 {
			break
		}
	}
	require.ErrorIs(t, a.err, ErrUncertain)
	next := c.elect(c.others(l)...)
	c.put(next, "a=2")
	c.heal()
	c.converge("a=2")
	require.Equal(t, 1, a.n)
}

// TestProposalIsOvertakenByTheNextLeader checks that a deposed leader's proposal fails once, although the leader learns
// of the next leader only together with the entries that replaced the proposal.
func TestProposalIsOvertakenByTheNextLeader(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	c.isolate(l)
	lost := l.propose("a=lost")[0]
	c.settle()
	// The other members elect a leader, while the old leader gets no ticks.
	for range 40 {
		for _, m := range c.others(l) {
			require.NoError(t, m.host.Tick())
		}
		c.settle()
	}
	for _, m := range c.others(l) {
		if m.group.leader == m.id {
			c.put(m, "a=2")
		}
	}
	require.Zero(t, lost.n)
	c.heal()
	c.tick(3)
	require.Equal(t, 1, lost.n)
	var elsewhere *NotLeaderError
	require.True(t, errors.Is(lost.err, ErrUncertain) || errors.As(lost.err, &elsewhere), "%v", lost.err)
	c.converge("a=2")
}

// TestCommittedProposalIsAnsweredAfterLeaderLoss checks that a committed proposal gets its result although its leader
// loses leadership before it applies the proposal.
func TestCommittedProposalIsAnsweredAfterLeaderLoss(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	a := l.propose("a=1")[0]
	c.frozen = true
	c.settle()
	// The leader gets the acknowledgements and a message of a later term before its next Process.
	for len(c.net) > 0 {
		var acks, rest []packet
		for _, p := range c.net {
			if e, _ := message.Parse(p.b); e.To == l.id {
				acks = append(acks, p)
			} else {
				rest = append(rest, p)
			}
		}
		if len(acks) > 0 {
			for _, p := range acks {
				c.deliverOne(p)
			}
			f := c.others(l)[0]
			require.NoError(t, l.host.Step(message.Envelope{
				From: f.id, To: l.id, FromDirID: f.host.dirIDs.own, Kind: message.KindRaft, Group: testGroup,
				Raft: &raftpb.Message{Type: raftpb.MsgAppResp.Enum(), From: &f.id, To: &l.id, Term: new(l.group.term + 1)},
			}))
			c.net = nil
			break
		}
		c.net = nil
		for _, p := range rest {
			c.deliverOne(p)
		}
		c.settle()
	}
	require.NoError(t, l.host.Process())
	require.Equal(t, "Follower", l.group.Status().Role)
	require.Equal(t, 1, a.n)
	require.NoError(t, a.err)
}

func TestProposalTimesOut(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	// The leader stays, because followers respond to heartbeats. Their acknowledgements of entries are lost.
	c.drop = func(e message.Envelope) bool {
		return e.Kind == message.KindRaft && e.Raft.GetType() == raftpb.MsgAppResp
	}
	a := l.propose("a=1")[0]
	c.tick(49)
	require.Zero(t, a.n)
	c.tick(1)
	require.ErrorIs(t, a.err, ErrUncertain)
	require.Equal(t, "Leader", l.group.Status().Role)
	c.heal()
	c.converge("a=1")
	require.Equal(t, 1, a.n)
}

func TestTransferLeader(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	to := c.others(l)[1]
	var ends []error
	done := func(err error) { ends = append(ends, err) }
	l.group.TransferLeader(to.id, done)
	require.Empty(t, ends)
	a := l.propose("a=1")[0]
	c.settle()
	require.Equal(t, []error{nil}, ends)
	require.Equal(t, &NotLeaderError{to.id}, a.err, "proposals are refused during a transfer")
	require.Same(t, to, c.leader())

	l.group.TransferLeader(0, done)
	require.Equal(t, &NotLeaderError{to.id}, ends[1])
	to.group.TransferLeader(9, done)
	require.ErrorIs(t, ends[2], ErrTransferFailed)
	to.group.TransferLeader(0, done)
	c.settle()
	require.NoError(t, ends[3])
	require.NotSame(t, to, c.leader())

	l = c.leader()
	c.isolate(to)
	l.group.TransferLeader(to.id, done)
	l.group.TransferLeader(to.id, done)
	require.ErrorIs(t, ends[4], ErrTransferFailed, "a second transfer is refused while one is under way")
	c.tick(20)
	require.ErrorIs(t, ends[5], ErrTransferFailed)
	c.heal()
	c.put(c.elect(), "a=2")
}

func TestApplyFails(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	l.machine.applyErr = errors.New("disk on fire")
	as := l.propose("a=1")
	_, read := l.read()
	c.settle()
	require.ErrorContains(t, l.host.Err(), "disk on fire")
	require.ErrorIs(t, as[0].err, ErrUncertain)
	require.ErrorContains(t, as[0].err, "disk on fire")
	require.NoError(t, read.err, "the read was requested before the failed entry was committed")
	require.ErrorContains(t, l.propose("a=2")[0].err, "disk on fire")
	_, read = l.read()
	require.ErrorContains(t, read.err, "disk on fire")
	require.ErrorContains(t, l.host.Tick(), "disk on fire")
	require.ErrorContains(t, l.host.Process(), "disk on fire")
	require.True(t, l.host.Idle())
}

func TestCloseAnswersAll(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	c.isolate(l)
	inflight := l.propose("a=1")[0]
	c.settle()
	queued := l.propose("a=2")[0]
	_, read := l.read()
	var moved error
	l.group.TransferLeader(c.others(l)[0].id, func(err error) { moved = err })
	l.stop()
	require.ErrorIs(t, inflight.err, ErrUncertain)
	require.ErrorIs(t, inflight.err, ErrStopped)
	require.ErrorIs(t, queued.err, ErrStopped)
	require.NotErrorIs(t, queued.err, ErrUncertain)
	require.ErrorIs(t, read.err, ErrStopped)
	require.ErrorIs(t, moved, ErrStopped)
	require.ErrorIs(t, l.propose("a=3")[0].err, ErrStopped)
}

// TestCallbackMayPropose checks that a callback may call Propose and ReadIndex, and that Process returns although each
// callback makes new proposals.
func TestCallbackMayPropose(t *testing.T) {
	c := newCluster(t, 1, 1)
	m := c.members[1]
	m.start()
	c.settle()
	left := 100
	var next func(Result, error)
	next = func(_ Result, err error) {
		require.NoError(t, err)
		if left--; left > 0 {
			m.group.ReadIndex(func(_ uint64, err error) {
				require.NoError(t, err)
				m.group.Propose([16]byte{}, []byte("a=1"), next)
			})
		}
	}
	m.group.Propose([16]byte{}, []byte("a=1"), next)
	require.NoError(t, m.host.Process())
	require.Equal(t, 99, left, "Process returns although each callback makes a new proposal")
	require.False(t, m.host.Idle())
	c.settle()
	require.Zero(t, left)
}
