package machine

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/images/guest"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const mib = 1 << 20

func volumeID(n int) string { return fmt.Sprintf("00000000-0000-4000-9000-%012d", n) }

// blankVolume returns the desired state of a detached volume of 64 MiB.
func blankVolume(n int) *agentv1.AssignedVolume {
	return &agentv1.AssignedVolume{VolumeId: volumeID(n), Generation: 1, Pool: "local", SizeBytes: 64 * mib}
}

// grant returns a copy of a volume that is attached to a VM as the disk id, as the control plane attaches it.
func grant(v *agentv1.AssignedVolume, vm *agentv1.AssignedVm, id string) *agentv1.AssignedVolume {
	v = proto.CloneOf(v)
	v.Generation++
	v.AttachmentGeneration++
	v.VmId, v.DiskId = vm.GetVmId(), id
	return v
}

func revoke(v *agentv1.AssignedVolume) *agentv1.AssignedVolume {
	v = proto.CloneOf(v)
	v.Generation++
	v.VmId, v.DiskId = "", ""
	return v
}

// give returns a copy of the assignment want with a further disk, the volume v.
func give(want *agentv1.AssignedVm, v *agentv1.AssignedVolume, bus vmv1.DiskBus, cache vmv1.DiskCache) *agentv1.AssignedVm {
	return with(want, func(w *agentv1.AssignedVm) {
		w.Disks = append(slices.Clone(w.Disks), &agentv1.AssignedDisk{Id: v.GetDiskId(), Bus: bus, Cache: cache, Volume: v})
	})
}

// take returns a copy of the assignment want without the disk id.
func take(want *agentv1.AssignedVm, id string) *agentv1.AssignedVm {
	return with(want, func(w *agentv1.AssignedVm) {
		w.Disks = slices.DeleteFunc(slices.Clone(w.Disks), func(d *agentv1.AssignedDisk) bool { return d.GetId() == id })
	})
}

const (
	virtio    = vmv1.DiskBus_DISK_BUS_VIRTIO
	scsi      = vmv1.DiskBus_DISK_BUS_SCSI
	noCache   = vmv1.DiskCache_DISK_CACHE_NONE
	writeback = vmv1.DiskCache_DISK_CACHE_WRITEBACK
)

// seesDisks waits until the VM is reported running with these volumes attached, in the order of their ids.
func (l *lab) seesDisks(want *agentv1.AssignedVm, ids ...string) {
	l.Helper()
	l.until(cloud.VMID(want.GetVmId()), fmt.Sprintf("running with the volumes %v", ids), func(o cloud.Observation) bool {
		var have []string
		for _, d := range o.Disks {
			if !d.Attached || d.Error != "" {
				return false
			}
			have = append(have, d.ID)
		}
		return o.Observed == cloud.ObservedRunning && o.Generation == want.GetGeneration() && slices.Equal(have, ids)
	})
}

// boots waits until the guest has booted as often as the parameter times. On a busy host a boot takes a minute.
func (l *lab) boots(want *agentv1.AssignedVm, times int) {
	l.Helper()
	require.Eventually(l, func() bool {
		var out bytes.Buffer
		return l.Console(l.Context(), cloud.VMID(want.GetVmId()), 0, false, &out) == nil &&
			bytes.Count(out.Bytes(), []byte("TRIVET GUEST READY")) >= times
	}, 3*within, 20*time.Millisecond, "the guest boots")
}

// command sends a command to the guest's serial port, and calls wait before it closes the port. The port serves one
// client at a time.
func (l *lab) command(id, command string, wait func()) {
	l.Helper()
	c := dialConsole(l.T, filepath.Join(l.dir, "vms", id))
	done := make(chan struct{})
	go func() { defer close(done); _, _ = io.Copy(io.Discard, c) }() // a client must read
	defer func() { _ = c.Close(); <-done }()
	_, err := io.WriteString(c, command+"\n")
	require.NoError(l, err)
	wait()
}

// write makes the guest write a pattern of 1 MiB to a disk, durably.
func (l *lab) write(id, device, seed string, offset int) {
	l.Helper()
	l.command(id, fmt.Sprintf("write %s %s %d", device, seed, offset), func() {
		l.Helper()
		l.says(id, fmt.Sprintf("WROTE dev=%s off=%d len=%d seed=%s sha256=%s", device, offset, mib, seed, sumOf(seed, offset)), 1)
	})
}

// reads checks that the guest reads a pattern that was written to the disk. The guest must not have read the same before.
func (l *lab) reads(id, device, seed string, offset int) {
	l.Helper()
	l.command(id, fmt.Sprintf("sum %s %d", device, offset), func() {
		l.Helper()
		l.says(id, fmt.Sprintf("SUM dev=%s off=%d len=%d sha256=%s", device, offset, mib, sumOf(seed, offset)), 1)
	})
}

// seesSize waits until the guest has a disk of this size in bytes.
func (l *lab) seesSize(want *agentv1.AssignedVm, device string, size int) {
	l.Helper()
	require.Eventually(l, func() bool { return l.sectors(want, device)*512 == size }, within, 100*time.Millisecond,
		"disk %s of %d bytes", device, size)
}

// sectors returns the size of a disk as the guest sees it, or 0 if the guest does not answer in time.
func (l *lab) sectors(want *agentv1.AssignedVm, device string) (n int) {
	l.Helper()
	line := regexp.MustCompile(`DISKS disks=\S*` + device + `:(\d+)`)
	l.command(want.GetVmId(), "disks", func() {
		for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && n == 0; time.Sleep(20 * time.Millisecond) {
			var out bytes.Buffer
			_ = l.Console(l.Context(), cloud.VMID(want.GetVmId()), 0, false, &out)
			for _, found := range line.FindAllStringSubmatch(out.String(), -1) {
				n, _ = strconv.Atoi(found[1]) // the last answer
			}
		}
	})
	return n
}

func sumOf(seed string, offset int) string {
	buf := make([]byte, mib)
	guest.Pattern(buf, seed, int64(offset))
	return fmt.Sprintf("%x", sha256.Sum256(buf))
}

// status returns the state of a volume in the host's pool.
func (l *lab) status(n int) volume.Status {
	l.Helper()
	s, err := l.storage.Pools()[0].Status(volumeID(n))
	require.NoError(l, err)
	return s
}

// TestGuestWritesToVolumes starts a guest with a volume, attaches two more while it runs, and reads what it wrote after a
// detachment, at another VM, after a growth, under the next agent, and after QEMU was killed.
func TestGuestWritesToVolumes(t *testing.T) {
	l := newLab(t)
	one, two := l.linux(1), l.linux(2)
	data := grant(blankVolume(1), one, "data")
	one = on(give(one, data, virtio, noCache))
	l.assign(one)
	l.seesDisks(one, "data")
	l.boots(one, 1)
	l.write(one.VmId, "vdb", "first", 0)
	require.Equal(t, volume.Attachment{VM: one.VmId, Generation: 1}, l.status(1).Attachment)
	require.Zero(t, l.status(1).Flushed)

	// Two more volumes, of which one has limits. One disk of the bus IDE is refused.
	fast, slow := grant(blankVolume(2), one, "fast"), grant(blankVolume(3), one, "slow")
	slow.MaxIops, slow.MaxBytesPerSecond = 500, 16*mib
	one = give(give(one, fast, scsi, writeback), slow, virtio, writeback)
	l.assign(one)
	l.seesDisks(one, "data", "fast", "slow")
	l.seesSize(one, "sda", 64*mib)
	l.seesSize(one, "vdc", 64*mib)
	l.write(one.VmId, "sda", "fast", 0)
	l.write(one.VmId, "vdc", "slow", mib)
	old := grant(blankVolume(4), one, "old")
	refused := give(one, old, vmv1.DiskBus_DISK_BUS_IDE, writeback)
	l.assign(refused)
	l.until(cloud.VMID(one.VmId), "refused", func(o cloud.Observation) bool {
		return len(o.Disks) == 4 && strings.Contains(o.Disks[2].Error, "only while the VM is stopped")
	})
	require.Equal(t, uint64(1), l.status(4).Flushed, "a volume that was not attached is released")
	one.Generation = refused.Generation + 1
	l.assign(one)
	l.seesDisks(one, "data", "fast", "slow")

	// The guest sees the new size of a volume at once.
	slow = proto.CloneOf(slow)
	slow.Generation, slow.SizeBytes = slow.Generation+1, 96*mib
	l.storage.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{cloud.VolumeID(slow.VolumeId): slow}, false)
	one = with(one, func(w *agentv1.AssignedVm) {
		w.Disks = slices.Clone(w.Disks)
		w.Disks[3] = proto.CloneOf(w.Disks[3])
		w.Disks[3].Volume = slow
	})
	l.assign(one)
	l.seesSize(one, "vdc", 96*mib)
	l.write(one.VmId, "vdc", "grown", 80*mib)

	// The next agent finds the volumes and changes nothing.
	before := l.changes()
	l.stop()
	l.start()
	l.assign(one)
	l.seesDisks(one, "data", "fast", "slow")
	require.Equal(t, before, l.changes(), "the agent writes nothing when it adopts volumes")
	l.reads(one.VmId, "vdb", "first", 0)

	// The volume moves to another running guest.
	one = take(one, "data")
	l.assign(one)
	l.seesDisks(one, "fast", "slow")
	require.Equal(t, uint64(1), l.status(1).Flushed)
	stale := data
	data = grant(revoke(data), two, "data")
	two = on(two)
	l.assign(one, two)
	l.sees(two, cloud.ObservedRunning)
	l.boots(two, 1)
	two = give(two, data, virtio, noCache)
	l.assign(one, two)
	l.seesDisks(two, "data")
	l.seesSize(two, "vdb", 64*mib)
	l.reads(two.VmId, "vdb", "first", 0)
	l.write(two.VmId, "vdb", "second", 0)

	// A forged assignment of the older attachment does not get the volume, neither while it is attached nor later.
	forged := give(one, stale, virtio, noCache)
	l.assign(forged, two)
	refusal := func(o cloud.Observation) bool { return strings.Contains(o.LastError, volume.ErrStale.Error()) }
	l.until(cloud.VMID(one.VmId), "refused", refusal)
	one = take(forged, "data")
	l.assign(one, two)
	l.seesDisks(one, "fast", "slow")

	// QEMU is killed: what the guest had flushed is there when it starts again.
	o := l.sees(two, cloud.ObservedRunning)
	require.NoError(t, syscall.Kill(int(o.PID), syscall.SIGKILL))
	l.sees(two, cloud.ObservedEnded)
	require.Equal(t, uint64(2), l.status(1).Flushed)
	two = with(two, func(w *agentv1.AssignedVm) { w.Starts++ })
	l.assign(one, two)
	l.seesDisks(two, "data")
	l.boots(two, 2)
	l.reads(two.VmId, "vdb", "second", 0)

	// Removed VMs leave their volumes behind, flushed.
	one, two = destroyed(one), destroyed(two)
	l.assign(one, two)
	l.sees(one, cloud.ObservedAbsent)
	l.sees(two, cloud.ObservedAbsent)
	for n, generation := range map[int]uint64{1: 2, 2: 1, 3: 1} {
		require.Equal(t, generation, l.status(n).Flushed)
	}
}

// changes returns the names of all files in the pool with the times of their last change.
func (l *lab) changes() map[string]int64 {
	l.Helper()
	entries, err := os.ReadDir(l.pool)
	require.NoError(l, err)
	out := map[string]int64{}
	for _, e := range entries {
		var st unix.Stat_t
		if strings.HasSuffix(e.Name(), ".json") {
			require.NoError(l, unix.Lstat(filepath.Join(l.pool, e.Name()), &st))
			out[e.Name()] = st.Ctim.Nano()
		}
	}
	return out
}

// TestFullPoolHoldsGuest fills the file system of a pool while a guest writes. The guest is held and the reason is
// reported. The guest goes on without a request when there is room again, and has lost nothing.
func TestFullPoolHoldsGuest(t *testing.T) {
	l := newLab(t)
	l.stop()
	require.NoError(t, os.Remove(filepath.Join(l.dir, "local.json"))) // of the directory beneath the mount
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
		require.Eventually(t, func() bool { // longer than resumeAfter
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.seen[cloud.VMID(want.VmId)].LastError == ""
		}, 2*within, 10*time.Millisecond, "the guest goes on")
		l.says(want.VmId, fmt.Sprintf("WROTE dev=vdb off=0 len=%d seed=full", 4*mib), 1)
	})
	l.reads(want.VmId, "vdb", "full", mib)
}

// TestBootFromVolume boots a VM from a volume that is made from an image, and grows the volume while the VM is off. QEMU
// has the new size before the guest runs. A volume that another QEMU has open delays the start, and one whose pool is
// unknown too.
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
