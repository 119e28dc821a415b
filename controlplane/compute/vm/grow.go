package vm

import (
	"maps"
	"reflect"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// sizesOf returns the sizes in GiB, by ID, that requested has for the disks have. have are the disks of a VM, and requested
// those of an UpdateVm request. sizesOf returns InvalidArgument if the lists differ in anything but sizes.
func sizesOf(have, requested []cloud.Disk) (map[string]uint64, error) {
	sizes, same := map[string]uint64{}, slices.Clone(requested)
	for i := range min(len(have), len(same)) {
		if size := same[i].SizeGiB; have[i].Volume == "" && size != 0 {
			sizes[have[i].ID], same[i].SizeGiB = size, have[i].SizeGiB
		}
	}
	if !reflect.DeepEqual(same, visibleDisks(have)) {
		return nil, fault.Invalid("spec.disks", "UpdateVm can only make disks larger that are not volumes: use AttachDisk and DetachDisk for other changes")
	}
	return sizes, nil
}

// withSizes returns the disks of a VM with new sizes in GiB, by the ID of the disk. It returns InvalidArgument if a disk
// is missing, is a volume, or would get smaller.
func withSizes(vm *cloud.VM, sizes map[string]uint64) ([]cloud.Disk, error) {
	out := slices.Clone(vm.Spec.Disks)
	for _, id := range slices.Sorted(maps.Keys(sizes)) {
		at := vm.FindDisk(id)
		switch {
		case at < 0:
			return nil, fault.Invalid("spec.disks", "VM %s has no disk %s", vm.Name, id)
		case out[at].Volume != "":
			return nil, fault.Invalid("spec.disks["+id+"]", "the disk is a volume: resize the volume")
		case sizes[id] < out[at].SizeGiB:
			return nil, fault.Invalid("spec.disks["+id+"].size_gib", "the disk has %d GiB, and disks cannot be made smaller", out[at].SizeGiB)
		}
		out[at].SizeGiB = sizes[id]
	}
	return out, nil
}

// hasSizes reports whether the disks of a VM have these sizes in GiB, by the ID of the disk.
func hasSizes(vm *cloud.VM, sizes map[string]uint64) bool {
	for id, size := range sizes {
		if at := vm.FindDisk(id); at < 0 || vm.Spec.Disks[at].SizeGiB != size {
			return false
		}
	}
	return true
}

// grow sets the sizes of the VM's disks to those of disks, which differ from the VM's disks only in greater sizes. The
// host grows the disks of a running guest at once, and those of another VM at its next start.
func (s *Service) grow(tx *store.Tx, vm *cloud.VM, disks []cloud.Disk) error {
	if reflect.DeepEqual(disks, vm.Spec.Disks) {
		return nil
	}
	switch vm.State {
	case cloud.Stopped, cloud.Starting, cloud.Running, cloud.Stopping, cloud.Error:
	default:
		return fault.New(fault.FailedPrecondition, "cannot grow disks of VM %s: it is %s", vm.Name, vm.State)
	}
	host, err := node.Nodes.Get(tx, string(vm.Node))
	if err != nil {
		return err
	}
	if host == nil || host.MissingFeature([]string{cloud.FeatureDiskGrowth}) != "" {
		return fault.New(fault.FailedPrecondition, "cannot grow disks of VM %s: the agent of its host is too old", vm.Name)
	}
	vm.Spec.Disks = disks
	vm.Disks = slices.Clone(vm.Disks)
	for i := range vm.Disks {
		d := &vm.Disks[i]
		if at := vm.FindDisk(d.ID); at >= 0 && d.Volume == "" {
			d.SizeBytes = disks[at].SizeGiB << 30
		}
	}
	vm.Generation++
	return nil
}
