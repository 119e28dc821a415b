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

// grant returns the desired state that the control plane sends after it has attached the volume to a VM as the disk id.
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

// take returns a copy of the assignment want without the disk with this id.
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

// boots waits until the guest has booted as many times as the parameter times says. On a busy host a boot takes a
// minute.
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
	go func() { defer close(done); _, _ = io.Copy(io.Discard, c) }() // the client must read the guest's output
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

// reads checks that the guest reads a pattern that was written to the disk. The guest must not have read this pattern
// before in the test. The command is repeated, because the guest may not have an attached disk yet.
func (l *lab) reads(id, device, seed string, offset int) {
	l.Helper()
	answer := fmt.Sprintf("SUM dev=%s off=%d len=%d sha256=%s", device, offset, mib, sumOf(seed, offset))
	require.Eventually(l, func() (found bool) {
		l.command(id, fmt.Sprintf("sum %s %d", device, offset), func() {
			for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && !found; time.Sleep(20 * time.Millisecond) {
				var out bytes.Buffer
				found = l.Console(l.Context(), cloud.VMID(id), 0, false, &out) == nil && bytes.Contains(out.Bytes(), []byte(answer))
			}
		})
		return found
	}, within, 100*time.Millisecond, "the guest says %q", answer)
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
