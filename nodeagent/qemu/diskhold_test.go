package qemu

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGuestIsHeldWhileSnapshotsAreTaken copies a disk and takes a snapshot of another one outside QEMU. The guest must
// be stopped meanwhile, and run afterwards, also after an error. A snapshot of one disk does not stop the guest.
func TestGuestIsHeldWhileSnapshotsAreTaken(t *testing.T) {
	l := newCopyLab(t)
	state := func() string {
		s, err := l.p.Status(l.ctx)
		require.NoError(t, err)
		return s.State
	}
	var during []string
	var broken error
	take := func(ctx context.Context) error {
		_, bounded := ctx.Deadline()
		require.True(t, bounded)
		require.True(t, l.p.Copying())
		during = append(during, state())
		return broken
	}
	l.deviceIO(l.p, "d0", "write -P 7 1M 1M")
	targets := []CopyTarget{l.copyTarget(t.TempDir(), "d0", diskBytes), {Disk: "d1", Size: diskBytes, Take: take}}
	out, err := l.p.CopyDisks(l.ctx, targets)
	require.NoError(t, err)
	require.False(t, out.Taken.IsZero())
	require.Equal(t, []string{"paused"}, during, "the guest writes while the snapshots are taken")
	require.Equal(t, "running", state())
	require.Equal(t, byte(7), flat(t, "driver=qcow2,file.filename="+targets[0].File.Name())[1<<20])

	broken = errors.New("the cluster is away")
	before, sets := l.nodes(l.p)
	_, err = l.p.CopyDisks(l.ctx, []CopyTarget{l.copyTarget(t.TempDir(), "d0", diskBytes), targets[1]})
	require.ErrorIs(t, err, broken)
	require.Equal(t, "running", state(), "the guest stays stopped after an error")
	after, setsAfter := l.nodes(l.p)
	require.ElementsMatch(t, before, after)
	require.Equal(t, sets, setsAfter)

	broken, during = nil, nil
	_, err = l.p.CopyDisks(l.ctx, targets[1:])
	require.NoError(t, err)
	require.Equal(t, []string{"running"}, during)

	require.NoError(t, l.p.Pause(l.ctx))
	_, err = l.p.CopyDisks(l.ctx, []CopyTarget{targets[1], targets[1]})
	require.ErrorIs(t, err, ErrNotHeld, "only a guest that runs can be held and resumed")
	l.p.Close() // The agent ends while the guest's CPUs are stopped.
	l.p = l.adopt()
	l.eventually(func() bool { return state() == "running" }, "the next agent resumes the guest")
}
