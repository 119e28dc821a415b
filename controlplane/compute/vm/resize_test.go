package vm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// resize changes processors and memory of a VM, and returns the VM's record after that.
func (w *world) resize(id cloud.VMID, vcpus uint32, mib uint64) *cloud.VM {
	w.t.Helper()
	out, err := w.vms.Update(w.as(acme, ""), acme, id, Change{CPU: &cloud.CPU{VCPUs: vcpus}, Memory: &cloud.Memory{SizeMiB: mib}})
	require.NoError(w.t, err)
	require.Equal(w.t, out, *w.get(id))
	return &out
}

// launched adds to an observation that the VM's process was started with the given generation and size.
func launched(generation uint64, vcpus uint32, mib uint64) func(*cloud.Observation) {
	return func(o *cloud.Observation) { o.LaunchGeneration, o.VCPUs, o.MemoryMiB = generation, vcpus, mib }
}

// checkSize checks the size that the spec of a VM has, the one that its host uses for the next process, and the
// capacity that the VM uses of its host and of its quota.
func (w *world) checkSize(vm *cloud.VM, spec, next, reserved cloud.Capacity, why string) {
	w.t.Helper()
	size := func(vcpus uint32, mib uint64) cloud.Capacity { return cloud.Capacity{VCPUs: vcpus, MemoryMiB: mib} }
	require.Equal(w.t, spec, size(vm.Spec.CPU.VCPUs, vm.Spec.Memory.SizeMiB), why)
	assigned := convert.Assigned(vm)
	require.Equal(w.t, next, size(assigned.GetVcpus(), assigned.GetMemoryMib()), why)
	allocated := w.allocated(vm.Node)
	require.Equal(w.t, reserved, size(allocated.VCPUs, allocated.MemoryMiB), why)
	if len(vm.Spec.Volumes()) > 0 {
		return // quotaUsage does not count volumes
	}
	used := w.quotaUsage()
	require.Equal(w.t, reserved, size(uint32(used.VCPUs), used.MemoryMiB), why)
}

// TestResizeOfRunningVM resizes VMs that have a process. The spec must not change, and the larger of the old and the
// new size must be reserved, until the host reports that the VM has a process of the new size, or none.
func TestResizeOfRunningVM(t *testing.T) {
	small, large, narrow := cloud.Capacity{VCPUs: 2, MemoryMiB: 512}, cloud.Capacity{VCPUs: 4, MemoryMiB: 1024}, cloud.Capacity{VCPUs: 1, MemoryMiB: 2048}
	both := cloud.Capacity{VCPUs: 2, MemoryMiB: 2048}
	pending := func(w *world, to, reserved cloud.Capacity) (vm *cloud.VM, old uint64) {
		w.AddHost("h1", plenty())
		before := w.createInState(cloud.Running, "web")
		old = before.Generation
		before = w.report(before.ID, cloud.ObservedRunning, launched(old, 2, 512))
		vm = w.resize(before.ID, to.VCPUs, to.MemoryMiB)
		require.Equal(w.t, old+1, vm.Generation, "the host must receive the change")
		w.checkSize(vm, small, to, reserved, "the host may still run the larger process")
		return vm, old
	}
	t.Run("reboot", func(t *testing.T) {
		w := newWorld(t)
		vm, old := pending(w, large, large)
		require.Equal(t, "vcpus=4,memory_mib=1024", convert.VM(vm, nil).GetMetadata()[cloud.PendingResize])
		vm = w.report(vm.ID, cloud.ObservedRunning, launched(old, 2, 512))
		w.checkSize(vm, small, large, large, "the process is still the old one")
		require.Equal(t, vm, w.resize(vm.ID, 4, 1024), "a repeat must change nothing")
		vm = w.report(vm.ID, cloud.ObservedRunning, launched(vm.Generation, 4, 1024))
		w.checkSize(vm, large, large, large, "the process is the new one")
		require.NotContains(t, convert.VM(vm, nil).GetMetadata(), cloud.PendingResize)
	})
	t.Run("smaller", func(t *testing.T) {
		w := newWorld(t)
		vm, old := pending(w, narrow, both)
		vm = w.report(vm.ID, cloud.ObservedRunning, launched(old, 1, 2048))
		w.checkSize(vm, small, narrow, both, "an older start cannot have the new size")
		vm = w.report(vm.ID, cloud.ObservedRunning, launched(vm.Generation, 1, 2048))
		w.checkSize(vm, narrow, narrow, narrow, "the process is the new one")
	})
	t.Run("stop", func(t *testing.T) {
		w := newWorld(t)
		vm, _ := pending(w, narrow, both)
		_, err := w.vms.changePowerOnLeader(w.as(acme, ""), powerRequest{Tenant: acme, VM: vm.ID, Action: stop})
		require.NoError(t, err)
		vm = w.report(vm.ID, cloud.ObservedBuilt)
		require.Equal(t, cloud.Stopped, vm.State)
		w.checkSize(vm, narrow, narrow, narrow, "the next process has the new size")
	})
	t.Run("an agent that does not report the size", func(t *testing.T) {
		w := newWorld(t)
		vm, _ := pending(w, narrow, both)
		vm = w.report(vm.ID, cloud.ObservedRunning)
		w.checkSize(vm, small, narrow, both, "nothing shows that the process is the new one")
		vm = w.report(vm.ID, cloud.ObservedEnded, func(o *cloud.Observation) { o.Exit = cloud.ExitGuest })
		w.checkSize(vm, narrow, narrow, narrow, "the VM has no process")
	})
	t.Run("taken back", func(t *testing.T) {
		w := newWorld(t)
		vm, old := pending(w, large, large)
		vm = w.resize(vm.ID, 2, 512)
		w.checkSize(vm, small, small, large, "the host may have started the larger process meanwhile")
		require.NotContains(t, convert.VM(vm, nil).GetMetadata(), cloud.PendingResize)
		vm = w.report(vm.ID, cloud.ObservedRunning, launched(old, 2, 512))
		w.checkSize(vm, small, small, small, "the host has not started another process")
	})
	t.Run("one after the other", func(t *testing.T) {
		w := newWorld(t)
		vm, _ := pending(w, large, large)
		vm = w.resize(vm.ID, 1, 2048)
		w.checkSize(vm, small, narrow, cloud.Capacity{VCPUs: 4, MemoryMiB: 2048}, "any of the three sizes may run")
		out, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{Memory: &cloud.Memory{SizeMiB: 512}})
		require.NoError(t, err)
		require.EqualValues(t, 1, out.Resize.CPU.VCPUs, "a part that is absent must stay as it is")
	})
	t.Run("delete", func(t *testing.T) {
		w := newWorld(t)
		vm, _ := pending(w, narrow, both)
		_, err := w.vms.Delete(w.as(acme, ""), acme, vm.ID, true, [32]byte{})
		require.NoError(t, err)
		require.Equal(t, both, w.allocated(vm.Node).Minus(cloud.Capacity{StorageGiB: 5}), "the host may still run either process")
		require.Zero(t, w.quotaUsage().VCPUs)
		w.reportAbsent(vm.Node, vm.ID, vm.Generation+1)
		require.Zero(t, w.allocated(vm.Node))
	})
	t.Run("quota", func(t *testing.T) {
		w := newWorld(t)
		vm, _ := pending(w, large, large)
		limit := uint64(5)
		w.quota(tenant.Quota{VCPUs: &limit})
		_, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{CPU: &cloud.CPU{VCPUs: 6}})
		require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
		require.Equal(t, vm, w.get(vm.ID))
		w.checkSize(vm, small, large, large, "a refused resize must change nothing")
	})
	t.Run("metadata that was read", func(t *testing.T) {
		w := newWorld(t)
		vm, _ := pending(w, large, large)
		out, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{Metadata: convert.VM(vm, nil).GetMetadata()})
		require.NoError(t, err)
		require.Equal(t, vm.Metadata, out.Metadata)
	})
}

// TestResizeOfLostVM loses the host of a VM with a pending resize. The next host must start the VM with the new size,
// and the larger size must stay allocated on the lost host.
func TestResizeOfLostVM(t *testing.T) {
	w := newWorld(t)
	lost := w.sharedHost("n1", 4096)
	vm := w.running("web")
	vm = w.resize(vm.ID, 1, 2048)
	w.report(vm.ID, cloud.ObservedRunning, confirmed)
	w.flush(vm.Spec.Volumes()[0])
	next := w.sharedHost("n2", 4096)
	w.lose(next)
	w.recover()
	w.flush(vm.Spec.Volumes()[0])
	w.recover()
	vm = w.get(vm.ID)
	require.Equal(t, next, vm.Node)
	small := cloud.Capacity{VCPUs: 1, MemoryMiB: 2048}
	w.checkSize(vm, small, small, small, "the VM has no process of the old size")
	require.Equal(t, cloud.Capacity{VCPUs: 2, MemoryMiB: 2048}, w.allocated(lost), "the lost host may still run either size")
}

// TestResizeAndMigration checks that a VM with a pending resize cannot be migrated.
func TestResizeAndMigration(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Running, "web")
	require.Empty(t, vm.NotMigratable())
	require.Contains(t, w.resize(vm.ID, 4, 1024).NotMigratable(), "has a resize that takes effect at its next start")
}

// TestInstanceTypeOfVM resizes a VM with the metadata of an instance type. A change of the size without the
// metadata must remove it.
func TestInstanceTypeOfVM(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	before := w.createInState(cloud.Stopped, "web")
	update := func(c Change) (cloud.VM, error) { return w.vms.Update(w.as(acme, ""), acme, before.ID, c) }
	size := func(vcpus uint32, mib uint64, typeName string) Change {
		c := Change{VCPUs: &vcpus, MemoryMiB: &mib}
		if typeName != "" {
			c.Metadata = map[string]string{cloud.InstanceTypeKey: typeName}
		}
		return c
	}
	vm, err := update(size(4, 1024, "large"))
	require.NoError(t, err)
	require.Equal(t, "large", vm.Metadata[cloud.InstanceTypeKey])
	vm, err = update(size(4, 1024, ""))
	require.NoError(t, err)
	require.Equal(t, "large", vm.Metadata[cloud.InstanceTypeKey], "the size is the same")
	_, err = update(size(2, 512, "not a name"))
	require.True(t, fault.Is(err, fault.InvalidArgument))
	require.Equal(t, "large", w.get(before.ID).Metadata[cloud.InstanceTypeKey])
	vm, err = update(size(4, 2048, ""))
	require.NoError(t, err)
	require.NotContains(t, vm.Metadata, cloud.InstanceTypeKey)
}
