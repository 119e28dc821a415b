package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// drain drains the host of the guest m while tenants create and delete VMs, and while the leader changes. The guest must
// move to the host other and keep its memory. Another VM, which may run only on the drained host, is named with the
// reason, and is shut down only with force: see rollingDrain.
func (c *networkCloud) drain(m, peer *machine, other int) {
	drained := m.host
	id := c.ids[drained]
	fixed := c.boot("fixed", drained)
	boot := m.run("echo drained >/tmp/mark && cat /proc/sys/kernel/random/boot_id")
	ctx := c.context(3 * time.Minute)
	_, err := c.admin.Nodes.DrainNode(ctx, &vmv1.DrainNodeRequest{NodeId: id})
	require.NoError(c.t, err)
	stopLoad := c.createAndDelete(c.context(3*time.Minute), c.ids[other], true)
	c.changeLeader(ctx)
	require.NoError(c.t, lab.Until(ctx, "the guest has left, and the other VM is named with the reason", func(ctx context.Context) error {
		out, err := c.admin.Operator.GetDrain(ctx, &operatorv1.GetDrainRequest{NodeId: id})
		if err != nil {
			return err
		}
		found := map[string]string{}
		for _, vm := range out.GetDrain().GetVms() {
			found[vm.GetName()] = vm.GetStatus() + " " + vm.GetTo() + " " + vm.GetReason()
		}
		if found[m.vm.GetName()] != "MOVED "+c.hosts[other].Name+" " || !strings.Contains(found["fixed"], "no host fits") {
			return fmt.Errorf("%v", found)
		}
		return nil
	}))
	stopLoad()
	m.host = other
	m.eventually("the guest has kept its memory", "grep -q drained /tmp/mark")
	require.Equal(c.t, boot, m.run("cat /proc/sys/kernel/random/boot_id"), "the guest did not boot again")
	peer.eventually("another guest reaches it", "ping -c 1 -W 2 "+m.nic.Address.Addr().String())
	vm, err := c.vms.GetVm(ctx, &vmv1.GetVmRequest{VmId: fixed.vm.GetId()})
	require.NoError(c.t, err)
	require.Equal(c.t, vmv1.VmState_VM_STATE_RUNNING, vm.GetState(), "without force it is not shut down")

	c.rollingDrain(ctx, drained, fixed)
}

// rollingDrain runs `trivet cluster rolling-drain --force` on a host that is already being drained. It kills and
// restarts the host's agent while the command of --run runs. The VM fixed, which cannot be moved, must be shut down,
// and must not start until the host is uncordoned.
func (c *networkCloud) rollingDrain(ctx context.Context, drained int, fixed *machine) {
	host, id := c.hosts[drained], c.ids[drained]
	reached, back := c.dir.Path("drained"), c.dir.Path("back")
	command := c.startCommand(ctx, "cluster", "rolling-drain", "--label", "host="+host.Name, "--from", host.Name, "--force",
		"--run", "echo {host} >"+reached+"; until [ -e "+back+" ]; do sleep 0.1; done")
	require.NoError(c.t, lab.Until(ctx, "the command of --run is executed", func(context.Context) error {
		text, err := os.ReadFile(reached)
		if err == nil && string(text) != host.Name+"\n" {
			err = fmt.Errorf("the command of --run was executed for the host %q", text)
		}
		if err != nil {
			err = fmt.Errorf("%w: %s", err, command.errs.String())
		}
		return err
	}))
	c.awaitState(ctx, id, vmv1.NodeState_NODE_STATE_MAINTENANCE)
	_, err := c.vms.StartVm(ctx, &vmv1.StartVmRequest{VmId: fixed.vm.GetId()})
	require.Equal(c.t, codes.FailedPrecondition, status.Code(err))
	require.ErrorContains(c.t, err, "in maintenance")
	require.NoError(c.t, c.dir.Kill(host.Name))
	require.NoError(c.t, host.Start(""))
	c.awaitState(ctx, id, vmv1.NodeState_NODE_STATE_MAINTENANCE)
	require.NoError(c.t, os.WriteFile(back, nil, 0o600))
	command.finish(ctx)
	require.Contains(c.t, command.errs.String(), host.Name+" is uncordoned")
	c.awaitState(ctx, id, vmv1.NodeState_NODE_STATE_READY)
	_, err = c.vms.StartVm(ctx, &vmv1.StartVmRequest{VmId: fixed.vm.GetId()})
	require.NoError(c.t, err)
}

// awaitState waits until a host has a state.
func (c *networkCloud) awaitState(ctx context.Context, id string, state vmv1.NodeState) {
	c.t.Helper()
	require.NoError(c.t, lab.Until(ctx, "the host is "+state.String(), func(ctx context.Context) error {
		n, err := c.admin.Nodes.GetNode(ctx, &vmv1.GetNodeRequest{NodeId: id})
		if err == nil && n.GetState() != state {
			err = fmt.Errorf("it is %s", n.GetState())
		}
		return err
	}))
}

// changeLeader transfers the leadership to another member, and waits until that member is the leader.
func (c *networkCloud) changeLeader(ctx context.Context) {
	c.t.Helper()
	next := c.leader(1)%3 + 1
	_, err := c.admin.Operator.TransferLeader(ctx, &operatorv1.TransferLeaderRequest{Id: uint64(next)})
	require.NoError(c.t, err)
	require.NoError(c.t, lab.Until(ctx, "the other member leads", func(context.Context) error {
		if now := c.leader(next); now != next {
			return fmt.Errorf("member %d leads", now)
		}
		return nil
	}))
}

// leastLoad is the minimum number of VMs that createAndDelete creates and deletes.
const leastLoad = 3

// createAndDelete creates and deletes one VM after the other until stop is called, but at least leastLoad VMs. A call after
// the end of ctx fails the test. Each VM must be placed on the host with the ID on. If unavailable is true, calls may fail with UNAVAILABLE, because the test
// changes the leader.
func (c *networkCloud) createAndDelete(ctx context.Context, on string, unavailable bool) (stop func()) {
	end, done := make(chan struct{}), make(chan error, 1)
	one := func(i int) error {
		vm, err := c.vms.CreateVm(ctx, &vmv1.CreateVmRequest{Name: fmt.Sprintf("load-%d", i), Spec: &vmv1.VmSpec{
			Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: 64},
			Boot: &vmv1.BootSpec{Kernel: c.images.Kernel, Initrd: c.images.Initrd},
		}})
		if err != nil {
			return err
		}
		if vm.GetNodeId() != on {
			return fmt.Errorf("%s was placed on %s", vm.GetName(), vm.GetNodeId())
		}
		if _, err := c.vms.ListVms(ctx, &vmv1.ListVmsRequest{}); err != nil {
			return err
		}
		_, err = c.vms.DeleteVm(ctx, &vmv1.DeleteVmRequest{VmId: vm.GetId()})
		return err
	}
	go func() {
		for i, succeeded := 0, 0; ; i++ {
			select {
			case <-end:
				if succeeded >= leastLoad {
					c.t.Logf("%d VMs were created and deleted, and %d attempts failed", succeeded, i-succeeded)
					done <- nil
					return
				}
			default:
			}
			switch err := one(i); {
			case err == nil:
				succeeded++
			case ctx.Err() != nil || !unavailable || status.Code(err) != codes.Unavailable:
				done <- err
				return
			}
		}
	}()
	return func() {
		close(end)
		require.NoError(c.t, <-done)
	}
}

// drainPortable drains the first host, on which a VM with one volume in the shared pool has been stopped. The VM must get
// the second host, stay STOPPED there, and have its data when it is started.
func (s *sharedStory) drainPortable() {
	s.t.Helper()
	const org = "default"
	created, err := s.admin.Volumes.CreateVolume(s.ctx, &vmv1.CreateVolumeRequest{Name: "portable", OrgId: org, ProjectId: org, SizeGib: 1, StorageClass: "shared"})
	require.NoError(s.t, err)
	vm, err := s.admin.VMs.CreateVm(s.ctx, &vmv1.CreateVmRequest{
		Name: "portable", OrgId: org, ProjectId: org, Labels: map[string]string{"trivet/node-selector": "host=" + s.hosts[0].Name},
		Spec: &vmv1.VmSpec{
			Memory: &vmv1.MemorySpec{SizeMib: 192},
			Boot:   &vmv1.BootSpec{Kernel: s.images.Kernel, Initrd: s.images.Initrd, Cmdline: guestCmdline},
			Disks:  []*vmv1.DiskSpec{{Id: "root", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: created.GetId()}}}},
		},
	})
	require.NoError(s.t, err)
	others := s.vms
	defer func() { s.vms = others }()
	s.vms = [2]string{vm.GetId(), vm.GetId()}
	start := &vmv1.StartVmRequest{OrgId: org, ProjectId: org, VmId: vm.GetId()}
	_, err = s.admin.VMs.StartVm(s.ctx, start)
	require.NoError(s.t, err)
	require.NoError(s.t, consoleSays(s.ctx, s.world, vm.GetId(), banner, 1))
	s.guest(0, "write vda portable", written("portable"))
	_, err = s.admin.VMs.StopVm(s.ctx, &vmv1.StopVmRequest{OrgId: org, ProjectId: org, VmId: vm.GetId(), Force: true})
	require.NoError(s.t, err)
	_, err = s.admin.VMs.UpdateVm(s.ctx, &vmv1.UpdateVmRequest{OrgId: org, ProjectId: org, VmId: vm.GetId(), Labels: map[string]string{"trivet/node-selector": ""}})
	require.NoError(s.t, err)
	var ids [2]string
	for i, host := range s.hosts {
		n, err := s.admin.AwaitNode(s.ctx, host.Name)
		require.NoError(s.t, err)
		ids[i] = n.GetId()
	}
	_, err = s.admin.Nodes.DrainNode(s.ctx, &vmv1.DrainNodeRequest{NodeId: ids[0]})
	require.NoError(s.t, err)
	require.NoError(s.t, lab.Until(s.ctx, "the VM is STOPPED on the other host", func(ctx context.Context) error {
		vm, err := s.admin.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: org, ProjectId: org, VmId: vm.GetId()})
		if err == nil && (vm.GetNodeId() != ids[1] || vm.GetState() != vmv1.VmState_VM_STATE_STOPPED) {
			err = fmt.Errorf("it is %s on %q: %s", vm.GetState(), vm.GetNodeId(), vm.GetStatus().GetLastError())
		}
		return err
	}))
	_, err = s.admin.Nodes.UncordonNode(s.ctx, &vmv1.UncordonNodeRequest{NodeId: ids[0]})
	require.NoError(s.t, err)
	_, err = s.admin.VMs.StartVm(s.ctx, start)
	require.NoError(s.t, err)
	require.NoError(s.t, consoleSays(s.ctx, s.world, vm.GetId(), banner, 1))
	s.guest(1, "sum vda", "SUM dev=vda off=0 len=1048576 "+written("portable"))
	_, err = s.admin.VMs.DeleteVm(s.ctx, &vmv1.DeleteVmRequest{OrgId: org, ProjectId: org, VmId: vm.GetId(), Force: true})
	require.NoError(s.t, err)
	require.NoError(s.t, lab.Until(s.ctx, "the volume is deleted", func(ctx context.Context) error {
		_, err := s.admin.Volumes.DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{OrgId: org, ProjectId: org, VolumeId: created.GetId()})
		return err
	}))
}
