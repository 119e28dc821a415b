package machine

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/tunnel"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// tunnelCommand is the first argument that makes the test program act as the tunnel process.
const tunnelCommand = "migration-tunnel"

// move is a migration of a guest between two hosts, with the test as the control plane.
type move struct {
	*testing.T
	source, target *lab
	vm             *agentv1.AssignedVm // with the guest running at the source
	phase          agentv1.MigrationPhase
	rate           uint64 // maximum rate of the transfer in bytes per second; 0 means no limit
	oldTarget      bool   // the target's agent can receive neither the memory of a running guest nor several connections
	channels       uint32 // connections for the memory besides the main one, as the source has reported them
	machine        []byte
	address        string
	generation     uint64
	attempt        uint64
	names          map[*lab]string // IDs of the hosts
	volume         *movedVolume    // the VM's root disk, or nil if it is not a volume
	answers        func(l *lab)    // checks that the guest runs at the host l; nil means writes
}

// newMove starts a guest with two disks at the host source. The ID of one of them is also the name of the stream with the
// memory.
func newMove(t *testing.T) *move { return newMoveOf(t, nil) }

// newMoveOf is like newMove. If v is not nil, the guest's root disk is the volume v.
func newMoveOf(t *testing.T, v *movedVolume) *move {
	t.Helper()
	m := newHosts(t, v)
	vm := m.source.vm(1)
	vm.Disks = append(vm.Disks, &agentv1.AssignedDisk{Id: "memory", SizeBytes: 1 << 30, Bus: vmv1.DiskBus_DISK_BUS_VIRTIO,
		Cache: vmv1.DiskCache_DISK_CACHE_NONE})
	m.vm = on(vm)
	m.generation = m.vm.Generation
	if v != nil {
		m.attachRoot()
		m.assignVolume(m.source)
	}
	m.source.assign(m.withVolume(m.vm, m.source))
	m.source.sees(m.vm, cloud.ObservedRunning)
	m.source.says(m.vm.VmId, "GUEST UP", 1)
	m.writes(m.source)
	return m
}

// newHosts returns a move without a guest. Both hosts can use the volume v, unless it is nil.
func newHosts(t *testing.T, v *movedVolume) *move {
	t.Helper()
	m := &move{T: t, source: newLab(t), target: newLab(t), attempt: 7, volume: v}
	m.names = map[*lab]string{m.source: "source", m.target: "target"}
	authority, err := mtls.NewAuthority("11", make([]byte, ed25519.SeedSize))
	require.NoError(t, err)
	for name, l := range map[string]*lab{"source": m.source, "target": m.target} {
		l.stop()
		l.migration = migrationOptions(t, authority, name)
		if v != nil {
			l.shared, l.rbdHelper = v.directory, v.helper
		}
		l.start()
		l.SetGuarded(true)
	}
	return m
}

func migrationOptions(t *testing.T, authority *mtls.Authority, node string) *MigrationOptions {
	own, err := authority.IssueFor(mtls.Node, node, time.Now(), time.Hour)
	require.NoError(t, err)
	key, err := x509.MarshalPKCS8PrivateKey(own.PrivateKey)
	require.NoError(t, err)
	return &MigrationOptions{
		Command: []string{"/proc/self/exe", tunnelCommand},
		Identity: func() (tunnel.Identity, error) {
			return tunnel.Identity{Certificate: own.Certificate[0], Key: key, Authority: authority.Certificate().Raw}, nil
		},
		Address: func() (string, error) { return "127.0.0.1", nil }, FirstPort: 0, LastPort: 0,
	}
}

// assigned returns the assignment of a host with this role in the current phase.
func (m *move) assigned(role agentv1.MigrationRole) *agentv1.AssignedVm {
	host := m.source
	if role == agentv1.MigrationRole_MIGRATION_ROLE_TARGET {
		host = m.target
	}
	w := with(m.withVolume(m.vm, host), func(*agentv1.AssignedVm) {})
	w.Generation = m.generation
	w.Migration = &agentv1.AssignedMigration{Attempt: m.attempt, Role: role, Phase: m.phase, PeerNodeId: m.names[m.target], PeerAddress: m.address,
		MaxBytesPerSecond: m.rate, SendRunning: !m.oldTarget, MemoryChannels: m.channels}
	if role == agentv1.MigrationRole_MIGRATION_ROLE_TARGET {
		w.Migration.PeerNodeId, w.Migration.Machine = m.names[m.source], m.machine
	}
	return w
}

const (
	prepare    = agentv1.MigrationPhase_MIGRATION_PHASE_PREPARE
	transferIt = agentv1.MigrationPhase_MIGRATION_PHASE_TRANSFER
	switchover = agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER
	rollback   = agentv1.MigrationPhase_MIGRATION_PHASE_ROLLBACK
)

// enter assigns a phase to both hosts.
func (m *move) enter(phase agentv1.MigrationPhase) {
	m.enterAt(m.source, phase)
	m.enterAt(m.target, phase)
}

// enterAt assigns a phase to one host.
func (m *move) enterAt(l *lab, phase agentv1.MigrationPhase) {
	m.phase = phase
	m.generation++
	role := agentv1.MigrationRole_MIGRATION_ROLE_SOURCE
	if l == m.target {
		role = agentv1.MigrationRole_MIGRATION_ROLE_TARGET
	}
	switch phase {
	case switchover:
		m.setHosts(m.target, m.source)
	case rollback:
		m.setHosts(m.source, nil)
	default:
		m.setHosts(m.source, m.target)
	}
	m.assignVolume(l)
	l.assign(m.assigned(role))
}

// reports waits until the host l reports the state of the migration.
func (m *move) reports(l *lab, state cloud.MigrationState) *cloud.MigrationObservation {
	m.Helper()
	o := l.until(cloud.VMID(m.vm.VmId), "migration "+state.String(), func(o cloud.Observation) bool {
		return o.Migration != nil && o.Migration.Attempt == m.attempt && o.Migration.State == state
	})
	return o.Migration
}

// prepared runs the phase PREPARE until both hosts report PREPARED.
func (m *move) prepared() {
	m.Helper()
	m.channels = 0
	m.enterAt(m.source, prepare)
	o := m.reports(m.source, cloud.MigrationPrepared)
	m.machine = o.Machine
	if !m.oldTarget {
		m.channels = o.MemoryChannels
	}
	m.enterAt(m.target, prepare)
	m.address = m.reports(m.target, cloud.MigrationPrepared).Address
}

// atSwitchover runs the migration until the source waits for the switchover.
func (m *move) atSwitchover() {
	m.Helper()
	m.prepared()
	m.enter(transferIt)
	m.reports(m.source, cloud.MigrationAtSwitchover)
}

// settled ends the migration after the switchover: the target is the only host, and the VM is removed from the source.
func (m *move) settled() {
	m.Helper()
	m.generation++
	m.setHosts(m.target, nil)
	m.assignVolume(m.target)
	m.assignVolume(m.source)
	only := with(m.withVolume(m.vm, m.target), func(*agentv1.AssignedVm) {})
	only.Generation = m.generation
	m.target.assign(only)
	o := m.target.sees(only, cloud.ObservedRunning)
	require.Equal(m, m.vm.Starts, o.StartsDone)
	m.source.assign(destroyed(only))
	m.source.until(cloud.VMID(m.vm.VmId), "absent", func(o cloud.Observation) bool { return o.Observed == cloud.ObservedAbsent })
	m.runsOnly(m.target)
	m.vm = only
}

// aborted ends the migration before the switchover: the source is the only host, and the VM is removed from the target.
func (m *move) aborted() {
	m.Helper()
	m.generation++
	m.setHosts(m.source, nil)
	m.assignVolume(m.target)
	m.assignVolume(m.source)
	only := with(m.withVolume(m.vm, m.source), func(*agentv1.AssignedVm) {})
	only.Generation = m.generation
	m.source.assign(only)
	m.target.assign(destroyed(only))
	m.target.until(cloud.VMID(m.vm.VmId), "absent", func(o cloud.Observation) bool { return o.Observed == cloud.ObservedAbsent })
	m.source.until(cloud.VMID(m.vm.VmId), "running again", func(o cloud.Observation) bool {
		return o.Observed == cloud.ObservedRunning && o.Generation == only.Generation && o.Migration == nil
	})
	m.runsOnly(m.source)
}

// runsOnly checks that the guest runs at the host l and can write its disk, and that it does not run at the other host.
func (m *move) runsOnly(l *lab) {
	m.Helper()
	if m.answers != nil {
		m.answers(l)
	} else {
		m.writes(l)
	}
	for _, other := range []*lab{m.source, m.target} {
		require.Equal(m, other == l, other.runs(m.vm.VmId), "the guest runs")
	}
}

// writes makes the guest write its disk.
func (m *move) writes(l *lab) {
	m.Helper()
	before := l.said(m.vm.VmId, "W")
	conn := dialConsole(m.T, l.homeDir(m.vm.VmId))
	defer conn.Close()
	_, err := conn.Write([]byte("w"))
	require.NoError(m, err)
	l.says(m.vm.VmId, "W", before+1)
}

func (l *lab) homeDir(id string) string { return l.dir + "/vms/" + id }

// said returns how often the console log of the VM contains text.
func (l *lab) said(id, text string) int {
	var out strings.Builder
	if l.Console(l.Context(), cloud.VMID(id), 0, false, &out) != nil {
		return 0
	}
	return strings.Count(out.String(), text)
}

// runs reports whether the VM's QEMU runs the CPUs of its guest.
func (l *lab) runs(id string) bool {
	l.Helper()
	for _, v := range l.machines() {
		v.mu.Lock()
		p := v.process
		v.mu.Unlock()
		if string(v.id) != id || p == nil {
			continue
		}
		s, err := p.Status(l.Context())
		return err == nil && s.Running
	}
	return false
}

// qemu returns the pid of the VM's QEMU.
func (l *lab) qemu(id string) int {
	l.Helper()
	procs, err := l.tree.Procs(id)
	require.NoError(l, err)
	require.Len(l, procs, 1)
	return procs[0]
}

func kill(t *testing.T, pid int) {
	t.Helper()
	require.NoError(t, unix.Kill(pid, unix.SIGKILL))
}

// restart ends the agent of the host and starts another one, which gets the last assignment.
func (m *move) restart(l *lab) {
	m.Helper()
	l.stop()
	l.start()
	l.SetGuarded(true)
	m.assignVolume(l)
	role := agentv1.MigrationRole_MIGRATION_ROLE_SOURCE
	if l == m.target {
		role = agentv1.MigrationRole_MIGRATION_ROLE_TARGET
	}
	l.assign(m.assigned(role))
}

// TestMigration moves a guest with two disks to another host and back. The guest continues, with the same disks.
func TestMigration(t *testing.T) {
	m := newMove(t)
	m.atSwitchover()
	require.EqualValues(t, qemu.MemoryChannels, m.channels)
	require.Positive(t, m.memory().Memory.SentByChannels, "only the main connection was used")
	require.LessOrEqual(t, m.memory().Memory.SentByChannels, m.memory().Memory.Sent)
	require.False(t, m.source.runs(m.vm.VmId))
	require.False(t, m.target.runs(m.vm.VmId))
	m.enter(switchover)
	m.reports(m.target, cloud.MigrationRunning)
	o := m.reports(m.source, cloud.MigrationHandedOver)
	require.Positive(t, o.TotalBytes)
	m.settled()
	require.Equal(t, 0, m.target.said(m.vm.VmId, "GUEST UP"), "the guest did not boot again")
	require.Equal(t, 0, m.tunnels())

	// The disks at the target have the content that the guest wrote at the source. A reboot reads the boot sector.
	again := with(m.vm, func(w *agentv1.AssignedVm) { w.Resets++ })
	m.target.assign(again)
	m.target.says(m.vm.VmId, "GUEST UP", 1)

	// QEMU at the former target still reports the first migration as completed.
	m.vm, m.generation = again, again.Generation
	m.source, m.target, m.attempt = m.target, m.source, 8
	m.atSwitchover()
	m.enter(switchover)
	m.reports(m.target, cloud.MigrationRunning)
	m.settled()
}

// tunnel returns the state of the tunnel process of a host, and whether it runs.
func (m *move) tunnel(l *lab) (tunnel.State, bool) {
	m.Helper()
	s, running, err := tunnel.Find(l.homeDir(m.vm.VmId) + "/migration")
	require.NoError(m, err)
	return s, running
}

// tunnels returns the number of tunnel processes of both hosts.
func (m *move) tunnels() int {
	n := 0
	for _, l := range []*lab{m.source, m.target} {
		if _, running := m.tunnel(l); running {
			n++
		}
	}
	return n
}

// TestMigrationRestarts restarts both agents in each phase. The new agents continue the migration, and it succeeds.
func TestMigrationRestarts(t *testing.T) {
	m := newMove(t)
	both := func() { m.restart(m.source); m.restart(m.target) }
	m.prepared()
	both()
	m.reports(m.source, cloud.MigrationPrepared)
	m.reports(m.target, cloud.MigrationPrepared)
	m.enter(transferIt)
	m.reports(m.source, cloud.MigrationAtSwitchover)
	m.restart(m.source)
	m.reports(m.source, cloud.MigrationAtSwitchover)
	m.restart(m.target)
	m.enterAt(m.source, switchover)
	m.reports(m.source, cloud.MigrationHandedOver)
	m.reports(m.target, cloud.MigrationReceived)
	m.phase = transferIt
	m.restart(m.target)
	m.reports(m.target, cloud.MigrationReceived)
	require.False(t, m.target.runs(m.vm.VmId), "a new agent runs the guest before the switchover")
	m.phase = switchover
	m.restart(m.source)
	m.reports(m.source, cloud.MigrationHandedOver)
	require.False(t, m.source.runs(m.vm.VmId), "a new agent runs the guest after the switchover")
	m.enterAt(m.target, switchover)
	m.reports(m.target, cloud.MigrationRunning)
	both()
	m.reports(m.target, cloud.MigrationRunning)
	m.settled()
}

// TestMigrationKills kills the QEMU of the target or a tunnel in each phase before the switchover, or only ends the
// migration. The guest continues at the source. A later migration succeeds.
func TestMigrationKills(t *testing.T) {
	for _, connections := range []string{"several connections", "one connection"} {
		t.Run(connections, func(t *testing.T) { testMigrationKills(t, connections == "one connection") })
	}
}

func testMigrationKills(t *testing.T, oldTarget bool) {
	for _, victim := range []string{"target", "tunnel of the source", "tunnel of the target", "nothing"} {
		for _, phase := range []string{"prepare", "transfer", "switchover"} {
			t.Run(victim+" at "+phase, func(t *testing.T) {
				t.Parallel()
				m := newMove(t)
				m.oldTarget = oldTarget
				switch phase {
				case "prepare":
					m.prepared()
				case "transfer":
					m.prepared()
					m.enterAt(m.source, transferIt)
				case "switchover":
					m.atSwitchover()
				}
				switch victim {
				case "target":
					kill(t, m.target.qemu(m.vm.VmId))
				case "tunnel of the source":
					require.NoError(t, tunnel.Stop(m.source.homeDir(m.vm.VmId)+"/migration"))
				case "tunnel of the target":
					require.NoError(t, tunnel.Stop(m.target.homeDir(m.vm.VmId)+"/migration"))
				}
				if phase != "prepare" && victim != "nothing" {
					m.reports(m.source, cloud.MigrationCancelled)
					m.reports(m.target, cloud.MigrationFailed)
					m.enter(switchover) // The attempt has ended already.
					m.runsOnly(m.source)
				}
				m.aborted()
				m.attempt++
				m.atSwitchover()
				m.enter(switchover)
				m.reports(m.target, cloud.MigrationRunning)
				m.settled()
			})
		}
	}
}

// TestMigrationTimesOut checks that a source that does not receive the switchover cancels the attempt and does not
// continue it later.
func TestMigrationTimesOut(t *testing.T) {
	m := newMove(t)
	m.atSwitchover()
	o := m.reports(m.source, cloud.MigrationCancelled)
	require.Contains(t, o.Error, "did not confirm the switchover")
	m.reports(m.target, cloud.MigrationFailed)
	m.enter(switchover)
	m.restart(m.source)
	m.reports(m.source, cloud.MigrationCancelled)
	m.enterAt(m.source, rollback)
	m.reports(m.source, cloud.MigrationRunning)
	m.aborted()
}

// TestMigrationLinkDies suspends the tunnel of the target while memory is sent. The source cancels the attempt after
// stallTimeout, and the guest continues at the source.
func TestMigrationLinkDies(t *testing.T) {
	for _, oldTarget := range []bool{false, true} {
		t.Run("", func(t *testing.T) { testMigrationLinkDies(t, oldTarget) })
	}
}

func testMigrationLinkDies(t *testing.T, oldTarget bool) {
	t.Parallel()
	m := newMove(t)
	m.oldTarget = oldTarget
	m.prepared()
	require.Equal(t, oldTarget, m.channels == 0)
	m.rate = 100 << 10 // A source with this limit would have reported no channels.
	m.enter(transferIt)
	require.Eventually(t, func() bool { return !m.source.runs(m.vm.VmId) }, within, 10*time.Millisecond, "memory is sent")
	require.Eventually(t, func() bool { return m.memoryAt(m.target).Status == "active" }, within, 10*time.Millisecond, "all connections are open")
	s, running := m.tunnel(m.target)
	require.True(t, running)
	require.NoError(t, unix.Kill(s.PID, unix.SIGSTOP))
	o := m.reports(m.source, cloud.MigrationCancelled)
	require.Contains(t, o.Error, "no progress")
	m.runsOnly(m.source)
	m.aborted()
}

// sendsOverChannels makes the source send memory over several connections, so slowly that it does not end by itself.
func (m *move) sendsOverChannels() {
	m.Helper()
	m.prepared()
	require.NotZero(m, m.channels)
	m.rate = 100 << 10 // A source with this limit would have reported no channels.
	m.enter(transferIt)
	require.Eventually(m, func() bool { return m.memory().Status == "active" }, within, 10*time.Millisecond, "memory is sent")
}

// TestAgentEndsDuringCancellation ends the agent of the source while it cancels a migration whose memory is sent. The
// tunnel process must stay for the next agent, because QEMU may wait for ever for a connection that ends before QEMU has
// stopped sending. The next agent cancels the migration, and the guest continues at the source.
func TestAgentEndsDuringCancellation(t *testing.T) {
	m := newMove(t)
	m.sendsOverChannels()
	all := m.source.machines()
	require.Len(t, all, 1)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	all[0].mu.Lock()
	err := all[0].endTransfer(ended, m.assigned(agentv1.MigrationRole_MIGRATION_ROLE_SOURCE))
	all[0].mu.Unlock()
	require.ErrorIs(t, err, context.Canceled)
	_, running := m.tunnel(m.source)
	require.True(t, running, "the tunnel process must stay")
	m.restart(m.source)
	m.aborted()
	require.Eventually(t, func() bool { return m.tunnels() == 0 }, within, 10*time.Millisecond)
}

// TestMigrationTunnelIsKilled kills the tunnel process of the source while QEMU sends memory over several connections.
// The guest continues at the source.
func TestMigrationTunnelIsKilled(t *testing.T) {
	m := newMove(t)
	m.sendsOverChannels()
	s, running := m.tunnel(m.source)
	require.True(t, running)
	require.NoError(t, unix.Kill(s.PID, unix.SIGKILL))
	m.reports(m.source, cloud.MigrationCancelled)
	m.runsOnly(m.source)
	m.aborted()
	require.Equal(t, 0, m.tunnels())
}

// TestMigrationRollsBack kills the QEMU of the target after the source has handed the guest over, and before the target
// has run it. The source resumes the guest only in the phase ROLLBACK.
func TestMigrationRollsBack(t *testing.T) {
	m := newMove(t)
	m.atSwitchover()
	m.enterAt(m.source, switchover)
	m.reports(m.source, cloud.MigrationHandedOver)
	m.reports(m.target, cloud.MigrationReceived)
	kill(t, m.target.qemu(m.vm.VmId))
	m.reports(m.target, cloud.MigrationFailed)
	m.restart(m.source)
	m.reports(m.source, cloud.MigrationHandedOver)
	require.False(t, m.source.runs(m.vm.VmId))
	m.enterAt(m.source, rollback)
	m.reports(m.source, cloud.MigrationRunning)
	m.aborted()
}

// TestMigrationSourceDies kills the QEMU of the source. Before the switchover, the VM ends. After the target has
// received the complete state, the guest continues there.
func TestMigrationSourceDies(t *testing.T) {
	t.Run("before", func(t *testing.T) {
		m := newMove(t)
		m.atSwitchover()
		kill(t, m.source.qemu(m.vm.VmId))
		m.source.until(cloud.VMID(m.vm.VmId), "cancelled and ended", func(o cloud.Observation) bool {
			return o.Migration != nil && o.Migration.State == cloud.MigrationCancelled && o.Observed == cloud.ObservedEnded
		})
		m.reports(m.target, cloud.MigrationFailed)
		require.False(t, m.target.runs(m.vm.VmId))
	})
	t.Run("after", func(t *testing.T) {
		m := newMove(t)
		m.atSwitchover()
		m.enterAt(m.source, switchover)
		m.reports(m.target, cloud.MigrationReceived)
		kill(t, m.source.qemu(m.vm.VmId))
		m.enterAt(m.target, switchover)
		m.reports(m.target, cloud.MigrationRunning)
		m.source.until(cloud.VMID(m.vm.VmId), "ended", func(o cloud.Observation) bool { return o.Observed == cloud.ObservedEnded })
		m.settled()
	})
}

// TestMigrationWithoutLease ends the lease of the target's host while QEMU waits for the guest. QEMU must end, and the
// migration must fail.
func TestMigrationWithoutLease(t *testing.T) {
	m := newMove(t)
	m.prepared()
	require.True(t, m.target.NeedsGuard())
	leased, err := StoppedWithLease(m.target.dir + "/records")
	require.NoError(t, err)
	require.Equal(t, []cloud.VMID{cloud.VMID(m.vm.VmId)}, leased)
	m.target.SetLeaseEnded(true)
	m.target.loop.ObserveAll()
	require.Eventually(t, func() bool {
		procs, err := m.target.tree.Procs(m.vm.VmId)
		return err == nil && len(procs) == 0
	}, within, 10*time.Millisecond)
	m.target.SetLeaseEnded(false)
	m.target.loop.ObserveAll()
	m.reports(m.target, cloud.MigrationFailed)
	m.aborted()
}

// TestMigrationRefused checks that the target refuses a description whose memory size or firmware is not that of the
// assigned VM.
func TestMigrationRefused(t *testing.T) {
	m := newMove(t)
	m.enterAt(m.source, prepare)
	m.machine = m.reports(m.source, cloud.MigrationPrepared).Machine
	whole := m.machine
	m.machine = []byte(strings.Replace(string(whole), `"memory_mib":64`, `"memory_mib":128`, 1))
	require.NotEqual(t, whole, m.machine)
	m.enterAt(m.target, prepare)
	require.Contains(t, m.reports(m.target, cloud.MigrationFailed).Error, "memory, huge pages, CPU policy")
	m.attempt++
	m.machine = []byte(strings.Replace(string(whole), `"memory_mib":64`, `"memory_mib":64,"uefi":true`, 1))
	m.enterAt(m.target, prepare)
	require.Contains(t, m.reports(m.target, cloud.MigrationFailed).Error, "firmware or the TPM of the VM at the source differs")
	m.aborted()
}

// TestMigrationTargetUnprepared ends the agent of the target after it has launched QEMU and before it has made QEMU wait
// for the guest. The next agent must end QEMU and report the failure.
func TestMigrationTargetUnprepared(t *testing.T) {
	m := newMove(t)
	launched, ended := make(chan struct{}), make(chan struct{})
	identity := m.target.migration.Identity
	m.target.stop()
	m.target.migration.Identity = func() (tunnel.Identity, error) { // called after the launch
		close(launched)
		<-ended
		return tunnel.Identity{}, errors.New("the agent ends")
	}
	m.target.start()
	m.target.SetGuarded(true)
	m.enterAt(m.source, prepare)
	m.machine = m.reports(m.source, cloud.MigrationPrepared).Machine
	m.enterAt(m.target, prepare)
	<-launched
	m.target.qemu(m.vm.VmId)
	time.AfterFunc(100*time.Millisecond, func() { close(ended) })
	m.target.stop()
	m.target.migration.Identity = identity
	m.restart(m.target)
	m.reports(m.target, cloud.MigrationFailed)
	m.aborted()
}
