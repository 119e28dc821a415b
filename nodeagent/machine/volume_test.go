package machine

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// volumeStory has the VMs and volumes of TestGuestWritesToVolumes. Its methods are the steps of the test.
type volumeStory struct {
	*lab
	one, two         *agentv1.AssignedVm
	data, slow, fast *agentv1.AssignedVolume
}

// TestGuestWritesToVolumes starts a guest with a volume, attaches two more while it runs, and reads back what the guest
// wrote: after a detachment, in another VM, after a growth, after a restart of the agent, and after QEMU was killed.
func TestGuestWritesToVolumes(t *testing.T) {
	s := &volumeStory{lab: newLab(t)}
	s.one, s.two = s.linux(1), s.linux(2)
	s.data = grant(blankVolume(1), s.one, "data")
	s.one = on(give(s.one, s.data, virtio, noCache))
	s.assign(s.one)
	s.seesDisks(s.one, "data")
	s.boots(s.one, 1)
	s.write(s.one.VmId, "vdb", "first", 0)
	require.Equal(t, volume.Attachment{VM: s.one.VmId, Generation: 1}, s.status(1).Attachment)
	require.Zero(t, s.status(1).Flushed)
	s.attachMore()
	s.grow()
	s.growOwnDisks()
	s.restartAgent()
	s.moveVolume()
	s.killQEMU()
	// Removed VMs leave their volumes behind, flushed.
	s.one, s.two = destroyed(s.one), destroyed(s.two)
	s.assign(s.one, s.two)
	s.sees(s.one, cloud.ObservedAbsent)
	s.sees(s.two, cloud.ObservedAbsent)
	for n, generation := range map[int]uint64{1: 2, 2: 1, 3: 1} {
		require.Equal(t, generation, s.status(n).Flushed)
	}
}

// attachMore attaches two volumes to the running guest, of which one has limits. A disk of the bus IDE is refused.
func (s *volumeStory) attachMore() {
	s.fast, s.slow = grant(blankVolume(2), s.one, "fast"), grant(blankVolume(3), s.one, "slow")
	s.slow.MaxIops, s.slow.MaxBytesPerSecond = 500, 16*mib
	s.one = give(give(s.one, s.fast, scsi, writeback), s.slow, virtio, writeback)
	s.assign(s.one)
	s.seesDisks(s.one, "data", "fast", "slow")
	s.seesSize(s.one, "sda", 64*mib)
	s.seesSize(s.one, "vdc", 64*mib)
	s.write(s.one.VmId, "sda", "fast", 0)
	s.write(s.one.VmId, "vdc", "slow", mib)
	old := grant(blankVolume(4), s.one, "old")
	refused := give(s.one, old, vmv1.DiskBus_DISK_BUS_IDE, writeback)
	s.assign(refused)
	s.until(cloud.VMID(s.one.VmId), "refused", func(o cloud.Observation) bool {
		return len(o.Disks) == 4 && strings.Contains(o.Disks[2].Error, "only while the VM is stopped")
	})
	require.Equal(s, uint64(1), s.status(4).Flushed, "a volume that was not attached is released")
	s.one.Generation = refused.Generation + 1
	s.assign(s.one)
	s.seesDisks(s.one, "data", "fast", "slow")
}

// grow grows a volume of the running guest, which sees the new size at once.
func (s *volumeStory) grow() {
	s.slow = proto.CloneOf(s.slow)
	s.slow.Generation, s.slow.SizeBytes = s.slow.Generation+1, 96*mib
	s.storage.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{cloud.VolumeID(s.slow.VolumeId): s.slow}, false)
	s.one = with(s.one, func(w *agentv1.AssignedVm) {
		w.Disks = slices.Clone(w.Disks)
		w.Disks[3] = proto.CloneOf(w.Disks[3])
		w.Disks[3].Volume = s.slow
	})
	s.assign(s.one)
	s.seesSize(s.one, "vdc", 96*mib)
	s.write(s.one.VmId, "vdc", "grown", 80*mib)
}

// growOwnDisks grows disks that are not volumes: one of the running guest, at once, and one of a VM that is off, which
// grows at its next start, in moveVolume.
func (s *volumeStory) growOwnDisks() {
	s.assign(s.one, s.two)
	s.sees(s.two, cloud.ObservedBuilt)
	s.one, s.two = withRootDisk(s.one, 3<<30), withRootDisk(s.two, 4<<30)
	s.assign(s.one, s.two)
	s.seesSize(s.one, "vda", 3<<30)
}

// withRootDisk returns a copy of an assignment whose first disk has another size.
func withRootDisk(want *agentv1.AssignedVm, size uint64) *agentv1.AssignedVm {
	return with(want, func(w *agentv1.AssignedVm) {
		w.Disks = slices.Clone(w.Disks)
		w.Disks[0] = proto.CloneOf(w.Disks[0])
		w.Disks[0].SizeBytes = size
	})
}

// restartAgent restarts the agent, and checks that the new agent finds the volumes and changes nothing.
func (s *volumeStory) restartAgent() {
	before := s.changes()
	s.stop()
	s.start()
	s.assign(s.one)
	s.seesDisks(s.one, "data", "fast", "slow")
	require.Equal(s, before, s.changes(), "the agent writes nothing when it adopts volumes")
	s.reads(s.one.VmId, "vdb", "first", 0)
}

// moveVolume moves a volume from one running guest to another. A forged assignment with the older attachment generation
// must not open the volume.
func (s *volumeStory) moveVolume() {
	s.one = take(s.one, "data")
	s.assign(s.one)
	s.seesDisks(s.one, "fast", "slow")
	require.Equal(s, uint64(1), s.status(1).Flushed)
	stale := s.data
	s.data = grant(revoke(s.data), s.two, "data")
	s.two = on(s.two)
	s.assign(s.one, s.two)
	s.sees(s.two, cloud.ObservedRunning)
	s.boots(s.two, 1)
	s.two = give(s.two, s.data, virtio, noCache)
	s.assign(s.one, s.two)
	s.seesDisks(s.two, "data")
	s.seesSize(s.two, "vdb", 64*mib)
	s.seesSize(s.two, "vda", 4<<30)
	s.reads(s.two.VmId, "vdb", "first", 0)
	s.write(s.two.VmId, "vdb", "second", 0)

	forged := give(s.one, stale, virtio, noCache)
	s.assign(forged, s.two)
	s.until(cloud.VMID(s.one.VmId), "refused", func(o cloud.Observation) bool {
		return strings.Contains(o.LastError, volume.ErrStale.Error())
	})
	s.one = take(forged, "data")
	s.assign(s.one, s.two)
	s.seesDisks(s.one, "fast", "slow")
}

// killQEMU kills a QEMU process with a volume. When the VM starts again, the guest must read everything that it had
// flushed.
func (s *volumeStory) killQEMU() {
	o := s.sees(s.two, cloud.ObservedRunning)
	require.NoError(s, syscall.Kill(int(o.PID), syscall.SIGKILL))
	s.sees(s.two, cloud.ObservedEnded)
	require.Equal(s, uint64(2), s.status(1).Flushed)
	s.two = with(s.two, func(w *agentv1.AssignedVm) { w.Starts++ })
	s.assign(s.one, s.two)
	s.seesDisks(s.two, "data")
	s.boots(s.two, 2)
	s.reads(s.two.VmId, "vdb", "second", 0)
}

// TestFullPoolHoldsGuest fills the file system of a pool while a guest writes. QEMU must pause the guest, and the agent
// must report the reason. When the file system has room again, the guest must continue without a request and without
// lost data.
func TestFullPoolHoldsGuest(t *testing.T) {
	l := newLab(t)
	l.stop()
	require.NoError(t, os.Remove(filepath.Join(l.dir, "local.json"))) // the id of the pool that the mount hides
	require.NoError(t, unix.Mount("trivet-test-machine", l.pool, "tmpfs", 0, "size=8m,mode=700"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(l.pool, unix.MNT_DETACH)) })
	l.start()
	want := l.linux(1)
	want = on(give(want, grant(blankVolume(1), want, "data"), virtio, noCache))
	l.assign(want)
	l.seesDisks(want, "data")
	l.boots(want, 1)
	filler := filepath.Join(l.pool, "filler")
	require.NoError(t, os.WriteFile(filler, make([]byte, 7*mib), 0o600))

	l.command(want.VmId, fmt.Sprintf("write vdb full 0 %d", 4*mib), func() {
		o := l.until(cloud.VMID(want.VmId), "held", func(o cloud.Observation) bool { return o.LastError != "" })
		require.Equal(t, cloud.ObservedRunning, o.Observed)
		require.Equal(t, "disk data: write error: No space left on device; the guest is stopped", o.LastError)
		require.NoError(t, os.Remove(filler))
		require.Eventually(t, func() bool { // the timeout is longer than resumeAfter
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.seen[cloud.VMID(want.VmId)].LastError == ""
		}, 2*within, 10*time.Millisecond, "the guest goes on")
		l.says(want.VmId, fmt.Sprintf("WROTE dev=vdb off=0 len=%d seed=full", 4*mib), 1)
	})
	l.reads(want.VmId, "vdb", "full", mib)
}

// TestBootFromVolume boots a VM from a volume that is made from an image, and grows the volume while the VM is off.
// QEMU must have the new size before the guest runs. The start must wait while another QEMU has the volume open, and
// while the host does not have the volume's pool.
func TestBootFromVolume(t *testing.T) {
	l := newLab(t)
	want := l.vm(1)
	root := grant(blankVolume(1), want, "root")
	root.Image = want.Disks[0].Image
	want.Disks = nil
	want = give(want, root, virtio, writeback)
	want = on(want)
	l.assign(want)
	l.seesDisks(want, "root")
	l.says(want.VmId, "GUEST UP", 1)
	require.NotNil(t, l.status(1).Image)
	used, err := l.storage.UsedImages()
	require.NoError(t, err)
	require.True(t, used[l.sum()], "the image of a volume is in use")
	want = off(want, 0)
	l.assign(want)
	o := l.sees(want, cloud.ObservedBuilt)
	require.Empty(t, o.Disks)
	require.Equal(t, uint64(1), l.status(1).Flushed)

	files, err := l.storage.Open(t.Context(), cloud.VMID(want.VmId), "root", root)
	require.NoError(t, err)
	root = proto.CloneOf(root)
	root.Generation, root.SizeBytes = root.Generation+1, 128*mib
	want = on(want)
	want.Disks = []*agentv1.AssignedDisk{proto.CloneOf(want.Disks[0])}
	want.Disks[0].Volume = root
	l.assign(want)
	l.until(cloud.VMID(want.VmId), "delayed", func(o cloud.Observation) bool { return strings.Contains(o.LastError, volume.ErrInUse.Error()) })
	files.Close()
	l.seesDisks(want, "root")
	l.says(want.VmId, "GUEST UP", 2)
	l.MachineSet.mu.Lock()
	v := l.MachineSet.open[cloud.VMID(want.VmId)]
	l.MachineSet.mu.Unlock()
	v.mu.Lock()
	p := v.process
	v.mu.Unlock()
	disks, err := p.Disks(t.Context())
	require.NoError(t, err)
	require.Equal(t, uint64(128*mib), disks[0].Size)

	want = off(want, 0)
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)
	root = proto.CloneOf(root)
	root.Generation, root.Pool = root.Generation+1, "other"
	want = on(want)
	want.Disks = []*agentv1.AssignedDisk{{Id: "root", Bus: virtio, Cache: writeback, Volume: root}}
	l.assign(want)
	l.until(cloud.VMID(want.VmId), "delayed", func(o cloud.Observation) bool {
		return strings.Contains(o.LastError, `this host has no storage pool "other"`)
	})
	want = destroyed(want)
	l.assign(want)
	l.sees(want, cloud.ObservedAbsent)
	require.Empty(t, l.status(1).Error, "the volume stays")
}
