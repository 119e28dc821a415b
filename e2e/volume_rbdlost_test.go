package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/qmp"
	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
)

// loseHost loses the second host while its guest has the volume data: the agent is killed and QEMU is stopped, as if
// the host were cut off. Another host must delete the volume more, which was assigned to the lost host. The
// administrator removes the host as docs/operations.md says, and the first VM gets the volume data. Then QEMU
// continues, and the Ceph cluster must refuse its write. The agent of the lost host is started again, and must report
// that the host was evicted.
func (c *rbdCloud) loseHost(ctx context.Context, one, two, data, more string) {
	f := &rbdFaults{rbdCloud: c, ctx: ctx, vms: [2]string{one, two}, data: data, more: more}
	lost := f.hosts[1]
	f.write(2, "vdb", "fifth")
	vm, err := f.admin.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: "default", ProjectId: "default", VmId: two})
	require.NoError(f.t, err)
	pid := int(vm.GetStatus().GetHostPid())
	require.NoError(f.t, f.dir.Kill(lost.Name))
	require.NoError(f.t, syscall.Kill(pid, syscall.SIGSTOP))
	f.t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) }) // a stopped process ends only when it continues
	_, err = f.admin.Volumes.DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: more})
	require.NoError(f.t, err)
	require.NoError(f.t, lab.Until(ctx, "another host deletes the image", func(context.Context) error {
		if left := f.ceph.Run("rbd", "ls", rbdtest.Pool); strings.Contains(left, more) {
			return errors.New("it is left")
		}
		return nil
	}))

	require.ErrorContains(f.t, f.attach(one, data, "data"), "is attached to VM "+two)
	require.NoError(f.t, lab.Until(ctx, "the VM is deleted", func(ctx context.Context) error {
		_, err := f.admin.VMs.DeleteVm(ctx, &vmv1.DeleteVmRequest{OrgId: "default", ProjectId: "default", VmId: two, Force: true})
		return err
	}))
	f.asAdmin("node", "evict", lost.Name)
	f.available(data)
	require.NoError(f.t, f.attach(one, data, "data"))
	f.more = data
	device := f.grownDisk(1)
	f.reads(1, device, "fifth")
	f.write(1, device, "sixth")

	f.sending(2, "write vdb late", func() { // QEMU reads the line when it continues
		require.NoError(f.t, syscall.Kill(pid, syscall.SIGCONT))
		require.NoError(f.t, lab.Until(ctx, "the write fails", func(ctx context.Context) error { return f.requireIOError(ctx) }))
	})
	require.NoError(f.t, lost.Start(""))
	f.on(2).agentSays(ctx, 0, "evicted from its cluster")
	f.reads(1, device, "sixth")
}

// requireIOError returns nil if QEMU has paused the second guest, because a request failed. No agent may run on the
// host, because QEMU's monitor has one client.
func (f *rbdFaults) requireIOError(ctx context.Context) error {
	dir, err := os.Open(filepath.Join(f.hosts[1].DataDir(), "vms", f.vms[1]))
	if err != nil {
		return err
	}
	defer dir.Close()
	monitor, err := qmp.Dial(ctx, fmt.Sprintf("/proc/self/fd/%d/inspect.sock", dir.Fd()))
	if err != nil {
		return err
	}
	defer monitor.Close()
	var out struct{ Status string }
	if err := monitor.Do(ctx, "query-status", nil, &out); err != nil {
		return err
	}
	if out.Status != "io-error" {
		return fmt.Errorf("the guest is %s", out.Status)
	}
	return nil
}
