package qemu

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// sendRunning makes the source send the memory of its running guest, until QEMU has begun several passes.
func (m *migration) sendRunning() {
	m.source.Helper()
	m.mirrored()
	require.NoError(m.source, m.from.SendRunning(m.source.ctx, 0, Route{Stream: m.memory}))
	require.NoError(m.source, m.memory.Close())
	m.source.eventually(func() bool {
		s, err := m.from.Migration(m.source.ctx)
		require.NoError(m.source, err)
		return s.Memory.Pass > 5
	}, "QEMU has sent the memory several times")
}

// running requires that QEMU sends memory, and that the guest runs. The guest does not write meanwhile, because under
// TCG, QEMU does not copy the memory of such a guest correctly.
func (m *migration) running() {
	m.source.Helper()
	status, err := m.from.Status(m.source.ctx)
	require.NoError(m.source, err)
	require.True(m.source, status.Running)
	s, err := m.from.Migration(m.source.ctx)
	require.NoError(m.source, err)
	require.Equal(m.source, "active", s.Status)
	_, stopped := m.from.StoppedForMigration()
	require.False(m.source, stopped)
}

// TestSendRunning moves an idle guest whose memory is sent while the guest runs. QEMU does not complete before
// StopGuest, although it could send the rest at once. This also holds if the agent is restarted.
func TestSendRunning(t *testing.T) {
	m := newMigration(t)
	m.sendRunning()
	m.running()
	m.from = m.source.readopt(m.from)
	m.running()
	require.NoError(t, m.from.StopGuest(m.source.ctx))
	require.NoError(t, m.from.StopGuest(m.source.ctx))
	m.status(m.from, "pre-switchover")
	_, stopped := m.from.StoppedForMigration()
	require.True(t, stopped)
	require.NoError(t, m.from.EndMirrors(m.source.ctx))
	require.NoError(t, m.from.HandOver(m.source.ctx))
	m.status(m.from, "completed")
	m.status(m.to, "completed")
	require.NoError(t, m.to.EndIncoming(m.target.ctx))
	require.NoError(t, m.to.ResumeMigrated(m.target.ctx, nil))
	m.target.writes()
	names, _ := m.target.nodes(m.to)
	require.NotContains(t, names, holdNode)
}

// TestHandOverOfRunningGuest makes QEMU complete while the guest runs. Such a guest is not handed over, because QEMU
// would resume it by itself if the target did not confirm the state. It continues at the source.
func TestHandOverOfRunningGuest(t *testing.T) {
	m := newMigration(t)
	m.sendRunning()
	require.NoError(t, m.from.call(m.source.ctx, m.from.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "migrate-set-parameters", object{"downtime-limit": mostDowntime}, nil)
	}))
	m.status(m.from, "pre-switchover")
	require.NoError(t, m.from.EndMirrors(m.source.ctx))
	require.ErrorIs(t, m.from.StopGuest(m.source.ctx), ErrGuestRan)
	require.ErrorIs(t, m.from.HandOver(m.source.ctx), ErrGuestRan, "a guest that was not stopped was handed over")
	m.status(m.from, "pre-switchover")
	require.NoError(t, m.from.CancelMigration(m.source.ctx))
	require.NoError(t, m.from.ResumeMigrated(m.source.ctx, nil))
	m.source.writes()
	require.Equal(t, Crashed, m.target.exited(m.to).Reason)
	names, _ := m.source.nodes(m.from)
	require.NotContains(t, names, holdNode)
}

// useHold makes another node use the hold node, so that QEMU refuses to remove the hold node.
func (l *lab) useHold(p *Process) {
	l.Helper()
	require.NoError(l, p.call(l.ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "blockdev-add", object{"driver": "raw", "node-name": "user", "file": holdNode}, nil)
	}))
}

// TestHoldThatStays ends a migration while QEMU refuses to remove the hold node. The guest must still run again: on the
// source after a cancelled attempt, and on the target after a completed one.
func TestHoldThatStays(t *testing.T) {
	for _, moves := range []bool{false, true} {
		m := newMigration(t)
		m.sendRunning()
		m.source.useHold(m.from)
		m.target.useHold(m.to)
		require.NoError(t, m.from.StopGuest(m.source.ctx))
		m.status(m.from, "pre-switchover")
		require.NoError(t, m.from.EndMirrors(m.source.ctx))
		at, p := m.source, m.from
		if moves {
			require.NoError(t, m.from.HandOver(m.source.ctx))
			m.status(m.to, "completed")
			at, p = m.target, m.to
			require.NoError(t, p.EndIncoming(at.ctx), "the node keeps the guest stopped")
		} else {
			require.NoError(t, p.CancelMigration(at.ctx), "the node keeps the guest stopped")
		}
		names, _ := at.nodes(p)
		require.Contains(t, names, holdNode)
		require.NoError(t, p.ResumeMigrated(at.ctx, nil))
		at.writes()
	}
}

// TestMigrationOfSuspendedGuest suspends a guest to RAM after its disks have been copied. QEMU would wake the guest
// before the migration completes. SendState and StopGuest must therefore fail, and the guest must stay suspended.
func TestMigrationOfSuspendedGuest(t *testing.T) {
	m := newMigration(t)
	m.mirrored()
	require.NoError(t, m.from.CheckMigratable(m.source.ctx))
	conn := m.source.types("z")
	defer conn.Close()
	suspended := func() bool {
		s, err := m.from.Status(m.source.ctx)
		require.NoError(t, err)
		return s.State == stateSuspended
	}
	m.source.eventually(suspended, "the guest is suspended")
	require.ErrorIs(t, m.from.CheckMigratable(m.source.ctx), errSuspended, "the disks of a suspended guest are copied")
	require.ErrorIs(t, m.from.SendState(m.source.ctx, 0, Route{Stream: m.memory}), errSuspended, "a suspended guest is handed over")
	require.False(t, m.from.Migrating())
	s, err := m.from.Migration(m.source.ctx)
	require.NoError(t, err)
	require.False(t, s.Active())
	require.ErrorIs(t, m.from.StopGuest(m.source.ctx), errSuspended)
	require.NoError(t, m.from.CancelMigration(m.source.ctx))
	require.True(t, suspended())
}

// TestHolds checks with which versions of QEMU memory is sent while the guest runs.
func TestHolds(t *testing.T) {
	for version, want := range map[[2]int]bool{{7, 1}: false, {7, 2}: true, {8, 0}: true, {8, 2}: true, {9, 0}: false, {10, 1}: false} {
		require.Equal(t, want, holds(version[0], version[1]), version)
	}
}
