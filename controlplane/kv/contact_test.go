package kv

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
)

// A member that was not heard for a while begins anew, and so do all with a new term.
func TestHowLongMembersAreHeard(t *testing.T) {
	var c contacts
	look := func(now time.Duration, leader, term uint64, heard ...uint64) map[uint64]time.Duration {
		g := consensus.GroupStatus{Leader: leader, Term: term, Active: map[uint64]bool{1: true, 2: false, 3: false}}
		for _, id := range heard {
			g.Active[id] = true
		}
		c.look(now, 1, &g)
		return c.since
	}
	require.Equal(t, map[uint64]time.Duration{2: 10}, look(10, 1, 5, 2))
	require.Equal(t, map[uint64]time.Duration{2: 10, 3: 20}, look(20, 1, 5, 2, 3))
	require.Equal(t, map[uint64]time.Duration{3: 20}, look(30, 1, 5, 3))
	require.Equal(t, map[uint64]time.Duration{2: 40, 3: 20}, look(40, 1, 5, 2, 3))
	require.Empty(t, look(50, 2, 6, 2, 3))
	require.Equal(t, map[uint64]time.Duration{2: 60, 3: 60}, look(60, 1, 7, 2, 3))
}

// Every member tells whom the leader hears.
func TestContactsAreTheLeaders(t *testing.T) {
	w := newTrio(t, quiet)
	leads, others := w.leader(t)
	for _, s := range append(others, leads) {
		require.Eventually(t, func() bool {
			c, err := s.Contacts(t.Context())
			return err == nil && c.Leader == leads.id && len(c.Voters) == 3 && len(c.Heard) == 2
		}, 20*time.Second, time.Millisecond)
	}
	alone := newWorld(t)
	alone.raft.lead(0, 3)
	_, err := alone.Contacts(t.Context())
	require.Equal(t, rpctypes.ErrGRPCNoLeader, err)
}
