package consensus

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// startForwarding returns a running cluster of n members whose followers forward proposals.
func startForwarding(t testing.TB, n int, seed byte) *cluster {
	c := newCluster(t, n, seed)
	c.forward = true
	for _, id := range c.ids {
		c.members[id].start()
	}
	c.elect()
	return c
}

// envelopes returns the envelopes of a kind that are on the network.
func (c *cluster) envelopes(kind message.Kind) []message.Envelope {
	var out []message.Envelope
	for _, p := range c.net {
		if e, err := message.Parse(p.b); err == nil && e.Kind == kind {
			out = append(out, e)
		}
	}
	return out
}

func TestForward(t *testing.T) {
	c := startForwarding(t, 3, 1)
	f := c.follower()
	as := f.propose("a=1", "a=2")
	require.Zero(t, as[0].n)
	c.frozen = true
	c.settle()
	sent := c.envelopes(message.KindForward)
	require.Len(t, sent, 1, "proposals that wait are sent in one envelope")
	require.Len(t, sent[0].Payloads, 2)
	require.Equal(t, 2, f.host.Status().Groups[0].Proposals)
	c.frozen = false
	c.settle()
	require.Equal(t, answer{1, Result{as[0].result.Index, f.group.term, `a was ""`}, nil}, *as[0])
	require.Equal(t, answer{1, Result{as[0].result.Index + 1, f.group.term, `a was "1"`}, nil}, *as[1])
	require.Equal(t, []string{"a=1", "a=2"}, f.machine.Log, "the proposals are answered after they are applied on this member")
	require.Zero(t, f.host.Status().Groups[0].Proposals)
	c.put(c.leader(), "b=1")
	c.converge("a=1", "a=2", "b=1")
	for _, m := range c.members {
		want := 0
		if m == f {
			want = 2
		} else if m == c.leader() {
			want = 1
		}
		require.Equal(t, want, m.machine.wanted, "member %d computes only the results that a caller of it waits for", m.id)
	}
}

// TestForwardedRepeatsAreAnsweredInOrder checks that proposals with the same ID get their results in the order in which
// they were made.
func TestForwardedRepeatsAreAnsweredInOrder(t *testing.T) {
	c := startForwarding(t, 3, 1)
	f := c.follower()
	var got []any
	for i := range 3 {
		f.group.Propose([16]byte{1}, fmt.Appendf(nil, "a=%d", i), func(r Result, err error) {
			require.NoError(t, err)
			got = append(got, r.Answer)
		})
	}
	c.settle()
	require.Equal(t, []any{`a was ""`, `a was "0"`, `a was "1"`}, got)
}

func TestForwardSharesEnvelopes(t *testing.T) {
	c := newCluster(t, 3, 1)
	c.forward, c.limits.MessageBytes = true, 3000
	for _, id := range c.ids {
		c.members[id].start()
	}
	c.elect()
	var data []string
	for i := range 10 {
		data = append(data, fmt.Sprintf("%d=%s", i, strings.Repeat("x", 700)))
	}
	c.frozen = true
	c.follower().propose(data...)
	c.settle()
	require.Len(t, c.envelopes(message.KindForward), 3, "four of the ten proposals fit into an envelope")
	c.frozen = false
	c.converge(data...)
}

// TestForwardedProposalsAreAppendedTogether checks that a leader appends the proposals that two members forward with
// one message to each member.
func TestForwardedProposalsAreAppendedTogether(t *testing.T) {
	c := startForwarding(t, 3, 1)
	l := c.leader()
	c.frozen = true
	for _, f := range c.others(l) {
		f.propose("a=1", "a=2")
	}
	c.settle()
	require.Len(t, c.envelopes(message.KindForward), 2)
	c.deliver()
	c.settle()
	require.Equal(t, 2, c.count(raftpb.MsgApp), "the leader sends one message to each member")
	c.frozen = false
	c.settle()
	require.Len(t, l.machine.Log, 4)
}

// TestForwardedProposalIsAppliedOnce repeats a forwarded envelope, also late and on the next leader. The proposal must
// be applied once.
func TestForwardedProposalIsAppliedOnce(t *testing.T) {
	c := startForwarding(t, 3, 1)
	l, f := c.leader(), c.follower()
	c.frozen = true
	a := f.propose("a=1")[0]
	c.settle()
	again := c.envelopes(message.KindForward)[0]
	c.frozen = false
	c.settle()
	require.NoError(t, a.err)
	require.NoError(t, l.host.Step(again))
	c.settle()
	require.Empty(t, c.envelopes(message.KindRefuse), "no member sends a refusal")
	other := c.others(l)[0]
	if other == f {
		other = c.others(l)[1]
	}
	l.group.TransferLeader(other.id, func(err error) { require.NoError(t, err) })
	c.settle()
	require.NoError(t, l.host.Step(again))
	require.NoError(t, other.host.Step(message.Envelope{
		From: f.id, To: other.id, FromDirID: again.FromDirID, Kind: message.KindForward, Group: again.Group, Term: again.Term,
		Life: again.Life, Number: again.Number, Payloads: again.Payloads,
	}))
	c.settle()
	c.put(f, "a=2")
	c.converge("a=1", "a=2")
}

// TestForwardToTheNextLeader checks that a leader that transfers leadership appends neither its own nor forwarded
// proposals, and that all are appended once after the transfer has ended.
func TestForwardToTheNextLeader(t *testing.T) {
	c := startForwarding(t, 3, 1)
	l, f := c.leader(), c.follower()
	c.drop = func(e message.Envelope) bool {
		return e.Kind == message.KindRaft && e.Raft.GetType() == raftpb.MsgTimeoutNow
	}
	l.group.TransferLeader(f.id, func(error) {})
	c.settle()
	own, far := l.propose("a=1")[0], f.propose("a=2")[0]
	c.settle()
	require.Zero(t, own.n, "the leader's own proposal waits for the end of the transfer")
	require.Zero(t, far.n)
	c.heal()
	c.tick(30)
	require.NoError(t, own.err)
	require.NoError(t, far.err)
	require.Equal(t, 1, own.n)
	require.Equal(t, 1, far.n)
	require.Len(t, c.leader().machine.Log, 2, "each proposal is applied once")
}

// TestForwardedProposalIsRepeatedInTheNextTerm forwards a proposal to a leader that is isolated and cannot commit it.
// The proposal must be forwarded again to the next leader and be applied once.
func TestForwardedProposalIsRepeatedInTheNextTerm(t *testing.T) {
	c := startForwarding(t, 3, 1)
	l := c.leader()
	f := c.others(l)[0]
	c.isolate(l)
	own, far := l.propose("a=1")[0], f.propose("a=2")[0]
	c.settle()
	next := c.elect(c.others(l)...)
	c.put(next, "a=3")
	require.Equal(t, 1, far.n, "the follower knows that the proposal was lost, and has forwarded it again")
	require.NoError(t, far.err)
	require.Zero(t, own.n, "the isolated leader does not know the result yet")
	c.heal()
	c.tick(5)
	require.Equal(t, 1, own.n)
	require.NoError(t, own.err)
	for _, m := range c.members {
		require.ElementsMatch(t, []string{"a=1", "a=2", "a=3"}, m.machine.Log, "each proposal is applied once")
	}
}

func TestForwardTimesOut(t *testing.T) {
	c := newCluster(t, 3, 1)
	c.forward = true
	for _, id := range c.ids {
		c.members[id].start()
	}
	m := c.members[1]
	early := m.propose("a=1")[0]
	c.elect()
	c.settle()
	require.NoError(t, early.err, "the proposal waits for a leader")
	f := c.follower()
	c.isolate(f)
	lost := f.propose("a=2")[0]
	c.settle()
	c.tick(25) // until the follower does not know a leader any more
	alone := f.propose("a=3")[0]
	c.settle()
	require.Zero(t, alone.n)
	c.tick(30)
	require.ErrorIs(t, lost.err, ErrUncertain, "the proposal was sent and may be applied")
	c.tick(30)
	require.ErrorIs(t, alone.err, ErrNoLeader, "the proposal was not sent")
	require.Equal(t, []int{1, 1}, []int{lost.n, alone.n})
	require.Zero(t, f.host.Status().Groups[0].Proposals)
	stopped := f.propose("a=4")[0]
	f.stop()
	require.ErrorIs(t, stopped.err, ErrStopped)
	require.NotErrorIs(t, stopped.err, ErrUncertain, "the proposal was never sent")
	c.heal()
	c.tick(5)
	require.Equal(t, []string{"a=1"}, c.leader().machine.Log)
}

// TestForwardToAnOverloadedLeader checks that a leader with too many pending proposals refuses forwarded ones, which
// then fail with ErrOverloaded.
func TestForwardToAnOverloadedLeader(t *testing.T) {
	c := newCluster(t, 3, 1)
	c.forward, c.limits.UncommittedBytes = true, 1000
	for _, id := range c.ids {
		c.members[id].start()
	}
	l := c.elect()
	c.drop = func(e message.Envelope) bool {
		return e.Kind == message.KindRaft && e.Raft.GetType() == raftpb.MsgAppResp
	}
	var as []*answer
	for i := range 4 {
		for _, f := range c.others(l) {
			as = append(as, f.propose(fmt.Sprintf("%d=%s", i, strings.Repeat("x", 400)))...)
		}
		c.settle()
	}
	refused := 0
	for _, a := range as {
		if a.n > 0 {
			require.ErrorIs(t, a.err, ErrOverloaded)
			refused++
		}
	}
	require.Positive(t, refused)
	c.heal()
	c.tick(3)
	require.Len(t, l.machine.Log, len(as)-refused)
}

// TestForwardAcrossSnapshot checks that a forwarded proposal fails with ErrUncertain if a snapshot covers the entries
// where it could be.
func TestForwardAcrossSnapshot(t *testing.T) {
	c := newCluster(t, 3, 1)
	c.forward, c.limits.TailEntries = true, 8
	for _, id := range c.ids {
		c.members[id].start()
	}
	l := c.elect()
	f := c.others(l)[0]
	a := f.propose("a=1")[0]
	c.drop = func(e message.Envelope) bool { return e.To == f.id }
	c.settle()
	for i := range 40 {
		c.put(l, fmt.Sprintf("b=%d", i))
	}
	c.heal()
	c.tick(10)
	require.Positive(t, f.arrived, "the follower has installed a snapshot")
	require.ErrorIs(t, a.err, ErrUncertain)
	require.Equal(t, 1, a.n)
	require.Contains(t, f.machine.Log, "a=1")
}

func TestRepeatedEnvelopesAreRecognized(t *testing.T) {
	var a arrivals
	first := func(member, life, number uint64) bool {
		return a.first(&message.Envelope{From: member, Life: life, Number: number})
	}
	require.True(t, first(2, 1, 10))
	require.False(t, first(2, 1, 10))
	require.True(t, first(2, 1, 12))
	require.True(t, first(2, 1, 11), "an envelope that arrives out of order is new")
	require.False(t, first(2, 1, 11))
	require.True(t, first(2, 9, 11), "an envelope of another life is new")
	require.False(t, first(2, 1, 12), "the envelopes of the first life are still known")
	require.True(t, first(2, 1, 12+63))
	require.False(t, first(2, 1, 12), "an envelope older than the newest 64 is not accepted")
	require.False(t, first(2, 1, 3), "an envelope that is too old may be a repetition and is not accepted")
	require.True(t, first(2, 1, 1<<40))
	for life := range uint64(maxLives) {
		require.True(t, first(3, 100+life, 1))
	}
	require.Len(t, a.lives, maxLives)
}

// TestUncertainProposalIsNotRefused checks that a member does not refuse a forwarded proposal that it may have
// appended, also after it lost leadership or restarted.
func TestUncertainProposalIsNotRefused(t *testing.T) {
	c := startForwarding(t, 3, 1)
	l, f := c.leader(), c.follower()
	c.frozen = true
	f.propose("a=1")
	c.settle()
	again := c.envelopes(message.KindForward)[0]
	c.deliver()
	c.settle() // the proposal is in the leader's log
	c.net = nil
	for range 30 {
		require.NoError(t, l.host.Tick())
		c.settle()
		c.net = nil
	}
	require.NotEqual(t, "Leader", l.group.Status().Role)
	require.NoError(t, l.host.Step(again))
	c.settle()
	require.Empty(t, c.envelopes(message.KindRefuse))
	later := again
	later.Number++
	require.NoError(t, l.host.Step(later))
	c.settle()
	require.Len(t, c.envelopes(message.KindRefuse), 1, "the member refuses a proposal that it has not appended")
	l.crash()
	l.start()
	later.Number++
	require.NoError(t, l.host.Step(later))
	c.settle()
	require.Empty(t, c.envelopes(message.KindRefuse)[1:], "a restarted member does not know whether it has appended the proposal, so it sends no refusal")
	c.net, c.frozen = nil, false
	c.tick(60)
	c.put(f, "b=1")
	n := 0
	for _, line := range c.leader().machine.Log {
		if line == "a=1" {
			n++
		}
	}
	require.Equal(t, 1, n)
}

func FuzzForward(f *testing.F) {
	f.Add([]byte{1, 1, 2, 3, 0, 7, 9})
	f.Fuzz(func(t *testing.T, b []byte) {
		// Number n must be accepted as new at most once.
		var a arrivals
		seen := map[byte]bool{}
		for _, n := range b {
			if a.first(&message.Envelope{Term: 1, From: 2, Life: 3, Number: uint64(n) + 1}) {
				require.False(t, seen[n])
			}
			seen[n] = true
		}
	})
}
