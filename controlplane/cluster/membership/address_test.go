package membership

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNoVoteAtAWrongAddress checks that a learner that has caught up is not promoted while its record has a wrong
// address.
func TestNoVoteAtAWrongAddress(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	_, _, err := w.s.Add(t.Context(), AddRequest{ID: 4, RaftAddr: "10.0.0.99:2380"})
	require.NoError(t, err)
	require.NoError(t, w.join(4, 44))
	w.ready[4] = true
	w.reconcile()
	w.reconcile()
	require.Equal(t, Learning, w.state(4))
	require.Equal(t, []uint64{1, 2, 3}, w.groups[kvGroup].Voters)
	_, err = w.s.Promote(t.Context(), 4)
	w.refused(err, ReasonUnverified)
	_, err = w.s.Update(t.Context(), UpdateRequest{ID: 4, RaftAddr: "10.0.0.4:2380"})
	require.NoError(t, err)
	w.reconcile()
	require.Equal(t, Voting, w.state(4))
}

// TestUpdate checks that Update stores a new address of a joined member only if the member presents its certificate
// there, and the errors of Update.
func TestUpdate(t *testing.T) {
	w := newWorld(t, 1, 2)
	_, err := w.s.Update(t.Context(), UpdateRequest{ID: 2, RaftAddr: "10.0.0.1:2380"})
	w.refused(err, ReasonAddressTaken)
	_, err = w.s.Update(t.Context(), UpdateRequest{ID: 9, RaftAddr: "10.0.0.9:2380"})
	w.refused(err, ReasonNotFound)
	// An address at which the member does not present its certificate is refused, because it would isolate the member.
	for address, answers := range map[string]uint64{"10.0.0.7:2380": 0, "10.0.0.8:2380": 1} {
		w.at = map[string]uint64{address: answers}
		_, err = w.s.Update(t.Context(), UpdateRequest{ID: 2, RaftAddr: address})
		w.refused(err, ReasonUnverified)
		unchanged, err := w.s.List(t.Context(), false)
		require.NoError(t, err)
		require.Equal(t, "https://10.0.0.2:2380", find(unchanged, 2).RaftAddr)
	}
	_, err = w.s.Update(t.Context(), UpdateRequest{ID: 2, RaftAddr: "http://10.0.0.2"})
	require.NoError(t, err, "the same address in another spelling")
	w.at = map[string]uint64{"10.0.0.9:2380": 2}
	all, err := w.s.Update(t.Context(), UpdateRequest{ID: 2, RaftAddr: "10.0.0.9:2380", ClientURLs: []string{"https://h:1"}})
	require.NoError(t, err)
	require.Equal(t, "http://10.0.0.9:2380", find(all, 2).RaftAddr)
	require.Equal(t, []string{"https://h:1"}, find(all, 2).ClientURLs)
}
