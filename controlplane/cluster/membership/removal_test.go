package membership

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
)

// TestRemovalWithoutACredential checks that a caller without a credential can remove neither a voter of a cluster with
// one to three voters, nor an entry that an operator added or is replacing.
func TestRemovalWithoutACredential(t *testing.T) {
	remove := func(w *world, id uint64) error {
		return w.in(func() error { _, err := w.s.RemoveOpen(t.Context(), id); return err })
	}
	for _, first := range [][]uint64{{1}, {1, 2}, {1, 2, 3}} {
		w := newWorld(t, first...)
		for _, id := range first {
			w.refused(remove(w, id), ReasonLastVoter)
		}
		w.refused(remove(w, 9), ReasonNotFound)
		require.Empty(t, w.log)
	}

	// Of two removals from four voters, the second is refused before the first has reached the groups.
	w := newWorld(t, 1, 2, 3, 4)
	_, err := w.s.removeOnLeader(t.Context(), removeAsk{ID: 4, Open: true})
	require.NoError(t, err)
	require.Equal(t, Leaving, w.state(4))
	_, err = w.s.removeOnLeader(t.Context(), removeAsk{ID: 3, Open: true})
	w.refused(err, ReasonLastVoter)
	w.reconcile()
	require.Equal(t, []uint64{1, 2, 3}, w.groups[kvGroup].Voters)

	// Learners, and entries whose process has not joined, may be removed.
	_, _, err = w.s.Add(t.Context(), AddRequest{ID: 5, RaftAddr: "10.0.0.5", Learner: true})
	require.NoError(t, err)
	require.NoError(t, w.join(5, 55))
	w.reconcile()
	require.NoError(t, remove(w, 5))
	for id := uint64(20); id < 20+MaxWaiting; id++ {
		_, _, err = w.s.Add(t.Context(), AddRequest{ID: id, RaftAddr: fmt.Sprintf("10.0.0.%d", id), Open: true})
		require.NoError(t, err)
	}
	_, _, err = w.s.Add(t.Context(), AddRequest{ID: 30, RaftAddr: "10.0.0.30", Open: true})
	w.refused(err, ReasonTooMany)
	require.NoError(t, remove(w, 20))

	// An operator's entry cannot be removed. Otherwise an unauthenticated caller could replace it by an entry with
	// another address.
	_, _, err = w.add(6)
	require.NoError(t, err, "entries of callers without a credential do not count for the operator's limit")
	w.refused(remove(w, 6), ReasonOperator)
	require.NoError(t, w.in(func() error { _, err := w.s.Replace(t.Context(), 3, false); return err }))
	w.refused(remove(w, 3), ReasonOperator)
	require.Equal(t, Waiting, w.state(3))
	_, err = w.s.Remove(t.Context(), 3, false)
	require.NoError(t, err, "an operator may")
}

// TestChangeIsVerifiedInAllGroups checks that a removal that one group would refuse is made in no group.
func TestChangeIsVerifiedInAllGroups(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	w.refuse = func(group uint64, _ consensus.Change, _ bool) error {
		if group == systemGroup {
			return &consensus.MembersError{Reason: consensus.ReasonNoQuorum, Text: "too few"}
		}
		return nil
	}
	_, err := w.s.Remove(t.Context(), 3, true)
	w.refused(err, ReasonQuorum)
	w.reconcile()
	require.Empty(t, w.log)
	require.Equal(t, Voting, w.state(3))
}

// TestNewLeaderContinues simulates the loss of the leader after the group kv has removed a member and before system
// has. The next leader must complete the removal.
func TestNewLeaderContinues(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	lost := errors.New("leader lost")
	w.refuse = func(group uint64, _ consensus.Change, verifyOnly bool) error {
		if group == systemGroup && !verifyOnly {
			return lost
		}
		return nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	require.NoError(t, w.in(func() error {
		others, err := w.s.Remove(ctx, 3, false)
		require.Len(t, others, 2, "kv has it")
		return err
	}))
	cancel()
	require.Equal(t, []string{"group 2: 3 of 3"}, w.log)
	require.Equal(t, Leaving, w.state(3))
	_, _, err := w.add(3)
	w.refused(err, ReasonBusy)
	w.refuse = nil
	w.open(nil)
	w.reconcile()
	require.Equal(t, []string{"group 2: 3 of 3", "group 1: 3 of 3"}, w.log)
	require.Empty(t, w.state(3))
	_, _, err = w.add(3)
	w.refused(err, ReasonRemoved)
	w.refused(w.join(3, 33), ReasonRemoved)
	_, err = w.s.Remove(t.Context(), 3, false)
	w.refused(err, ReasonNotFound)
	_, err = w.s.Remove(t.Context(), 2, false)
	w.refused(err, ReasonLastVoter)
}

// TestRemovalOfLeaderWithoutTransferTarget removes a leader that has received messages from no other voter, to which it
// could transfer the leadership. It must be removed from both groups without a transfer.
func TestRemovalOfLeaderWithoutTransferTarget(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	for _, g := range w.groups {
		g.Leader = 1
	}
	_, err := w.s.removeOnLeader(t.Context(), removeAsk{ID: 1})
	require.NoError(t, err)
	w.reconcile() // no voter can be the successor: the removal itself ends the leadership
	require.Empty(t, w.state(1))
	require.Equal(t, []string{"group 2: 3 of 1", "group 1: 3 of 1"}, w.log)
}
