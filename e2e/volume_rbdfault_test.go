package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
)

// rbdFaults has two VMs on the first two hosts of a cloud with Ceph. Its methods kill and stop the processes of the
// cloud. After each method, the volume data is attached to the second VM.
type rbdFaults struct {
	*rbdCloud
	ctx  context.Context
	vms  [2]string // by host
	data string    // the volume that the second VM has as vdb
	more string    // a further volume
}

// testFaults kills helpers, agents, a leader and QEMU, and stops the Ceph cluster, while guests use RBD volumes. Guests
// must always read what they have written. The volume data is attached to the second VM before and afterwards.
// testFaults returns a further volume, which is detached and assigned to the second host.
func (c *rbdCloud) testFaults(ctx context.Context, one, two, data string) (more string) {
	f := &rbdFaults{rbdCloud: c, ctx: ctx, vms: [2]string{one, two}, data: data}
	f.killHelpers()
	f.killAgent()
	f.killLeader()
	f.killQEMU()
	f.stopCeph()
	f.attachStoppedAtOnce()
	f.attachAtOnce()
	return f.more
}

func (f *rbdFaults) attach(vm, volume, disk string) error {
	_, err := f.admin.VMs.AttachDisk(f.ctx, &vmv1.AttachDiskRequest{OrgId: "default", ProjectId: "default", VmId: vm, Disk: &vmv1.DiskSpec{
		Id: disk, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: volume}}, Cache: vmv1.DiskCache_DISK_CACHE_NONE,
	}})
	return err
}

// attached attaches the volume more to a VM as the disk named more. If a call fails, attached repeats it: the failed
// call may nevertheless have attached the volume.
func (f *rbdFaults) attached(vm string) {
	f.t.Helper()
	require.NoError(f.t, lab.Until(f.ctx, "the volume is attached", func(ctx context.Context) error {
		err := f.attach(vm, f.more, "more")
		if status.Code(err) == codes.AlreadyExists || status.Code(err) == codes.FailedPrecondition {
			v, getErr := f.volume(ctx, f.more)
			if getErr == nil && v.GetAttachedToVm() == vm && v.GetStatus() == vmv1.VolumeStatus_VOLUME_STATUS_IN_USE {
				return nil
			}
		}
		return err
	}))
}

func (f *rbdFaults) detach(vm, volume, disk string) {
	f.t.Helper()
	require.NoError(f.t, lab.Until(f.ctx, "the volume is detached", func(ctx context.Context) error {
		_, err := f.admin.VMs.DetachDisk(ctx, &vmv1.DetachDiskRequest{OrgId: "default", ProjectId: "default", VmId: vm, DiskId: disk})
		return err
	}))
	f.available(volume)
}

func (f *rbdFaults) volume(ctx context.Context, id string) (*vmv1.Volume, error) {
	return f.admin.Volumes.GetVolume(ctx, &vmv1.GetVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: id})
}

func (f *rbdFaults) available(id string) {
	f.t.Helper()
	require.NoError(f.t, lab.Until(f.ctx, "the volume is AVAILABLE", func(ctx context.Context) error {
		v, err := f.volume(ctx, id)
		if err == nil && v.GetStatus() != vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE {
			err = fmt.Errorf("it is %s: %v", v.GetStatus(), v.GetMetadata())
		}
		return err
	}))
}

// write makes the guest of a VM write a pattern and flush it. reads checks that the guest reads the pattern.
func (f *rbdFaults) write(host int, device, seed string) {
	f.t.Helper()
	f.answers(host, "write "+device+" "+seed, "dev="+device+" off=0 len=1048576 seed="+seed+" "+written(seed))
}

func (f *rbdFaults) reads(host int, device, seed string) {
	f.t.Helper()
	f.answers(host, "sum "+device, "SUM dev="+device+" off=0 len=1048576 "+written(seed))
}

// answers writes a line to the serial port of a VM until the guest has given the answer once more than before. The line
// is repeated, because the guest may not have a disk yet, or may still see the earlier size of the disk.
func (f *rbdFaults) answers(host int, line, answer string) {
	f.t.Helper()
	require.NoError(f.t, lab.Until(f.ctx, "the guest answers "+answer, func(context.Context) error { return f.answer(host, line, answer) }))
}

// answer writes a line to the serial port of a VM, and returns an error unless the guest gives the answer within 5
// seconds.
func (f *rbdFaults) answer(host int, line, answer string) error {
	f.t.Helper()
	path := filepath.Join(f.hosts[host-1].DataDir(), "vms", f.vms[host-1], "console.log") // works without an agent
	count := func() int {
		text, err := os.ReadFile(path)
		require.NoError(f.t, err)
		return strings.Count(string(text), answer)
	}
	before := count()
	found := false
	f.sending(host, line, func() {
		for end := time.Now().Add(5 * time.Second); !found && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			found = count() > before
		}
	})
	if !found {
		return fmt.Errorf("no answer to %s", line)
	}
	return nil
}

// readsMore checks that the guest on the second host reads a pattern from the volume that attachMeanwhile or stopCeph
// has attached. If the host has neither attached nor refused a disk within 35 seconds, AttachDisk returns without an
// error. If the host refuses the disk after that, readsMore attaches the volume again.
func (f *rbdFaults) readsMore(seed string) {
	f.t.Helper()
	require.NoError(f.t, lab.Until(f.ctx, "the guest reads "+seed, func(context.Context) error {
		f.attached(f.vms[1])
		return f.answer(2, "sum vdc", "SUM dev=vdc off=0 len=1048576 "+written(seed))
	}))
}

// killHelper kills the helpers of all agents, at least one.
func (f *rbdFaults) killHelper() {
	f.t.Helper()
	require.NoError(f.t, lab.Until(f.ctx, "a helper is killed", func(context.Context) error {
		var pids []int
		for _, agent := range f.hosts {
			if pid := f.dir.Running(agent.Name); pid != 0 {
				pids = append(pids, rbdtest.Helpers(f.t, pid)...)
			}
		}
		if len(pids) == 0 {
			return errors.New("no helper runs")
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
		}
		return nil
	}))
}

// killsMeanwhile calls begin while the cluster answers no request for data, kills the helpers, and lets the cluster
// answer again. The helpers are therefore killed while they execute the operation of begin.
func (f *rbdFaults) killsMeanwhile(begin func()) {
	f.t.Helper()
	f.ceph.Pause()
	begin()
	for range 3 { // the agents start other helpers
		f.killHelper()
		time.Sleep(500 * time.Millisecond)
	}
	f.ceph.Continue()
}

// killHelpers kills the helpers of the agents while they do nothing, make a volume, and let a volume grow.
func (f *rbdFaults) killHelpers() {
	f.killsMeanwhile(func() {
		v, err := f.admin.Volumes.CreateVolume(f.ctx, &vmv1.CreateVolumeRequest{
			Name: "more", OrgId: "default", ProjectId: "default", SizeGib: 1, StorageClass: "ceph",
		})
		require.NoError(f.t, err)
		f.more = v.GetId()
	})
	f.available(f.more)
	require.NoError(f.t, f.attach(f.vms[1], f.more, "more"))
	f.write(2, "vdc", "helper")
	f.killHelper()
	f.killsMeanwhile(func() {
		_, err := f.admin.Volumes.ResizeVolume(f.ctx, &vmv1.ResizeVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: f.more, SizeGib: 2})
		require.NoError(f.t, err)
	})
	f.answers(2, "disks", "vdc:4194304")
	f.readsMore("helper")
	f.detach(f.vms[1], f.more, "more")
}

// attachMeanwhile attaches the volume more to the second VM while the cluster answers no request for data. When the
// control plane has granted the attachment, attachMeanwhile calls fault, and lets the cluster answer again. The guest
// must get the volume. The call may fail and is then repeated.
func (f *rbdFaults) attachMeanwhile(fault func()) {
	f.t.Helper()
	f.ceph.Pause()
	done := make(chan error, 1)
	go func() { done <- f.attach(f.vms[1], f.more, "more") }()
	require.NoError(f.t, lab.Until(f.ctx, "the attachment is granted", func(ctx context.Context) error {
		v, err := f.volume(ctx, f.more)
		if err == nil && v.GetAttachedToVm() == "" {
			err = errors.New("it is not")
		}
		return err
	}))
	fault()
	f.ceph.Continue()
	if err := <-done; err != nil {
		f.t.Logf("the call failed with: %v", err)
		f.attached(f.vms[1])
	}
	f.reads(2, "vdb", "third")
}

// killAgent kills the agent of the second host while its guest writes, and while it attaches a volume.
func (f *rbdFaults) killAgent() {
	agent := f.hosts[1]
	require.NoError(f.t, f.dir.Kill(agent.Name))
	f.write(2, "vdb", "third")
	require.NoError(f.t, agent.Start(""))
	require.NoError(f.t, agent.Healthy(f.ctx))
	f.reads(2, "vdb", "third")
	f.attachMeanwhile(func() {
		require.NoError(f.t, f.dir.Kill(agent.Name))
		require.NoError(f.t, agent.Start(""))
	})
	f.readsMore("helper")
	f.write(2, "vdc", "agent")
	f.detach(f.vms[1], f.more, "more")
}

// killLeader kills the leader of the control plane while the second host attaches a volume.
func (f *rbdFaults) killLeader() {
	leader := f.leader(1)
	f.attachMeanwhile(func() {
		require.NoError(f.t, f.dir.Kill(f.trio.Name(leader)))
		require.NoError(f.t, f.trio.Start(leader))
	})
	f.ready()
	f.readsMore("agent")
}

// killQEMU kills the QEMU process of the second VM, which has both volumes, and starts the VM again. Then the first VM
// uses the volume more, which is attached to the second VM again afterwards.
func (f *rbdFaults) killQEMU() {
	running := func(vm *vmv1.VirtualMachine) bool { return vm.GetState() == vmv1.VmState_VM_STATE_RUNNING }
	vm := eventually(f.ctx, f.t, f.admin, f.vms[1], "the VM runs", running)
	require.NoError(f.t, syscall.Kill(int(vm.GetStatus().GetHostPid()), syscall.SIGKILL))
	eventually(f.ctx, f.t, f.admin, f.vms[1], "the VM has ended", func(vm *vmv1.VirtualMachine) bool { return !running(vm) })
	require.NoError(f.t, lab.Until(f.ctx, "the VM starts", func(ctx context.Context) error {
		_, err := f.admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: "default", ProjectId: "default", VmId: f.vms[1]})
		return err
	}))
	require.NoError(f.t, consoleSays(f.ctx, f.on(2), f.vms[1], banner, 1)) // The log began when the VM was migrated to this host.
	f.write(2, "vdb", "fourth")                                            // the console has all earlier answers
	f.detach(f.vms[1], f.more, "more")
	require.NoError(f.t, f.attach(f.vms[0], f.more, "more"))
	device := f.grownDisk(1)
	f.reads(1, device, "agent")
	f.write(1, device, "moved")
	f.detach(f.vms[0], f.more, "more")
}

// grownDisk lets the volume more, which is attached to a VM, grow to 3 GiB. It returns the name that the guest gives to
// the disk, which is the only one of this size.
func (f *rbdFaults) grownDisk(host int) string {
	f.t.Helper()
	_, err := f.admin.Volumes.ResizeVolume(f.ctx, &vmv1.ResizeVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: f.more, SizeGib: 3})
	require.NoError(f.t, err)
	f.answers(host, "disks", ":6291456")
	log, err := f.admin.ReadConsole(f.ctx, f.vms[host-1])
	require.NoError(f.t, err)
	found := regexp.MustCompile(`\b(vd[a-z]):6291456`).FindAllStringSubmatch(log, -1)
	require.NotEmpty(f.t, found)
	return found[len(found)-1][1]
}

// sending writes a line to the serial port of a VM, and calls meanwhile. Until meanwhile returns, the guest's output is
// read.
func (f *rbdFaults) sending(host int, line string, meanwhile func()) {
	f.t.Helper()
	dir, err := os.Open(filepath.Join(f.hosts[host-1].DataDir(), "vms", f.vms[host-1]))
	require.NoError(f.t, err)
	defer dir.Close()
	// The path of the socket is too long for a socket address.
	c, err := net.Dial("unix", fmt.Sprintf("/proc/self/fd/%d/console.sock", dir.Fd()))
	require.NoError(f.t, err)
	done := make(chan struct{})
	go func() { defer close(done); _, _ = io.Copy(io.Discard, c) }()
	defer func() { _ = c.Close(); <-done }()
	_, err = io.WriteString(c, line+"\n")
	require.NoError(f.t, err)
	meanwhile()
}

// stopCeph stops the cluster for 30 seconds while the second guest writes and a volume is being attached to its VM.
// Meanwhile the host must stay READY, and must start another VM. Then the write and the attachment must be completed.
func (f *rbdFaults) stopCeph() {
	f.ceph.Stop()
	attached := make(chan error, 1)
	var third string
	f.sending(2, "write vdb waits", func() {
		began := time.Now()
		go func() { attached <- f.attach(f.vms[1], f.more, "more") }()
		var err error
		third, err = f.createVM(f.ctx, "meanwhile", 2)
		require.NoError(f.t, err)
		for time.Since(began) < 30*time.Second { // the length of the outage
			f.requireReady()
			time.Sleep(time.Second)
		}
		log, err := f.admin.ReadConsole(f.ctx, f.vms[1])
		require.NoError(f.t, err)
		require.NotContains(f.t, log, "seed=waits")
		f.ceph.Restart()
		require.NoError(f.t, consoleSays(f.ctx, f.on(2), f.vms[1], "seed=waits "+written("waits"), 1))
	})
	if err := <-attached; err != nil {
		f.t.Logf("the call failed with: %v", err)
		require.Contains(f.t, []codes.Code{codes.Unavailable, codes.DeadlineExceeded, codes.FailedPrecondition}, status.Code(err))
		f.attached(f.vms[1])
	}
	f.readsMore("moved")
	f.reads(2, "vdb", "waits")
	f.detach(f.vms[1], f.more, "more")
	_, err := f.admin.VMs.DeleteVm(f.ctx, &vmv1.DeleteVmRequest{OrgId: "default", ProjectId: "default", VmId: third, Force: true})
	require.NoError(f.t, err)
}

// requireReady requires that all hosts are READY, and that the agent of the second one and the command line answer.
func (f *rbdFaults) requireReady() {
	f.t.Helper()
	list, err := f.admin.Nodes.ListNodes(f.ctx, &vmv1.ListNodesRequest{})
	require.NoError(f.t, err)
	for _, n := range list.GetNodes() {
		require.Equal(f.t, vmv1.NodeState_NODE_STATE_READY, n.GetState(), n.GetName())
	}
	require.NoError(f.t, f.hosts[1].Healthy(f.ctx))
	require.Contains(f.t, f.asAdmin("vm", "list", "-o", "wide"), f.vms[1])
}

// attachAtOnce attaches a volume to both VMs at once, three times. One call must succeed, and the error of the other
// one must name the VM that got the volume. In the end the second VM has had the volume last.
func (f *rbdFaults) attachAtOnce() {
	for range 3 {
		var errs [2]error
		var calls sync.WaitGroup
		for i, vm := range f.vms {
			calls.Go(func() { errs[i] = f.attach(vm, f.more, "more") })
		}
		calls.Wait()
		winner := 0
		if errs[0] != nil {
			winner = 1
		}
		require.NoError(f.t, errs[winner])
		require.ErrorContains(f.t, errs[1-winner], "is attached to VM "+f.vms[winner])
		f.detach(f.vms[winner], f.more, "more")
	}
	require.NoError(f.t, f.attach(f.vms[1], f.more, "more")) // so that the second host is its host
	f.detach(f.vms[1], f.more, "more")
	require.Contains(f.t, f.ceph.Run("rbd", "ls", rbdtest.Pool), "volume-"+f.more)
}

// asAdmin runs the command line as the administrator, and returns its output.
func (f *rbdFaults) asAdmin(args ...string) string {
	f.t.Helper()
	out, errs, code := f.adminCommand(f.ctx, args...)
	require.Zero(f.t, code, "trivet %s: %s%s", strings.Join(args, " "), out, errs)
	return out
}
