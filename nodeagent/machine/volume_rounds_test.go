package machine

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// rounds returns how often a test attaches a volume: the number in the environment variable TRIVET_VOLUME_ROUNDS, or
// the parameter otherwise if the variable is not set.
func rounds(t *testing.T, otherwise int) int {
	text := os.Getenv("TRIVET_VOLUME_ROUNDS")
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err)
	return n
}

// rest lists the resources of a host that volumes can leave behind.
type rest struct {
	Files []string // in the pool of the host; for RBD the objects of the Ceph pool and the blocked clients
	// AgentFDs, QEMUFDs and HelperFDs are numbers of open file descriptors. QEMUThreads is the number of QEMU's
	// threads, and Helpers the number of trivet-rbd processes.
	AgentFDs, QEMUFDs, QEMUThreads, Helpers, HelperFDs, Disks, VMs int
}

// within reports whether r has the same files, disks and VMs as before, and at most as many descriptors, threads and
// processes.
func (r rest) within(before rest) bool {
	return r.AgentFDs <= before.AgentFDs && r.QEMUFDs <= before.QEMUFDs && r.QEMUThreads <= before.QEMUThreads &&
		r.Helpers <= before.Helpers && r.HelperFDs <= before.HelperFDs && r.Disks == before.Disks && r.VMs == before.VMs &&
		slices.Equal(r.Files, before.Files)
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
	proc := filepath.Join("/proc", strconv.Itoa(int(pid)))
	r.AgentFDs, r.QEMUFDs, r.QEMUThreads = count("/proc/self/fd"), count(filepath.Join(proc, "fd")), count(filepath.Join(proc, "task"))
	for _, helper := range rbdtest.Helpers(l, os.Getpid()) {
		fds, _ := os.ReadDir(filepath.Join("/proc", strconv.Itoa(helper), "fd")) // the process may have ended
		r.Helpers, r.HelperFDs = r.Helpers+1, r.HelperFDs+len(fds)
	}
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
// first guest gets 15, which are all that a VM can have besides its root disk. The guests must be able to use the
// volumes. After the detachment, QEMU must not have more descriptors and disks than before.
func TestManyAttachments(t *testing.T) {
	counts := []int{15, 5}
	devices := [][]string{{"vdb", "vdd", "sda", "sdl"}, {"vdb", "sda", "sdd"}}
	l := newLab(t)
	vms := []*agentv1.AssignedVm{on(l.linux(1)), on(l.linux(2))}
	l.assign(vms...)
	var before []rest
	for _, want := range vms {
		l.boots(want, 1)
		before = append(before, l.rest(l.sees(want, cloud.ObservedRunning).PID, cloud.VMID(want.VmId)))
	}
	all := map[cloud.VolumeID]*agentv1.AssignedVolume{}
	ids := make([][]string, len(vms))
	for i := range vms {
		for n := range counts[i] {
			id := fmt.Sprintf("data%02d", n)
			ids[i] = append(ids[i], id)
			bus := scsi
			if n%5 == 0 {
				bus = virtio
			}
			v := grant(blankVolume(i*counts[0]+n), vms[i], id)
			all[cloud.VolumeID(v.VolumeId)] = v
			vms[i] = give(vms[i], v, bus, noCache)
		}
	}
	l.storage.Assign(all, false)
	l.assign(vms...)
	for i, want := range vms {
		l.seesDisks(want, ids[i]...)
		for _, device := range devices[i] {
			l.write(want.VmId, device, "many"+device+strconv.Itoa(i), 0)
		}
	}
	for i := range vms {
		for _, id := range ids[i] {
			vms[i] = take(vms[i], id)
		}
	}
	l.assign(vms...)
	for _, want := range vms {
		l.seesDisks(want)
	}
	for n := range counts[0] + counts[1] {
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

// volumeRounds repeatedly makes a volume, attaches it to a running guest, detaches it and deletes it.
type volumeRounds struct {
	*lab
	want   *agentv1.AssignedVm // the guest
	disks  []string            // the ids of the other volumes of the guest, in alphabetical order
	volume func(n int) *agentv1.AssignedVolume
	give   func(*agentv1.AssignedVm, *agentv1.AssignedVolume, vmv1.DiskBus, vmv1.DiskCache) *agentv1.AssignedVm
	assign func(*agentv1.AssignedVolume) // sets the desired state of the volume of the round
	rest   func() rest
}

// run makes count+1 rounds. After the first one, the host must have no more files, descriptors, threads, processes,
// disks and control groups. Package qemu tests that no block node remains.
func (r *volumeRounds) run(count int) {
	r.Helper()
	var before rest
	began := time.Now()
	for n := range count + 1 {
		if n == 1 { // the first round opens connections and other descriptors that stay open
			before, began = r.rest(), time.Now()
		}
		r.round(n)
	}
	took := time.Since(began)
	var after rest
	require.Eventually(r, func() bool {
		after = r.rest()
		return after.within(before)
	}, within, 50*time.Millisecond, "before %+v, after %+v", before, &after)
	before.Files, after.Files = nil, nil
	r.Logf("%d rounds took %s: before %+v, after %+v", count, took.Round(time.Millisecond), before, after)
}

func (r *volumeRounds) round(n int) {
	r.Helper()
	bus := virtio
	if n%2 == 1 {
		bus = scsi
	}
	v := grant(r.volume(n), r.want, "round")
	v.MaxIops = uint64(n % 3 * 1000)
	r.assign(v)
	r.want = r.give(r.want, v, bus, noCache)
	r.lab.assign(r.want)
	r.seesDisks(r.want, append(slices.Clone(r.disks), "round")...)
	r.want = take(r.want, "round")
	r.lab.assign(r.want)
	r.seesDisks(r.want, r.disks...)
	gone := proto.CloneOf(revoke(v))
	gone.Deleted = true
	r.assign(gone)
	require.Eventually(r, func() bool {
		r.volumeMu.Lock()
		defer r.volumeMu.Unlock()
		o := r.volumes[cloud.VolumeID(gone.VolumeId)]
		return o.Generation == gone.Generation && !o.Present && o.Error == ""
	}, within, 5*time.Millisecond, "the volume is deleted")
}

// TestRoundsLeaveNothing makes rounds with volumes in a storage pool of the host.
func TestRoundsLeaveNothing(t *testing.T) {
	l := newLab(t)
	want := on(l.linux(1))
	l.assign(want)
	l.seesDisks(want)
	l.boots(want, 1)
	pid := l.sees(want, cloud.ObservedRunning).PID
	r := &volumeRounds{lab: l, want: want, volume: blankVolume, give: give,
		assign: func(v *agentv1.AssignedVolume) {
			l.storage.Assign(map[cloud.VolumeID]*agentv1.AssignedVolume{cloud.VolumeID(v.VolumeId): v}, false)
		},
		rest: func() rest { return l.rest(pid, cloud.VMID(want.VmId)) },
	}
	r.run(rounds(t, 20))
}

// attachInRounds runs rounds with RBD volumes and the first guest, which keeps its other volumes. Afterwards, the Ceph
// pool must contain no object except the lists of deleted volumes, and no client may be blocked, because QEMU and the
// helper have closed the images.
func (s *rbdStory) attachInRounds() {
	pid := s.sees(s.one, cloud.ObservedRunning).PID
	r := &volumeRounds{lab: s.lab, want: s.one, disks: []string{"data", "more"}, give: s.give,
		volume: func(n int) *agentv1.AssignedVolume { return s.blank(1000 + n) },
		assign: func(v *agentv1.AssignedVolume) { s.assignVolumes(s.lab, s.data, s.more, v) },
		rest: func() rest {
			r := s.rest(pid, cloud.VMID(s.one.VmId))
			objects := bytes.Fields(s.ceph.Output("rados", "-p", rbdtest.Pool, "ls"))
			for _, o := range slices.SortedFunc(slices.Values(objects), bytes.Compare) {
				if !bytes.HasPrefix(o, []byte("trivet.record.volume-deletions-")) {
					r.Files = append(r.Files, string(o))
				}
			}
			r.Files = append(r.Files, s.ceph.Run("ceph", "osd", "blocklist", "ls"))
			return r
		},
	}
	r.run(rounds(s.T, 10))
	s.one = r.want
	s.assignVolumes(s.lab, s.data, s.more)
}
