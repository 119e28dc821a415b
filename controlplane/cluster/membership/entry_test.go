package membership

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestUnauthenticatedEntriesDoNotVote checks that added entries stay waiting and change no group until a process joins,
// that at most MaxWaiting are accepted, and that they are deleted after WaitingTime.
func TestUnauthenticatedEntriesDoNotVote(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	for id := uint64(4); id <= 6; id++ {
		m, all, err := w.add(id)
		require.NoError(t, err)
		require.Equal(t, Waiting, m.State)
		require.Equal(t, Voter, m.Wanted)
		require.Equal(t, fmt.Sprintf("http://10.0.0.%d:2380", id), m.RaftAddr)
		require.Equal(t, []string{fmt.Sprintf("http://10.0.0.%d:50051", id)}, m.ClientURLs)
		require.Len(t, all, int(id))
	}
	w.reconcile()
	require.Empty(t, w.log, "no group has heard of them")
	for id := uint64(7); id <= 11; id++ {
		_, _, err := w.add(id)
		require.NoError(t, err)
	}
	_, _, err := w.add(12)
	w.refused(err, ReasonTooMany)
	_, _, err = w.add(4)
	require.NoError(t, err, "asked again")
	w.refused(w.s.Transfer(t.Context(), 4), ReasonIsLearner)
	_, err = w.s.Promote(t.Context(), 4)
	w.refused(err, ReasonNotReady)

	// One entry is removed, and its ID can be used again. The others are deleted after WaitingTime (10 minutes).
	_, err = w.s.Remove(t.Context(), 4, false)
	require.NoError(t, err)
	_, _, err = w.add(4)
	require.NoError(t, err)
	w.now = w.now.Add(WaitingTime)
	w.reconcile()
	all, err := w.s.List(t.Context(), false)
	require.NoError(t, err)
	require.Len(t, all, 3)
	require.Empty(t, w.log)
}

// TestAddIsChecked checks the errors of Add for invalid and conflicting requests, and the defaults of a request without
// an ID.
func TestAddIsChecked(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	for name, c := range map[string]struct {
		q      AddRequest
		reason string
	}{
		"no address":        {AddRequest{ID: 4}, ""},
		"no host":           {AddRequest{ID: 4, RaftAddr: "http://:2380"}, ""},
		"bad port":          {AddRequest{ID: 4, RaftAddr: "10.0.0.4:0"}, ""},
		"large id":          {AddRequest{ID: 1 << 63, RaftAddr: "10.0.0.4"}, ""},
		"line break":        {AddRequest{ID: 4, RaftAddr: "10.0.0.4", Name: "a\nb"}, ""},
		"other address":     {AddRequest{ID: 2, RaftAddr: "10.0.0.9"}, ReasonExists},
		"address of others": {AddRequest{ID: 9, RaftAddr: "http://10.0.0.2:2380"}, ReasonAddressTaken},
	} {
		_, _, err := w.s.Add(t.Context(), c.q)
		if c.reason == "" {
			require.True(t, fault.Is(err, fault.InvalidArgument), "%s: %v", name, err)
			continue
		}
		w.refused(err, c.reason)
	}
	m, _, err := w.s.Add(t.Context(), AddRequest{RaftAddr: "host-4", Learner: true})
	require.NoError(t, err)
	require.Positive(t, m.ID)
	require.LessOrEqual(t, m.ID, uint64(MaxID))
	require.Empty(t, m.Name, "a member that was given an id has no name before it starts, as in etcd")
	require.Equal(t, "host-4:2380", HostPort(m.RaftAddr))
}
