package membership

import (
	"testing"

	"github.com/fxamacker/cbor/v2"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestMemberBecomesVoter checks that a member is added to the group kv and then to system, first as a learner and then
// as a voter, and that each step waits until the former one is done in both groups.
func TestMemberBecomesVoter(t *testing.T) {
	w := newWorld(t, 1)
	w.refused(w.join(2, 22), ReasonNotFound)
	_, _, err := w.add(2)
	require.NoError(t, err)
	body, err := cbor.Marshal(JoinRequest{ID: 2, DirID: 22})
	require.NoError(t, err)
	_, err = w.s.serveJoin(t.Context(), 3, body)
	require.True(t, fault.Is(err, fault.PermissionDenied), "with the certificate of another: %v", err)
	require.NoError(t, w.join(2, 22))
	require.NoError(t, w.join(2, 22), "it may ask again")
	w.refused(w.join(2, 23), ReasonWiped)
	w.reconcile()
	require.Equal(t, Learning, w.state(2))
	require.Equal(t, uint64(22), w.dirIDs[2])
	w.ready[2] = true
	w.reconcile()
	require.Equal(t, Voting, w.state(2))
	require.Equal(t, []string{"group 2: 1 of 2", "group 1: 1 of 2", "group 2: 2 of 2", "group 1: 2 of 2"}, w.log)
	_, err = w.s.Promote(t.Context(), 2)
	w.refused(err, ReasonNotLearner)
	require.NoError(t, w.s.Transfer(t.Context(), 2))
	require.NoError(t, w.s.Transfer(t.Context(), 1), "it leads already")
	w.refused(w.s.Transfer(t.Context(), 7), ReasonNotFound)
}

// TestPromote checks that a member added as a learner becomes a voter only by Promote, which returns ReasonNotReady for
// a learner that has not caught up.
func TestPromote(t *testing.T) {
	w := newWorld(t, 1)
	_, _, err := w.s.Add(t.Context(), AddRequest{ID: 2, RaftAddr: "10.0.0.2", Learner: true})
	require.NoError(t, err)
	require.NoError(t, w.join(2, 22))
	w.reconcile()
	_, err = w.s.Promote(t.Context(), 2)
	w.refused(err, ReasonNotReady)
	w.ready[2] = true
	w.reconcile()
	require.Equal(t, Learning, w.state(2))
	require.NoError(t, w.in(func() error { _, err := w.s.Promote(t.Context(), 2); return err }))
	require.Equal(t, Voting, w.state(2))
}
