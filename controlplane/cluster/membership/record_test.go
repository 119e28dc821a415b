package membership

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestListBeforeTheRecordsExist checks that List returns the members of the first configuration until the leader has
// written their records.
func TestListBeforeTheRecordsExist(t *testing.T) {
	w := newWorld(t)
	for _, serializable := range []bool{true, false} {
		none, err := w.s.List(t.Context(), serializable)
		require.NoError(t, err)
		require.Empty(t, none, "of one that joins")
	}
	w.open([]Member{{ID: 1, RaftAddr: "https://10.0.0.1:2380"}, {ID: 2, RaftAddr: "https://10.0.0.2:2380"}})
	for _, serializable := range []bool{true, false} {
		all, err := w.s.List(t.Context(), serializable)
		require.NoError(t, err)
		require.Len(t, all, 2)
		require.True(t, all[1].Votes())
	}
	w.reconcile()
	all, err := w.s.List(t.Context(), false)
	require.NoError(t, err)
	require.Len(t, all, 2)
}

// TestRestoredRecordsAreReplaced checks that records restored from another cluster's backup are replaced by the members
// of the first configuration, once, and that the IDs of removed members can be used again.
func TestRestoredRecordsAreReplaced(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	require.NoError(t, w.in(func() error { _, err := w.s.Remove(t.Context(), 3, false); return err }))
	w.cluster = 77
	w.open([]Member{{ID: 3, Name: "node-3", RaftAddr: "https://10.0.0.3:2380"}})
	w.reconcile()
	all, err := w.s.List(t.Context(), false)
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, Voting, w.state(3))
	w.reconcile()
	_, _, err = w.add(1)
	require.NoError(t, err)
	w.reconcile()
	require.Equal(t, Waiting, w.state(1), "once only")
}
