package machine

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// rounds returns how often TestRoundsLeaveNothing attaches a volume: TRIVET_VOLUME_ROUNDS, or 20.
func rounds(t *testing.T) int {
	text := os.Getenv("TRIVET_VOLUME_ROUNDS")
	if text == "" {
		return 20
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err)
	return n
}

// rest lists the resources of a host that volumes can leave behind.
type rest struct {
	Files                         []string // in the pool
	AgentFDs, QEMUFDs, Disks, VMs int
}

func (l *lab) rest(pid uint32, vm cloud.VMID) (r rest) {
	l.Helper()
	entries, err := os.ReadDir(l.pool)
	require.NoError(l, err)
	for _, e := range entries {
		r.Files = append(r.Files, e.Name())
	}
	count := func(dir string) int {
		fds, err := os.ReadDir(dir)
		require.NoError(l, err)
		return len(fds)
	}
	r.AgentFDs, r.QEMUFDs = count("/proc/self/fd"), count(filepath.Join("/proc", strconv.Itoa(int(pid)), "fd"))
	groups, err := l.tree.List()
	require.NoError(l, err)
	r.VMs = len(groups)
	l.MachineSet.mu.Lock()
	v := l.MachineSet.open[vm]
	l.MachineSet.mu.Unlock()
	v.mu.Lock()
	p := v.process
	v.mu.Unlock()
	disks, err := p.Disks(l.Context())
	require.NoError(l, err)
	r.Disks = len(disks)
	return r
}

// TestManyAttachments attaches 20 volumes to two running guests at once, and then detaches all of them at once. The
// guests must be able to use the volumes. After the detachment, QEMU must not have more descriptors and
// disks than before.
func TestManyAttachments(t *testing.T) {
	const each = 10
	l := newLab(t)
	vms := []*agentv1.AssignedVm{on(l.linux(1)), on(l.linux(2))}
	l.assign(vms...)
	var before []rest
	for _, want := range vms {
		l.boots(want, 1)
		before = append(before, l.rest(l.sees(want, cloud.ObservedRunning).PID, cloud.VMID(want.VmId)))
	}
	all := map[cloud.VolumeID]*agentv1.AssignedVolume{}
	var ids []string
	for n := range each {
		ids = append(ids, "data"+strconv.Itoa(n))
	}
	for i := range vms {
		for n, id := range ids {
			bus := scsi
			if n%5 == 0 {
				bus = virtio
			}
			v := grant(blankVolume(i*each+n), vms[i], id)
			all[cloud.VolumeID(v.VolumeId)] = v
			vms[i] = give(vms[i], v, bus, noCache)
		}
	}
	l.storage.Assign(all, false)
	l.assign(vms...)
	for i, want := range vms {
		l.seesDisks(want, ids...)
		for _, device := range []string{"vdb", "vdc", "sda", "sdh"} {
			l.write(want.VmId, device, "many"+device+strconv.Itoa(i), 0)
		}
	}
	for i := range vms {
		for _, id := range ids {
			vms[i] = take(vms[i], id)
		}
	}
	l.assign(vms...)
	for _, want := range vms {
		l.seesDisks(want)
	}
	for n := range len(vms) * each {
		require.Equal(t, uint64(1), l.status(n).Flushed)
	}
	for i, want := range vms {
		pid := l.sees(want, cloud.ObservedRunning).PID
		require.Eventually(t, func() bool {
			after := l.rest(pid, cloud.VMID(want.VmId))
			return after.QEMUFDs <= before[i].QEMUFDs && after.Disks == before[i].Disks
		}, within, 5*time.Millisecond, "before %+v", before[i])
	}
}

// TestRoundsLeaveNothing repeatedly makes a volume, attaches it to a running guest, detaches it and deletes it.
// Afterwards the host must have no more files, descriptors, disks and control groups than before. Package qemu tests
// that no block node remains.
func TestRoundsLeaveNothing(t *testing.T) {
	l := newLab(t)
	want := on(l.linux(1))
	l.assign(want)
	l.seesDisks(want)
	l.boots(want, 1)
	pid := l.sees(want, cloud.ObservedRunning).PID
	assign := func(v *agentv1.AssignedVolume) {
		l.storage.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{cloud.VolumeID(v.VolumeId): v}, false)
	}
	var before rest
	for n := range rounds(t) + 1 {
		bus := virtio
		if n%2 == 1 {
			bus = scsi
		}
		v := grant(blankVolume(n), want, "data")
		v.MaxIops = uint64(n % 3 * 1000)
		assign(v)
		want = give(want, v, bus, noCache)
		l.assign(want)
		l.seesDisks(want, "data")
		want = take(want, "data")
		l.assign(want)
		l.seesDisks(want)
		gone := proto.CloneOf(revoke(v))
		gone.Deleted = true
		assign(gone)
		require.Eventually(t, func() bool {
			_, err := os.Lstat(filepath.Join(l.pool, volumeID(n)+".json"))
			return os.IsNotExist(err)
		}, within, 5*time.Millisecond, "the volume is deleted")
		if n == 0 { // the first round opens connections and other descriptors that stay open
			before = l.rest(pid, cloud.VMID(want.VmId))
		}
	}
	var after rest
	require.Eventually(t, func() bool {
		after = l.rest(pid, cloud.VMID(want.VmId))
		return after.AgentFDs <= before.AgentFDs && after.QEMUFDs <= before.QEMUFDs
	}, within, 5*time.Millisecond, "before %+v", before)
	require.Equal(t, before.Files, after.Files)
	require.Equal(t, []int{before.Disks, before.VMs}, []int{after.Disks, after.VMs})
}
