package machine

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// rbdStory has the hosts, VMs and volumes of TestGuestsUseRBD. Its methods are the steps of the test.
type rbdStory struct {
	*lab // the first host
	ceph *rbdtest.Ceph

	other      *lab // the second host
	one, two   *agentv1.AssignedVm
	data, more *agentv1.AssignedVolume
}

// TestGuestsUseRBD runs guests with RBD images of a real Ceph cluster on two hosts. The first guest starts with a
// volume and gets another one while it runs. One volume grows. The agent is restarted, and its helper is killed.
// Further volumes are attached and detached. The cluster is stopped for 30 seconds, and the guest's write waits. Then
// the volume moves to a guest on the second host, and the QEMU process of this guest is killed.
func TestGuestsUseRBD(t *testing.T) {
	s := &rbdStory{lab: newLab(t), ceph: rbdtest.Start(t)}
	s.other = newLab(t)
	helper := rbdtest.Program(t)
	for _, host := range []*lab{s.lab, s.other} {
		host.stop()
		host.rbdHelper = helper
		host.start()
	}
	s.one, s.two = s.linux(1), s.other.linux(2)
	s.data = grant(s.blank(1), s.one, "data")
	s.assignVolumes(s.lab, s.data)
	s.one = on(s.give(s.one, s.data, virtio, noCache))
	s.assign(s.one)
	s.seesDisks(s.one, "data")
	s.boots(s.one, 1)
	s.write(s.one.VmId, "vdb", "first", 0)
	s.attachAndGrow()
	s.checkSecrets()
	s.restartAgent()
	s.killHelper()
	s.attachInRounds()
	s.stopCeph()
	s.moveToOtherHost()
	s.killQEMU()
	s.remove()
}

// blank returns the desired state of a detached RBD volume of 64 MiB.
func (s *rbdStory) blank(n int) *agentv1.AssignedVolume {
	v := blankVolume(n)
	v.Pool, v.Rbd = "", &agentv1.RbdPool{
		Fsid: s.ceph.FSID, Monitors: []string{s.ceph.Address}, Pool: rbdtest.Pool, User: rbdtest.User, Key: s.ceph.Key,
	}
	return v
}

// give is like the function give, but the volume in the VM's disk has no Ceph pool: the control plane sends the pool
// only in the list of volumes.
func (s *rbdStory) give(want *agentv1.AssignedVm, v *agentv1.AssignedVolume, bus vmv1.DiskBus, cache vmv1.DiskCache) *agentv1.AssignedVm {
	v = proto.CloneOf(v)
	v.Rbd = nil
	return give(want, v, bus, cache)
}

// replace returns the desired state of a VM with a newer desired state of the volume v, which it has.
func (s *rbdStory) replace(want *agentv1.AssignedVm, v *agentv1.AssignedVolume) *agentv1.AssignedVm {
	return with(want, func(w *agentv1.AssignedVm) {
		w.Disks = slices.Clone(w.Disks)
		at := slices.IndexFunc(w.Disks, func(d *agentv1.AssignedDisk) bool { return d.GetVolume().GetVolumeId() == v.VolumeId })
		w.Disks[at] = proto.CloneOf(w.Disks[at])
		w.Disks[at].Volume = proto.CloneOf(v)
		w.Disks[at].Volume.Rbd = nil
	})
}

// assignVolumes sets the volumes of a host.
func (s *rbdStory) assignVolumes(host *lab, volumes ...*agentv1.AssignedVolume) {
	all := map[cloud.VolumeID]*agentv1.AssignedVolume{}
	for _, v := range volumes {
		all[cloud.VolumeID(v.VolumeId)] = v
	}
	host.storage.Assign(all, false)
}

// reported waits until a host has reported a volume with the generation flushed, and without an error.
func (s *rbdStory) reported(host *lab, v *agentv1.AssignedVolume, flushed uint64) {
	s.Helper()
	require.Eventually(s, func() bool {
		host.volumeMu.Lock()
		defer host.volumeMu.Unlock()
		o := host.volumes[cloud.VolumeID(v.VolumeId)]
		return o.Present && o.Generation == v.Generation && o.FlushedGeneration == flushed && o.Error == "" && o.SizeBytes == v.SizeBytes
	}, 2*within, 20*time.Millisecond, "volume %s is flushed up to %d", v.VolumeId, flushed)
}

// attachAndGrow attaches a volume with limits to the running guest, and grows the other one.
func (s *rbdStory) attachAndGrow() {
	s.more = grant(s.blank(2), s.one, "more")
	s.more.MaxIops = 500
	s.one = s.give(s.one, s.more, scsi, writeback)
	s.assignVolumes(s.lab, s.data, s.more)
	s.assign(s.one)
	s.seesDisks(s.one, "data", "more")
	s.seesSize(s.one, "sda", 64*mib)
	s.write(s.one.VmId, "sda", "more", 0)

	s.data = proto.CloneOf(s.data)
	s.data.Generation, s.data.SizeBytes = s.data.Generation+1, 96*mib
	s.one = s.replace(s.one, s.data)
	s.assignVolumes(s.lab, s.data, s.more)
	s.assign(s.one)
	s.seesSize(s.one, "vdb", 96*mib)
	s.write(s.one.VmId, "vdb", "grown", 80*mib)
}

// checkSecrets checks that the key of the Ceph user is in no file of the host and in no argument or environment of a
// process.
func (s *rbdStory) checkSecrets() {
	pid := int(s.sees(s.one, cloud.ObservedRunning).PID)
	for _, name := range []string{"cmdline", "environ"} {
		text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), name))
		require.NoError(s, err)
		require.NotContains(s, string(text), s.ceph.Key)
	}
	require.NoError(s, filepath.WalkDir(s.dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		require.NotContains(s, string(text), s.ceph.Key, path)
		return err
	}))
}

// restartAgent restarts the agent of the first host, which finds the volumes attached.
func (s *rbdStory) restartAgent() {
	s.stop()
	s.start()
	s.assignVolumes(s.lab, s.data, s.more)
	s.assign(s.one)
	s.seesDisks(s.one, "data", "more")
	s.reads(s.one.VmId, "vdb", "first", 0)
}

// stopCeph stops the cluster for 30 seconds while the guest writes. The write waits. Meanwhile the agent makes a volume
// in a storage pool, and attaches it to another VM. The agent must also make a further RBD volume and attach it to the
// guest, which succeeds after the outage.
func (s *rbdStory) stopCeph() {
	late := grant(s.blank(4), s.one, "late")
	s.ceph.Stop()
	s.command(s.one.VmId, "write vdb waits 33554432", func() {
		began := time.Now()
		local := grant(blankVolume(9), s.one, "local")
		third := s.vm(3)
		local.VmId = third.VmId
		third = on(give(third, local, virtio, writeback))
		s.assign(s.one, third)
		s.seesDisks(third, "local")
		require.Less(s, time.Since(began), 30*time.Second, "the agent needs no answer of the cluster")
		o := s.sees(s.one, cloud.ObservedRunning)
		require.Empty(s, o.LastError)
		s.one = s.give(s.one, late, virtio, noCache)
		s.assignVolumes(s.lab, s.data, s.more, late)
		s.assign(s.one, third)
		time.Sleep(30*time.Second - time.Since(began)) // the length of the outage
		var out strings.Builder
		require.NoError(s, s.Console(s.Context(), cloud.VMID(s.one.VmId), 0, false, &out))
		require.NotContains(s, out.String(), "seed=waits")
		s.ceph.Restart()
		s.says(s.one.VmId, fmt.Sprintf("WROTE dev=vdb off=33554432 len=%d seed=waits", mib), 1)
		s.assign(s.one, destroyed(third))
	})
	s.seesDisks(s.one, "data", "late", "more")
	s.seesSize(s.one, "vdc", 64*mib)
	s.write(s.one.VmId, "vdc", "late", 0)
	s.one = take(s.one, "late")
	s.assign(s.one)
	s.seesDisks(s.one, "data", "more")
	late = revoke(late)
	late.Deleted = true
	s.assignVolumes(s.lab, s.data, s.more, late)
	s.deleted(late)
}

// moveToOtherHost detaches the volume from the running guest, and attaches it to one on the second host. A forged
// assignment with the older generation must not open the volume on the first host.
func (s *rbdStory) moveToOtherHost() {
	stale := s.data
	s.one = take(s.one, "data")
	s.data = revoke(s.data)
	s.assign(s.one)
	s.seesDisks(s.one, "more")
	s.assignVolumes(s.lab, s.data, s.more)
	s.reported(s.lab, s.data, 1)

	s.data = grant(s.data, s.two, "data")
	s.data.MustExist = true
	s.assignVolumes(s.lab, s.more)
	s.assignVolumes(s.other, s.data)
	s.two = on(s.give(s.two, s.data, virtio, writeback))
	s.other.assign(s.two)
	s.other.seesDisks(s.two, "data")
	s.other.boots(s.two, 1)
	s.other.reads(s.two.VmId, "vdb", "first", 0)
	s.other.reads(s.two.VmId, "vdb", "waits", 32*mib)
	s.other.reads(s.two.VmId, "vdb", "grown", 80*mib)
	s.other.write(s.two.VmId, "vdb", "second", 0)

	forged := s.give(s.one, stale, virtio, noCache)
	s.assignVolumes(s.lab, stale, s.more)
	s.assign(forged)
	s.until(cloud.VMID(s.one.VmId), "refused", func(o cloud.Observation) bool {
		return strings.Contains(o.LastError, volume.ErrStale.Error())
	})
	s.one = take(forged, "data")
	s.assign(s.one)
	s.seesDisks(s.one, "more")
	s.assignVolumes(s.lab, s.more)
}

// killQEMU kills the QEMU process on the second host. The volume counts as flushed only after the cluster refuses its
// requests. When the VM starts again, the guest must read everything that it had flushed.
func (s *rbdStory) killQEMU() {
	o := s.other.sees(s.two, cloud.ObservedRunning)
	require.NoError(s, syscall.Kill(int(o.PID), syscall.SIGKILL))
	s.other.sees(s.two, cloud.ObservedEnded)
	s.reported(s.other, s.data, 2)
	s.two = with(s.two, func(w *agentv1.AssignedVm) { w.Starts++ })
	s.other.assign(s.two)
	s.other.seesDisks(s.two, "data")
	s.other.boots(s.two, 2)
	s.other.reads(s.two.VmId, "vdb", "second", 0)
}

// remove destroys the VMs. The volumes stay in the cluster, flushed, until they are deleted.
func (s *rbdStory) remove() {
	s.one, s.two = destroyed(s.one), destroyed(s.two)
	s.assign(s.one)
	s.other.assign(s.two)
	s.sees(s.one, cloud.ObservedAbsent)
	s.other.sees(s.two, cloud.ObservedAbsent)
	s.reported(s.other, s.data, 2)
	s.reported(s.lab, s.more, 1)
	gone := func(v *agentv1.AssignedVolume) *agentv1.AssignedVolume {
		v = revoke(v)
		v.Deleted = true
		return v
	}
	s.assignVolumes(s.lab, gone(s.data), gone(s.more)) // any host can delete a volume
	require.Eventually(s, func() bool { return s.ceph.Run("rbd", "ls", rbdtest.Pool) == "" }, within, 100*time.Millisecond)
}
