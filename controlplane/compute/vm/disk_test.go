package vm

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// poolHost adds a host with room for VMs and a storage pool local of the given size.
func (w *world) poolHost(name string, gib uint64) cloud.NodeID {
	return w.AddHost(name, plenty(), func(n *cloud.Node) { n.StoragePools = []cloud.StoragePool{{Name: "local", AllocatableGiB: gib}} })
}

// volume creates a volume of 1 GiB.
func (w *world) volume(name string) cloud.VolumeID {
	w.t.Helper()
	out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: name, SizeGiB: 1}, "", [32]byte{})
	require.NoError(w.t, err)
	return out.Volume.ID
}

func (w *world) getVolume(id cloud.VolumeID) *cloud.Volume {
	w.t.Helper()
	v, err := w.volumes.Get(w.t.Context(), acme, id)
	require.NoError(w.t, err)
	return v
}

// flush reports, as the host of a volume, that it has closed and flushed the volume.
func (w *world) flush(id cloud.VolumeID) {
	w.t.Helper()
	v := w.getVolume(id)
	_, err := w.volumes.ObservedVolumes(w.t.Context(), v.Node, []cloud.VolumeObservation{{
		Volume: id, Generation: v.Generation, Present: true, FlushedGeneration: v.AttachmentGeneration,
	}})
	require.NoError(w.t, err)
}

func withVolumes(ids ...cloud.VolumeID) func(*CreateRequest) {
	return func(r *CreateRequest) {
		for i, id := range ids {
			r.Spec.Disks = append(r.Spec.Disks, cloud.Disk{ID: fmt.Sprintf("v%d", i), Volume: id})
		}
	}
}

func (w *world) attachDisk(id cloud.VMID, disk string, v cloud.VolumeID, bus ...cloud.DiskBus) (PowerResult, error) {
	d := cloud.Disk{ID: disk, Volume: v}
	if len(bus) > 0 {
		d.Bus = bus[0]
	}
	return w.vms.AttachDisk(w.as(acme, ""), acme, id, d, [32]byte{})
}

// detachNow detaches a disk without waiting for the host.
func (w *world) detachNow(id cloud.VMID, disk string) error {
	_, err := w.vms.detachDiskOnLeader(w.as(acme, ""), diskRequest{Tenant: acme, VM: id, Disk: cloud.Disk{ID: disk}})
	return err
}

// assignedDisks returns the disks in the desired state that the VM's host receives.
func (w *world) assignedDisks(vm *cloud.VM) (out []*agentv1.AssignedDisk) {
	w.t.Helper()
	require.NoError(w.t, w.store.Local(func(v *store.View) error {
		all, err := w.vms.Assigned(v, vm.Node, vm.ID)
		if len(all) > 0 {
			out = all[0].State.GetDisks()
		}
		return err
	}))
	return out
}

// TestCreateWithVolume creates a VM with a volume. The volume must be bound to the VM's host and attached to the VM,
// and the creation of a second VM with this volume must fail.
func TestCreateWithVolume(t *testing.T) {
	w := newWorld(t)
	plain := w.AddHost("h1", plenty())
	id := w.volume("data")
	_, err := w.vms.Create(w.as(acme, ""), acme, small("web", withVolumes(id)), [32]byte{})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "h1 does not serve the storage pool local")
	require.Zero(t, w.allocated(plain))

	host := w.poolHost("h2", 1)
	vm := w.create("web", withVolumes(id))
	require.Equal(t, host, vm.Node)
	v := w.getVolume(id)
	require.Equal(t, []any{vm.ID, "v0", host, uint64(1), cloud.VolumeInUse}, []any{v.VM, v.Disk, v.Node, v.AttachmentGeneration, v.Status()})
	sent := w.assignedDisks(vm)[1].GetVolume()
	require.Equal(t, []any{string(id), uint64(1), string(vm.ID), uint64(1 << 30)}, []any{sent.GetVolumeId(), sent.GetAttachmentGeneration(), sent.GetVmId(), sent.GetSizeBytes()})

	_, err = w.vms.Create(w.as(acme, ""), acme, small("db", withVolumes(id)), [32]byte{})
	require.ErrorContains(t, err, "attached to VM "+string(vm.ID))
	full := w.volume("more")
	_, err = w.vms.Create(w.as(acme, ""), acme, small("db", withVolumes(full)), [32]byte{})
	f, _ := fault.From(err)
	require.NotNil(t, f)
	require.Equal(t, "has 0 GiB free in the storage pool local, 1 needed", f.Details["h2"])
	_, err = w.vms.Create(w.as(acme, ""), acme, small("db", withVolumes(full, full)), [32]byte{})
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
	_, err = w.vms.Create(w.as(other, ""), other, small("db", withVolumes(full)), [32]byte{})
	require.True(t, fault.Is(err, fault.NotFound), "the volume of another tenant")
}

// TestVolumesDecideTheHost checks that a VM with a bound volume is placed on the volume's host only.
func TestVolumesDecideTheHost(t *testing.T) {
	w := newWorld(t)
	hosts := []cloud.NodeID{w.poolHost("h1", 10), w.poolHost("h2", 10)}
	a, b := w.volume("a"), w.volume("b")
	first := w.create("first", withVolumes(a))
	w.report(first.ID, cloud.ObservedBuilt)
	require.NoError(t, w.detachNow(first.ID, "v0"))
	w.flush(a)
	for i := range 5 {
		vm := w.create(fmt.Sprintf("again-%d", i), withVolumes(a))
		require.Equal(t, first.Node, vm.Node, "the host must have the volume")
		w.report(vm.ID, cloud.ObservedBuilt)
		require.NoError(t, w.detachNow(vm.ID, "v0"))
		w.flush(a)
	}
	elsewhere := hosts[0]
	if first.Node == elsewhere {
		elsewhere = hosts[1]
	}
	w.cordon(first.Node)
	vm := w.create("elsewhere", withVolumes(b))
	require.Equal(t, elsewhere, vm.Node)
	w.report(vm.ID, cloud.ObservedBuilt)
	_, err := w.attachDisk(vm.ID, "x", a)
	require.Error(t, err, "the host must have the volume")
	require.ErrorContains(t, err, "volume a is on host "+string(first.Node))
	_, err = w.vms.Create(w.as(acme, ""), acme, small("db", withVolumes(a)), [32]byte{})
	f, _ := fault.From(err)
	require.NotNil(t, f)
	require.Contains(t, f.Details, w.Node(elsewhere).Name)
	require.Equal(t, "does not have the VM's volumes", f.Details[w.Node(elsewhere).Name])
	require.NoError(t, w.detachNow(vm.ID, "v0"))
	w.flush(b)
	_, err = w.vms.Create(w.as(acme, ""), acme, small("db", withVolumes(a, b)), [32]byte{})
	require.ErrorContains(t, err, "volumes a and b are on different hosts")
}

// cordon keeps further VMs from being placed on a host.
func (w *world) cordon(id cloud.NodeID) {
	w.update(func(tx *store.Tx) {
		n, err := node.Nodes.Get(tx, string(id))
		require.NoError(w.t, err)
		n.Cordoned = true
		node.Nodes.Put(tx, n, string(id))
	})
	w.AwaitFleet()
}

// TestDiskOfStoppedVM attaches a volume to a stopped VM, moves it to another VM, and starts the VM with it.
func TestDiskOfStoppedVM(t *testing.T) {
	w := newWorld(t)
	w.poolHost("h1", 10)
	a, b := w.createInState(cloud.Stopped, "a"), w.createInState(cloud.Stopped, "b")
	id := w.volume("data")
	out, err := w.attachDisk(a.ID, "data", id)
	require.NoError(t, err)
	require.Equal(t, cloud.Disk{ID: "data", Volume: id, Bus: cloud.BusVirtio, Cache: cloud.CacheWriteback}, out.VM.Spec.Disks[1])
	require.Len(t, w.assignedDisks(a), 2)
	require.EqualValues(t, 1, w.getVolume(id).AttachmentGeneration, "the attachment generation must grow by 1 with each attachment")
	_, err = w.attachDisk(a.ID, "data", w.volume("second"))
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
	_, err = w.attachDisk(b.ID, "data", id)
	require.ErrorContains(t, err, "attached to VM "+string(a.ID))

	require.NoError(t, w.detachNow(a.ID, "data"))
	_, err = w.attachDisk(b.ID, "data", id)
	require.Error(t, err, "the host has not flushed the volume")
	require.ErrorContains(t, err, "has not flushed")
	w.flush(id)
	_, err = w.attachDisk(b.ID, "data", id)
	require.NoError(t, err)
	require.EqualValues(t, 2, w.getVolume(id).AttachmentGeneration, "the attachment generation must grow by 1 with each attachment")
	_, err = w.vms.Update(w.as(acme, ""), acme, b.ID, Change{Disks: w.get(b.ID).Spec.Disks, CPU: &cloud.CPU{VCPUs: 1}})
	require.NoError(t, err)
	require.Len(t, w.assignedDisks(b), 2, "an update must keep the volume")

	_, err = w.vms.Delete(w.as(acme, ""), acme, b.ID, false, [32]byte{})
	require.NoError(t, err)
	require.Empty(t, w.getVolume(id).VM, "a deleted VM detaches its volumes")
}

// TestAttachNewDisk attaches a blank disk and a disk with the content of an image to a stopped VM. Each disk is a new
// volume. A failed call leaves no volume behind, and the volume stays when the disk is detached.
func TestAttachNewDisk(t *testing.T) {
	w := newWorld(t)
	w.poolHost("h1", 3)
	vm := w.createInState(cloud.Stopped, "web")
	blank := cloud.Disk{ID: "scratch", Blank: true, SizeGiB: 1}
	out, err := w.vms.AttachDisk(w.as(acme, "once"), acme, vm.ID, blank, [32]byte{1})
	require.NoError(t, err)
	require.Equal(t, cloud.Disk{ID: "scratch", Volume: out.VM.Spec.Disks[1].Volume, Bus: cloud.BusVirtio, Cache: cloud.CacheWriteback}, out.VM.Spec.Disks[1])
	v := w.getVolume(out.VM.Spec.Disks[1].Volume)
	require.Equal(t, []any{"web-scratch", uint64(1), vm.ID, uint64(1)}, []any{v.Name, v.SizeGiB, v.VM, v.AttachmentGeneration})
	again, err := w.vms.AttachDisk(w.as(acme, "once"), acme, vm.ID, blank, [32]byte{1})
	require.NoError(t, err)
	require.Equal(t, v.ID, again.VM.Spec.Disks[1].Volume, "a repeat makes no second volume")

	base := w.image(1, 1<<30)
	out, err = w.vms.AttachDisk(w.as(acme, ""), acme, vm.ID, cloud.Disk{ID: "data", Image: base, SizeGiB: 1}, [32]byte{})
	require.NoError(t, err)
	require.Equal(t, base, w.getVolume(out.VM.Spec.Disks[2].Volume).Image.ID)

	count := func() int {
		all, _, err := w.volumes.List(t.Context(), acme, 0, "", volume.Filter{})
		require.NoError(t, err)
		return len(all)
	}
	for name, d := range map[string]cloud.Disk{
		"more than the host's pool has": {ID: "more", Blank: true, SizeGiB: 2},
		"an existing ID":                {ID: "data", Blank: true, SizeGiB: 1},
		"no size":                       {ID: "more", Blank: true},
		"an unknown image":              {ID: "more", Image: "01980000-0000-7000-8000-000000000000", SizeGiB: 1},
		"two sources":                   {ID: "more", Image: base, Blank: true, SizeGiB: 1},
	} {
		_, err := w.vms.AttachDisk(w.as(acme, ""), acme, vm.ID, d, [32]byte{})
		require.Error(t, err, name)
		require.Equal(t, 2, count(), name)
	}
	require.NoError(t, w.detachNow(vm.ID, "scratch"))
	require.Empty(t, w.getVolume(v.ID).VM, "the volume stays")
	w.volume("web-third")
	out, err = w.vms.AttachDisk(w.as(acme, ""), acme, vm.ID, cloud.Disk{ID: "third", Blank: true, SizeGiB: 1}, [32]byte{})
	require.NoError(t, err)
	third := w.getVolume(out.VM.Spec.Disks[2].Volume)
	require.Equal(t, "disk-"+string(third.ID), third.Name, "another volume has the name")
}

// TestDiskOfRunningVM attaches a volume to a running VM and detaches it. Each call waits for the report of the host. If
// the host refuses a change, the change must be undone.
func TestDiskOfRunningVM(t *testing.T) {
	w := newWorld(t)
	w.poolHost("h1", 10)
	vm := w.createInState(cloud.Running, "web")
	id := w.volume("data")
	reports := func(disks ...cloud.DiskObservation) func(*cloud.Observation) {
		return func(o *cloud.Observation) { o.Disks = disks }
	}
	has := cloud.DiskObservation{ID: "data", Attached: true}
	attach := func() (PowerResult, error) { return w.attachDisk(vm.ID, "data", id) }
	detach := func() (PowerResult, error) {
		return w.vms.DetachDisk(w.as(acme, ""), acme, vm.ID, "data", [32]byte{})
	}
	_, err := w.attachDisk(vm.ID, "data", id, cloud.BusSATA)
	require.ErrorContains(t, err, "the bus sata cannot be attached to a running VM")

	_, err = w.whenRequested(vm, func() {
		w.report(vm.ID, cloud.ObservedRunning, reports(cloud.DiskObservation{ID: "data", Error: "no free slot"}))
	}, attach)
	require.ErrorContains(t, err, "attach disk data of VM web: no free slot")
	require.Empty(t, w.getVolume(id).VM, "a refused attachment must release the volume")
	w.flush(id)

	vm = w.get(vm.ID)
	out, err := w.whenRequested(vm, func() {
		require.Len(t, w.assignedDisks(vm), 2)
		w.report(vm.ID, cloud.ObservedRunning)
		w.report(vm.ID, cloud.ObservedRunning, reports(has))
	}, attach)
	require.NoError(t, err)
	require.False(t, out.WaitEnded)
	require.EqualValues(t, 2, w.getVolume(id).AttachmentGeneration)

	vm = w.get(vm.ID)
	_, err = w.whenRequested(vm, func() {
		require.Len(t, w.assignedDisks(vm), 1, "the host must be told to detach the disk")
		w.report(vm.ID, cloud.ObservedRunning, reports(has))
		require.Equal(t, vm.ID, w.getVolume(id).VM, "the guest still has the disk, so the VM must keep the volume")
		refusal := has
		refusal.Error = "the guest did not release the device"
		w.report(vm.ID, cloud.ObservedRunning, reports(refusal))
	}, detach)
	require.ErrorContains(t, err, "detach disk data of VM web: the guest did not release the device")
	require.Equal(t, vm.ID, w.getVolume(id).VM)

	vm = w.get(vm.ID)
	_, err = w.whenRequested(vm, func() {
		w.report(vm.ID, cloud.ObservedRunning)
		w.flush(id)
	}, detach)
	require.NoError(t, err)
	require.Equal(t, cloud.VolumeAvailable, w.getVolume(id).Status())
	require.Len(t, w.get(vm.ID).Spec.Disks, 1)
}

// TestDeletedVMKeepsVolumes deletes a running VM by force. Its volume must stay attached until the host has reported
// that the VM is destroyed.
func TestDeletedVMKeepsVolumes(t *testing.T) {
	w := newWorld(t)
	w.poolHost("h1", 10)
	id := w.volume("data")
	vm := w.create("web", withVolumes(id))
	w.report(vm.ID, cloud.ObservedBuilt)
	w.power(vm.ID, start, 0)
	vm = w.report(vm.ID, cloud.ObservedRunning, func(o *cloud.Observation) { o.Disks = []cloud.DiskObservation{{ID: "v0", Attached: true}} })
	w.flush(id) // reports the same as after an earlier stop of the VM
	_, err := w.vms.deleteOnLeader(w.as(acme, ""), deleteRequest{Tenant: acme, VM: vm.ID, Force: true})
	require.NoError(t, err)
	require.Equal(t, vm.ID, w.getVolume(id).VM, "the host may still run the guest")
	next := w.createInState(cloud.Stopped, "next")
	_, err = w.attachDisk(next.ID, "data", id)
	require.ErrorContains(t, err, "attached to VM "+string(vm.ID))
	w.reportAbsent(vm.Node, vm.ID, vm.Generation)
	require.Equal(t, vm.ID, w.getVolume(id).VM, "a report from before the deletion must not release the volume")
	w.reportAbsent(vm.Node, vm.ID, vm.Generation+1)
	require.Empty(t, w.getVolume(id).VM)
	_, err = w.attachDisk(next.ID, "data", id)
	require.NoError(t, err)
}

// TestConcurrentAttach attaches one volume to 100 VMs at the same time. One call must succeed. The error of each other
// call must name the VM that has the volume.
func TestConcurrentAttach(t *testing.T) {
	const n = 100
	w := newWorld(t)
	w.AddHost("h1", cloud.Capacity{VCPUs: 1000, MemoryMiB: 1 << 20, StorageGiB: 10_000}, func(n *cloud.Node) {
		n.StoragePools = []cloud.StoragePool{{Name: "local", AllocatableGiB: 10}}
	})
	id := w.volume("data")
	vms := make([]*cloud.VM, n)
	for i := range vms {
		vms[i] = w.createInState(cloud.Stopped, fmt.Sprintf("vm-%d", i))
	}
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range vms {
		all.Go(func() { _, errs[i] = w.attachDisk(vms[i].ID, "data", id) })
	}
	all.Wait()
	holder, won := w.getVolume(id).VM, 0
	for i, err := range errs {
		if err == nil {
			won++
			require.Equal(t, holder, vms[i].ID, "one VM must get the volume")
			continue
		}
		require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
		require.True(t, strings.Contains(err.Error(), "attached to VM "+string(holder)), "the others must learn who has the volume: %v", err)
	}
	require.Equal(t, 1, won, "one VM must get the volume")
	require.EqualValues(t, 1, w.getVolume(id).AttachmentGeneration)
}
