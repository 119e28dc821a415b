package consensus

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
)

// TestHeartbeatsShareEnvelopes checks that a leader sends the heartbeats of all groups to a member in one envelope, and
// that the member responds in one envelope.
func TestHeartbeatsShareEnvelopes(t *testing.T) {
	c := newCluster(t, 3, 1)
	c.groups = 4
	for _, id := range c.ids {
		c.members[id].start()
	}
	l := c.elect()
	for _, g := range l.host.groups {
		for g.leader == 0 {
			c.tick(1)
		}
		if g.leader != l.id {
			c.members[g.leader].host.Group(g.id).TransferLeader(l.id, func(err error) { require.NoError(t, err) })
		}
	}
	c.tick(3)
	c.frozen = true
	require.NoError(t, l.host.Tick())
	c.settle()
	sent := c.envelopes(message.KindHeartbeats)
	require.Len(t, sent, 2, "the leader sends one envelope to each member")
	require.Len(t, sent[0].Heartbeats, 1+c.groups)
	require.Len(t, c.net, 2, "the leader sends no other messages")
	c.deliver()
	c.settle()
	sent = c.envelopes(message.KindHeartbeats)
	require.Len(t, sent, 2, "each member sends one response")
	require.Len(t, sent[1].Heartbeats, 1+c.groups)
	c.frozen = false
	c.settle()
}

// TestUnrequestedReadConfirmationIsIgnored checks that a leader drops a response that confirms a read request that the
// leader did not send, on which raft would panic.
func TestUnrequestedReadConfirmationIsIgnored(t *testing.T) {
	c := startCluster(t, 3, 1)
	l := c.leader()
	for _, f := range c.others(l) {
		for _, reads := range []uint64{1, 1 << 40} {
			require.NoError(t, l.host.Step(message.Envelope{
				From: f.id, To: l.id, FromDirID: f.host.dirIDs.own, Kind: message.KindHeartbeats, Heartbeats: []message.Heartbeat{
					{Group: testGroup, Answer: true, Term: l.group.term, Reads: l.group.asked.Index + reads},
					{Group: testGroup, Answer: true}, {Group: 99},
				},
			}))
		}
	}
	c.settle()
	require.Equal(t, 4, countLines(l.logged.String(), "it confirms read"))
	require.Equal(t, 4, countLines(l.logged.String(), "a heartbeat without a term"))
	_, a := l.read()
	c.settle()
	require.NoError(t, a.err)
}
