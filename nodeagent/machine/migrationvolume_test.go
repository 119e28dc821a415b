package machine

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

// movedVolume is a volume that both hosts of a move can use: a file in a shared pool, or an RBD image.
type movedVolume struct {
	cloud.Volume
	directory string // of the shared pool
	helper    string // path of trivet-rbd
	rbd       *agentv1.RbdPool
}

// sharedVolume returns a volume of a shared pool in a directory of its own.
func sharedVolume(t *testing.T) *movedVolume {
	return &movedVolume{directory: t.TempDir(), Volume: cloud.Volume{
		ID: cloud.VolumeID(volumeID(1)), Driver: cloud.DriverManaged, Pool: "shared", PoolID: "p", SizeGiB: 1, Format: cloud.VolumeQCOW2,
	}}
}

// rbdVolume returns a volume of a Ceph cluster.
func rbdVolume(ceph *rbdtest.Ceph, helper string, n int) *movedVolume {
	return &movedVolume{
		helper: helper,
		rbd: &agentv1.RbdPool{
			Fsid: ceph.FSID, Monitors: []string{ceph.Address}, Pool: rbdtest.Pool, User: rbdtest.User, Key: ceph.Key,
		},
		Volume: cloud.Volume{ID: cloud.VolumeID(volumeID(n)), Driver: cloud.DriverRBD, SizeGiB: 1, Format: cloud.VolumeRaw},
	}
}

// attachRoot makes the volume, with the content of the boot sector's image, the root disk of the VM at the source.
func (m *move) attachRoot() {
	root := m.vm.Disks[0]
	m.volume.Image = &cloud.ImageRef{ID: "i", SHA256: root.Image.Sha256, SizeBytes: root.Image.SizeBytes, Format: cloud.FormatRaw}
	require.NoError(m, m.volume.Attach(cloud.VMID(m.vm.VmId), root.Id, m.id(m.source)))
	m.volume.Present = false
}

func (m *move) id(l *lab) cloud.NodeID { return cloud.NodeID(m.names[l]) }

// setHosts sets the host whose guest may write to the volume, and the other host of the migration, or nil.
func (m *move) setHosts(node, other *lab) {
	if m.volume != nil {
		m.volume.SetHosts(m.id(node), m.id(other)) // the ID of no host is ""
	}
}

// desired returns the desired state of the volume on a host, or nil if the host does not have the volume.
func (m *move) desired(l *lab) *agentv1.AssignedVolume {
	if m.volume == nil || m.volume.Node != m.id(l) && m.volume.Other != m.id(l) {
		return nil
	}
	out := convert.AssignedVolume(&m.volume.Volume, m.id(l))
	if out.Rbd = m.volume.rbd; m.volume.Encrypted {
		out.EncryptionKey = []byte(volumeKey)
	}
	return out
}

// assignVolume assigns the volume to a host, or nothing if the host does not have it.
func (m *move) assignVolume(l *lab) {
	if m.volume == nil {
		return
	}
	all := map[cloud.VolumeID]*agentv1.AssignedVolume{}
	if v := m.desired(l); v != nil {
		all[m.volume.ID] = v
	}
	l.storage.Assign(all, false)
}

// withVolume returns the assignment of the VM on a host, with the volume as its root disk.
func (m *move) withVolume(w *agentv1.AssignedVm, l *lab) *agentv1.AssignedVm {
	v := m.desired(l)
	if v == nil {
		return w
	}
	w = proto.CloneOf(w)
	w.Disks = slices.Clone(w.Disks)
	w.Disks[0] = proto.CloneOf(w.Disks[0])
	w.Disks[0].Image, w.Disks[0].Volume = nil, v
	v.Rbd = nil // sent only in the list of volumes
	return w
}

// refuses checks that a host cannot open the volume with an assignment that it had earlier: for the same VM, or for
// another one with a later generation.
func (m *move) refuses(l *lab, stale *agentv1.AssignedVolume) {
	m.Helper()
	forged := proto.CloneOf(stale)
	forged.Generation, forged.Standby, forged.Rbd = m.volume.Generation+100, false, m.volume.rbd
	l.storage.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{m.volume.ID: forged}, false)
	_, err := l.storage.Open(m.Context(), cloud.VMID(stale.VmId), stale.DiskId, forged)
	require.True(m, errors.Is(err, volume.ErrStale) || errors.Is(err, volume.ErrInUse), "a host opens the volume with an old assignment: %v", err)
	m.assignVolume(l)
}

// TestMigrationOfSharedVolume and TestMigrationOfRBDVolume move a guest whose root disk is a volume, and that also has a
// local disk, to another host and back. In each step, the other host cannot open the volume. Afterwards the volume is
// flushed.
func TestMigrationOfSharedVolume(t *testing.T) { moveThereAndBack(t, sharedVolume(t)) }

// TestMigrationOfEncryptedVolume does the same with an encrypted volume of a shared pool, after a migration that was
// rolled back. At each host, the agent is restarted before the guest continues. It must not store the key.
func TestMigrationOfEncryptedVolume(t *testing.T) {
	v := sharedVolume(t)
	v.Encrypted = true
	m := newMoveOf(t, v)
	m.volume.Present = true
	m.atSwitchover()
	m.enterAt(m.source, switchover)
	m.reports(m.source, cloud.MigrationHandedOver)
	m.reports(m.target, cloud.MigrationReceived)
	m.restart(m.source)
	kill(t, m.target.qemu(m.vm.VmId))
	m.reports(m.target, cloud.MigrationFailed)
	m.enterAt(m.source, rollback)
	m.reports(m.source, cloud.MigrationRunning)
	m.aborted()
	m.takenBack()

	m.attempt++
	m.atSwitchover()
	m.enterAt(m.source, switchover)
	m.reports(m.target, cloud.MigrationReceived)
	m.phase = transferIt
	m.restart(m.target)
	m.reports(m.target, cloud.MigrationReceived)
	m.enterAt(m.target, switchover)
	m.reports(m.target, cloud.MigrationRunning)
	m.settled()
	m.target.requireNoKey()
	m.vm = with(m.vm, func(w *agentv1.AssignedVm) { w.Resets++ })
	m.target.assign(m.vm)
	m.target.says(m.vm.VmId, "GUEST UP", 1) // The boot sector is read from the volume.
}

func TestMigrationOfRBDVolume(t *testing.T) {
	moveThereAndBack(t, rbdVolume(rbdtest.Start(t), rbdtest.Program(t), 1))
}

func moveThereAndBack(t *testing.T, v *movedVolume) {
	m := newMoveOf(t, v)
	m.volume.Present = true
	first := m.desired(m.source)
	m.atSwitchover()
	m.refuses(m.target, m.desired(m.target))
	m.enter(switchover)
	m.reports(m.target, cloud.MigrationRunning)
	m.reports(m.source, cloud.MigrationHandedOver)
	m.refuses(m.source, first)
	root := m.root(m.target)
	require.Equal(t, []any{m.volume.AttachmentGeneration, false}, []any{root.Generation, root.Standby},
		"the target runs the guest without its attachment")
	m.settled()
	m.refuses(m.source, first)
	m.vm = with(m.vm, func(w *agentv1.AssignedVm) { w.Resets++ })
	m.target.assign(m.vm)
	m.target.says(m.vm.VmId, "GUEST UP", 1) // The boot sector is read from the volume.

	m.generation = m.vm.Generation
	m.source, m.target, m.attempt = m.target, m.source, 8
	second := m.desired(m.source)
	m.atSwitchover()
	m.enter(switchover)
	m.reports(m.target, cloud.MigrationRunning)
	m.settled()
	m.refuses(m.source, second)
	off := with(m.vm, func(w *agentv1.AssignedVm) { w.Power = agentv1.Power_POWER_OFF })
	m.target.assign(off)
	m.target.sees(off, cloud.ObservedBuilt)
	m.detached(m.target)
}

// detached detaches the volume from the VM, which must be off, and waits until the host has flushed it.
func (m *move) detached(l *lab) {
	m.Helper()
	m.volume.Detach()
	m.assignVolume(l)
	require.Eventually(m, func() bool {
		l.volumeMu.Lock()
		defer l.volumeMu.Unlock()
		o := l.volumes[m.volume.ID]
		return o.FlushedGeneration == m.volume.AttachmentGeneration && o.Error == ""
	}, within, 20*time.Millisecond, "the volume is flushed")
}

// TestMigrationOfVolumesFails ends migrations of guests with a volume in each phase. The guest must continue at the
// source, and write to the volume with the generation that the control plane has given back to the source.
func TestMigrationOfVolumesFails(t *testing.T) {
	ceph, helper := rbdtest.Start(t), rbdtest.Program(t)
	n := 0
	for name, fail := range map[string]func(m *move){
		"the target dies in prepare": func(m *move) { m.prepared(); kill(m.T, m.target.qemu(m.vm.VmId)) },
		"the target dies in transfer": func(m *move) {
			m.atSwitchover()
			kill(m.T, m.target.qemu(m.vm.VmId))
			m.reports(m.source, cloud.MigrationCancelled)
		},
		"it is cancelled": func(m *move) { m.atSwitchover() },
		"the switchover is late": func(m *move) {
			m.atSwitchover()
			m.reports(m.source, cloud.MigrationCancelled)
			m.enter(switchover)
			m.runsOnly(m.source)
			m.reports(m.target, cloud.MigrationFailed)
		},
		"the target dies after the switchover": func(m *move) {
			m.atSwitchover()
			m.enterAt(m.source, switchover)
			m.reports(m.source, cloud.MigrationHandedOver)
			m.reports(m.target, cloud.MigrationReceived)
			m.restart(m.source)
			kill(m.T, m.target.qemu(m.vm.VmId))
			m.reports(m.target, cloud.MigrationFailed)
			m.enterAt(m.source, rollback)
			m.reports(m.source, cloud.MigrationRunning)
		},
	} {
		n++
		for kind, v := range map[string]*movedVolume{"shared pool": sharedVolume(t), "RBD": rbdVolume(ceph, helper, n)} {
			t.Run(name+", "+kind, func(t *testing.T) {
				t.Parallel()
				m := newMoveOf(t, v)
				m.volume.Present = true
				fail(m)
				m.aborted()
				m.takenBack()
				m.attempt++
				m.atSwitchover() // Another migration succeeds.
				m.enter(switchover)
				m.reports(m.target, cloud.MigrationRunning)
				m.settled()
			})
		}
	}
}

// TestMigrationTargetRanGuest loses the target of a migration after it has run the guest, and before the control plane has
// recorded that. The guest may have written to its volume, so that it must not continue at the source. The source ends
// QEMU, and can start the VM again from the volume.
func TestMigrationTargetRanGuest(t *testing.T) {
	m := newMoveOf(t, sharedVolume(t))
	m.targetRanGuest()
}

func TestMigrationTargetRanGuestOfRBDVolume(t *testing.T) {
	m := newMoveOf(t, rbdVolume(rbdtest.Start(t), rbdtest.Program(t), 1))
	m.targetRanGuest()
}

func (m *move) targetRanGuest() {
	m.volume.Present = true
	m.atSwitchover()
	m.enter(switchover)
	m.reports(m.source, cloud.MigrationHandedOver)
	m.reports(m.target, cloud.MigrationRunning)
	m.writes(m.target)
	kill(m.T, m.target.qemu(m.vm.VmId))
	m.target.stop()
	m.enterAt(m.source, rollback)
	o := m.source.until(cloud.VMID(m.vm.VmId), "ended or running", func(o cloud.Observation) bool {
		return o.Observed == cloud.ObservedEnded || o.Migration != nil && o.Migration.State == cloud.MigrationRunning
	})
	require.Equal(m, cloud.ObservedEnded, o.Observed, "the guest continues with the memory of the switchover")
	require.Equal(m, cloud.ExitFailed, o.Exit)
	require.Contains(m, o.LastError, "may have written to disk root")
	require.False(m, m.source.runs(m.vm.VmId))

	m.generation++
	again := with(m.withVolume(m.vm, m.source), func(w *agentv1.AssignedVm) { w.Starts++ })
	again.Generation = m.generation
	m.source.assign(again)
	m.source.sees(again, cloud.ObservedRunning)
	m.source.says(m.vm.VmId, "GUEST UP", 2)
}

// takenBack waits until the guest's process at the source has the volume with the present generation.
func (m *move) takenBack() {
	m.Helper()
	require.Eventually(m, func() bool { return m.root(m.source).Generation == m.volume.AttachmentGeneration }, within,
		20*time.Millisecond, "the source has the volume")
	m.writes(m.source)
}

// root returns the root disk in the record of the VM's process on a host.
func (m *move) root(l *lab) qemu.Disk {
	for _, v := range l.machines() {
		v.mu.Lock()
		p := v.process
		v.mu.Unlock()
		if p != nil && string(v.id) == m.vm.VmId {
			return p.Record().Spec.Disks[0]
		}
	}
	return qemu.Disk{}
}

// TestDiskChangesOfMigration checks that a migration decides about the volumes of both hosts.
func TestDiskChangesOfMigration(t *testing.T) {
	for name, c := range map[string]struct {
		want *agentv1.AssignedVolume
		have qemu.Disk
		do   []diskChange
	}{
		"the source after the switchover":  {&agentv1.AssignedVolume{AttachmentGeneration: 2, Standby: true}, qemu.Disk{Generation: 1}, nil},
		"the target before the switchover": {&agentv1.AssignedVolume{AttachmentGeneration: 2}, qemu.Disk{Generation: 2, Standby: true}, nil},
		"the source after a rollback": {&agentv1.AssignedVolume{AttachmentGeneration: 3, Migrated: true}, qemu.Disk{Generation: 1},
			[]diskChange{{TakeBackDisk, "d"}}},
		"an attachment that was not migrated": {&agentv1.AssignedVolume{AttachmentGeneration: 3}, qemu.Disk{Generation: 1},
			[]diskChange{{UnplugDisk, "d"}}},
	} {
		c.have.ID, c.have.Bus, c.have.Volume, c.want.VolumeId = "d", qemu.Virtio, "v", "v"
		want := &agentv1.AssignedVm{Disks: []*agentv1.AssignedDisk{{Id: "d", Bus: virtio, Volume: c.want}}}
		require.Equal(t, c.do, diskChanges(want, []qemu.AttachedDisk{{Disk: c.have, Present: true}}), name)
	}
}

// TestMigrationOfVolumesRestarts restarts the agents in each phase of a migration of a guest with a volume.
func TestMigrationOfVolumesRestarts(t *testing.T) {
	m := newMoveOf(t, sharedVolume(t))
	m.volume.Present = true
	m.prepared()
	m.restart(m.source)
	m.restart(m.target)
	m.reports(m.target, cloud.MigrationPrepared)
	m.enter(transferIt)
	m.reports(m.source, cloud.MigrationAtSwitchover)
	m.restart(m.target)
	m.enterAt(m.source, switchover)
	m.reports(m.source, cloud.MigrationHandedOver)
	m.reports(m.target, cloud.MigrationReceived)
	m.restart(m.source)
	require.False(t, m.source.runs(m.vm.VmId))
	m.enterAt(m.target, switchover)
	m.reports(m.target, cloud.MigrationRunning)
	m.restart(m.target)
	m.reports(m.target, cloud.MigrationRunning)
	m.settled()
}
