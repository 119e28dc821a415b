package membership

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
)

// TestReplace checks that a replaced member is removed from both groups, that its entry then waits without expiry, and
// that only a process with another data directory can join as it.
func TestReplace(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	w.refused(w.join(3, 33), ReasonWiped)
	require.NoError(t, w.in(func() error { _, err := w.s.Replace(t.Context(), 3, false); return err }))
	require.Equal(t, Waiting, w.state(3))
	require.Equal(t, []string{"group 2: 3 of 3", "group 1: 3 of 3"}, w.log)
	w.now = w.now.Add(10 * WaitingTime)
	w.reconcile()
	require.Equal(t, Waiting, w.state(3))
	_, err := w.s.Replace(t.Context(), 3, false)
	require.NoError(t, err, "nothing is left to remove")
	require.NoError(t, w.join(3, 34))
	w.ready[3] = true
	w.reconcile()
	w.reconcile()
	require.Equal(t, Voting, w.state(3))
	require.NoError(t, w.in(func() error { _, err := w.s.Replace(t.Context(), 3, false); return err }))
	w.refused(w.join(3, 34), ReasonWiped)
	require.NoError(t, w.join(3, 35))
}

// TestReplaceLeaderOfAnotherGroup replaces an unreachable member that leads the group kv. The removal must continue
// with the next leader of kv.
func TestReplaceLeaderOfAnotherGroup(t *testing.T) {
	w := newWorld(t, 1, 2, 3)
	w.groups[kvGroup].Leader = 3
	w.s.opts.Peers = dead{w}
	require.NoError(t, w.in(func() error { _, err := w.s.Replace(t.Context(), 3, false); return err }))
	require.Equal(t, Waiting, w.state(3))
	require.Equal(t, []string{"group 2: 3 of 3", "group 1: 3 of 3"}, w.log)
}

// dead implements Peers with unreachable members. After the first call, member 1 leads the group kv.
type dead struct{ w *world }

func (d dead) Direct(_ context.Context, member uint64, _ string, _ []byte) ([]byte, error) {
	d.w.mu.Lock()
	defer d.w.mu.Unlock()
	d.w.groups[kvGroup].Leader = 1
	return nil, fmt.Errorf("member %d cannot be reached: %w", member, leader.ErrNotSent)
}

func (dead) Verify(context.Context, string, uint64) error { return errors.New("cannot be reached") }

func (dead) HandleDirect(string, func(context.Context, uint64, []byte) ([]byte, error))    {}
func (dead) HandleNonMember(string, func(context.Context, uint64, []byte) ([]byte, error)) {}
func (dead) Members() map[uint64]string                                                    { return nil }
func (dead) SetMembers(map[uint64]string, []uint64) error                                  { return nil }
