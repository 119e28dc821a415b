package machine

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/qmp"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// newRunningMove starts a guest. The source sends its memory at 200 KiB/s while it runs, so that the first pass takes
// seconds. With this limit, it uses one connection. The guest is idle: under TCG, QEMU does not copy the memory of a busy one correctly.
func newRunningMove(t *testing.T) *move {
	t.Helper()
	m := newMove(t)
	m.source.migration.SendRunning = true
	m.source.migration.MaxBytesPerSecond = 200 << 10
	return m
}

// sendsWhileRunning begins the transfer. It returns when QEMU is in its first pass over the memory, and checks that the
// guest runs.
func (m *move) sendsWhileRunning() {
	m.Helper()
	m.prepared()
	m.enter(transferIt)
	require.Eventually(m, func() bool { return m.memory().Status == "active" }, within, 10*time.Millisecond, "memory is sent")
	require.True(m, m.source.runs(m.vm.VmId))
	require.LessOrEqual(m, m.memory().Memory.Pass, uint64(1))
}

// memory returns the state of the migration in the source's QEMU.
func (m *move) memory() qemu.Migration {
	m.Helper()
	return m.memoryAt(m.source)
}

// memoryAt returns the state of the migration in the QEMU of a host.
func (m *move) memoryAt(l *lab) qemu.Migration {
	m.Helper()
	for _, v := range l.machines() {
		v.mu.Lock()
		p := v.process
		v.mu.Unlock()
		if string(v.id) == m.vm.VmId && p != nil {
			s, err := p.Migration(m.Context())
			require.NoError(m, err)
			return s
		}
	}
	m.Fatal("the host has no such VM")
	return qemu.Migration{}
}

// neverStopped checks that the source has not stopped the guest since the migration began: its QEMU would have sent
// the event STOP.
func (m *move) neverStopped() {
	m.Helper()
	require.True(m, m.source.runs(m.vm.VmId))
	for _, v := range m.source.machines() {
		require.False(m, string(v.id) == m.vm.VmId && v.process.Migrating(), "the guest was stopped")
	}
}

// TestMigrationWhileRunning moves a guest that runs while its memory is sent. The agent of the source is restarted
// meanwhile.
func TestMigrationWhileRunning(t *testing.T) {
	m := newRunningMove(t)
	m.sendsWhileRunning()
	m.restart(m.source)
	require.True(t, m.source.runs(m.vm.VmId))
	require.Equal(t, "active", m.memory().Status)
	o := m.reports(m.source, cloud.MigrationAtSwitchover)
	require.Zero(t, m.channels)
	require.Zero(t, m.memory().Memory.SentByChannels)
	require.Positive(t, o.SentBytes)
	require.Positive(t, o.DowntimeMS)
	require.False(t, m.source.runs(m.vm.VmId))
	m.enter(switchover)
	m.reports(m.target, cloud.MigrationRunning)
	m.source.until(cloud.VMID(m.vm.VmId), "the downtime", func(o cloud.Observation) bool {
		return o.Migration != nil && o.Migration.State == cloud.MigrationHandedOver && o.Migration.DowntimeMS > 0
	})
	m.settled()
	require.Equal(t, 0, m.target.said(m.vm.VmId, "GUEST UP"), "the guest did not boot again")
}

// TestMigrationWhileRunningOverChannels moves a guest that runs while its memory is sent over several connections.
func TestMigrationWhileRunningOverChannels(t *testing.T) {
	m := newRunningMove(t)
	m.source.migration.MaxBytesPerSecond = qemu.ChannelRate
	m.atSwitchover()
	require.EqualValues(t, qemu.MemoryChannels, m.channels)
	require.Positive(t, m.memory().Memory.SentByChannels)
	m.enter(switchover)
	m.reports(m.target, cloud.MigrationRunning)
	m.settled()
	require.Equal(t, 0, m.target.said(m.vm.VmId, "GUEST UP"), "the guest did not boot again")
}

// TestMigrationToOldTarget moves a guest to a host whose agent can receive neither the memory of a running guest nor
// several connections. The source stops the guest first.
func TestMigrationToOldTarget(t *testing.T) {
	m := newRunningMove(t)
	m.source.migration.MaxBytesPerSecond = 0
	m.oldTarget = true
	m.atSwitchover()
	for _, v := range m.source.machines() {
		v.mu.Lock()
		running := v.record.Migration.Running
		v.mu.Unlock()
		require.Zero(t, running, "the memory was sent while the guest ran")
	}
	require.Zero(t, m.memory().Memory.SentByChannels)
	m.enter(switchover)
	m.reports(m.target, cloud.MigrationRunning)
	m.settled()
}

// TestMigrationEndsWhileRunning ends a migration while the memory of the running guest is sent. The guest runs on at the
// source, and is not stopped.
func TestMigrationEndsWhileRunning(t *testing.T) {
	t.Run("the target is killed", func(t *testing.T) {
		t.Parallel()
		m := newRunningMove(t)
		m.sendsWhileRunning()
		kill(t, m.target.qemu(m.vm.VmId))
		m.reports(m.source, cloud.MigrationCancelled)
		m.reports(m.target, cloud.MigrationFailed)
		m.neverStopped()
		m.aborted()
		require.Equal(t, 0, m.tunnels())
	})
	t.Run("the user cancels", func(t *testing.T) {
		t.Parallel()
		m := newRunningMove(t)
		m.sendsWhileRunning()
		m.aborted()
		m.neverStopped()
		require.Eventually(t, func() bool { return m.tunnels() == 0 }, within, 10*time.Millisecond)
	})
}

// TestMigrationCompletesEarly makes QEMU complete the transfer while the guest runs and no agent does. The next agent
// must not hand the guest over, also if the control plane confirms the switchover. The next attempt succeeds.
func TestMigrationCompletesEarly(t *testing.T) {
	m := newRunningMove(t)
	m.sendsWhileRunning()
	m.source.stop()
	completeNow(t, m.source.homeDir(m.vm.VmId)+"/work.sock")
	m.phase = switchover
	m.source.start()
	m.source.SetGuarded(true)
	m.enterAt(m.source, switchover)
	o := m.reports(m.source, cloud.MigrationCancelled)
	require.Contains(t, o.Error, "before the agent could stop the guest")
	m.reports(m.target, cloud.MigrationFailed)
	m.runsOnly(m.source)
	m.aborted()

	m.attempt++
	m.source.migration.MaxBytesPerSecond = 0
	m.atSwitchover()
	m.enter(switchover)
	m.reports(m.target, cloud.MigrationRunning)
	m.settled()
}

// completeNow raises the downtime limit of a QEMU with the given QMP socket, so that QEMU completes the transfer. It
// returns when QEMU waits before the switchover.
func completeNow(t *testing.T, path string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	socket := qmp.NewSocket(path)
	defer socket.Close()
	conn, err := socket.Conn(ctx)
	require.NoError(t, err)
	require.NoError(t, conn.Do(ctx, "migrate-set-parameters", map[string]any{"downtime-limit": 2_000_000}, nil))
	require.Eventually(t, func() bool {
		var info struct{ Status string }
		require.NoError(t, conn.Do(ctx, "query-migrate", nil, &info))
		return info.Status == "pre-switchover"
	}, within, 10*time.Millisecond)
}
