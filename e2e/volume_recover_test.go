package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/shared/filelock"
)

// recoverVM kills the agent of a host with a VM that may start on other hosts. The guard process of the host must power
// the VM off when the lease of the host has ended, and the control plane must start the VM on the other host, with
// everything that the guest has written. The agent starts again then, and must remove the VM.
func (c *rbdCloud) recoverVM(ctx context.Context) {
	v := c.createVolume(ctx, "ceph", "precious", "")
	vm, err := c.admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{
		Name: "precious", OrgId: "default", ProjectId: "default", Metadata: map[string]string{"trivet/ha": "restart"},
		Spec: &vmv1.VmSpec{
			Memory: &vmv1.MemorySpec{SizeMib: 192},
			Disks:  []*vmv1.DiskSpec{{Id: "data", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: v}}}},
			Boot:   &vmv1.BootSpec{Kernel: c.images.Kernel, Initrd: c.images.Initrd, Cmdline: guestCmdline},
		},
	})
	require.NoError(c.t, err)
	id := vm.GetId()
	_, err = c.admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: "default", ProjectId: "default", VmId: id})
	require.NoError(c.t, err)
	require.NoError(c.t, consoleSays(ctx, c.world, id, banner, 1))
	on := func(node string) int {
		nodes, err := c.admin.Nodes.ListNodes(ctx, &vmv1.ListNodesRequest{})
		require.NoError(c.t, err)
		for _, n := range nodes.GetNodes() {
			for i, h := range c.hosts {
				if n.GetId() == node && n.GetName() == h.Name {
					return i + 1
				}
			}
		}
		require.Fail(c.t, "the VM is on no host", "%s", node)
		return 0
	}
	running := eventually(ctx, c.t, c.admin, id, "the VM runs", func(vm *vmv1.VirtualMachine) bool { return vm.GetState() == vmv1.VmState_VM_STATE_RUNNING })
	host := on(running.GetNodeId())
	c.on(host).command(ctx, id, "write vda precious", written("precious"))

	lost := c.hosts[host-1]
	require.NoError(c.t, lab.Until(ctx, "the guard process runs", func(context.Context) error {
		f, err := os.Open(filepath.Join(lost.DataDir(), "guard.lock"))
		if err != nil {
			return err
		}
		defer f.Close()
		if err := filelock.Lock(f, 0); !errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("its file is not locked: %w", err)
		}
		return nil
	}))
	time.Sleep(3 * time.Second) // until the agent has reported that
	require.NoError(c.t, c.dir.Kill(lost.Name))
	moved := eventually(ctx, c.t, c.admin, id, "the VM runs on another host", func(vm *vmv1.VirtualMachine) bool {
		return vm.GetState() == vmv1.VmState_VM_STATE_RUNNING && vm.GetNodeId() != running.GetNodeId()
	})
	require.ErrorIs(c.t, syscall.Kill(int(running.GetStatus().GetHostPid()), 0), syscall.ESRCH, "the VM runs twice")
	next := on(moved.GetNodeId())
	require.NoError(c.t, consoleSays(ctx, c.on(next), id, banner, 1))
	c.command(ctx, id, "sum vda", "SUM dev=vda off=0 len=1048576 "+written("precious"))

	require.NoError(c.t, lost.Start(""))
	require.NoError(c.t, lost.Healthy(ctx))
	require.NoError(c.t, lab.Until(ctx, "the lost host removes the VM", func(context.Context) error {
		if _, err := os.Stat(filepath.Join(lost.DataDir(), "vms", id)); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("its directory exists: %w", err)
		}
		return nil
	}))
	c.command(ctx, id, "write vda again", written("again"))
	_, err = c.admin.VMs.DeleteVm(ctx, &vmv1.DeleteVmRequest{OrgId: "default", ProjectId: "default", VmId: id, Force: true})
	require.NoError(c.t, err)
	require.NoError(c.t, lab.Until(ctx, "the volume is deleted", func(ctx context.Context) error {
		_, err := c.admin.Volumes.DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: v})
		return err
	}))
}
