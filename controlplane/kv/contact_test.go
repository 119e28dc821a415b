package kv

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
)

// TestContactTimes checks that the contact time of a member restarts after an interruption, and that all contact times
// restart in a new term.
func TestContactTimes(t *testing.T) {
	var c contacts
	update := func(now time.Duration, leader, term uint64, heard ...uint64) map[uint64]time.Duration {
		g := consensus.GroupStatus{Leader: leader, Term: term, Active: map[uint64]bool{1: true, 2: false, 3: false}}
		for _, id := range heard {
			g.Active[id] = true
		}
		c.update(now, 1, &g)
		return c.since
	}
	require.Equal(t, map[uint64]time.Duration{2: 10}, update(10, 1, 5, 2))
	require.Equal(t, map[uint64]time.Duration{2: 10, 3: 20}, update(20, 1, 5, 2, 3))
	require.Equal(t, map[uint64]time.Duration{3: 20}, update(30, 1, 5, 3))
	require.Equal(t, map[uint64]time.Duration{2: 40, 3: 20}, update(40, 1, 5, 2, 3))
	require.Empty(t, update(50, 2, 6, 2, 3))
	require.Equal(t, map[uint64]time.Duration{2: 60, 3: 60}, update(60, 1, 7, 2, 3))
}

// TestContactsOnAllMembers checks that every member returns the contacts of the leader, or ErrGRPCNoLeader if no leader
// is known.
func TestContactsOnAllMembers(t *testing.T) {
	w := newCluster(t, noComparison)
	leaderMember, others := w.leader(t)
	for _, s := range append(others, leaderMember) {
		require.Eventually(t, func() bool {
			c, err := s.Contacts(t.Context())
			return err == nil && c.Leader == leaderMember.id && len(c.Voters) == 3 && len(c.ContactTimes) == 2
		}, 20*time.Second, time.Millisecond)
	}
	single := newWorld(t)
	single.raft.SetLeader(0, 3)
	_, err := single.Contacts(t.Context())
	require.Equal(t, rpctypes.ErrGRPCNoLeader, err)
}
