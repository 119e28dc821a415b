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

// larger returns a copy of have, the disks of a VM, with the sizes of requested, the disks in an UpdateVm request. It
// returns InvalidArgument if the lists differ in anything but sizes, or if a disk would get smaller.
func larger(have, requested []cloud.Disk) ([]cloud.Disk, error) {
	out, same := slices.Clone(have), slices.Clone(requested)
	if len(out) == len(same) {
		for i := range out {
			d := &out[i]
			if size := requested[i].SizeGiB; d.Volume == "" && size != 0 {
				if size < d.SizeGiB && same[i].ID == d.ID {
					return nil, smaller("spec.disks["+d.ID+"].size_gib", *d)
				}
				same[i].SizeGiB, d.SizeGiB = d.SizeGiB, size
			}
		}
	}
	if !reflect.DeepEqual(same, visibleDisks(have)) {
		return nil, fault.Invalid("spec.disks", "UpdateVm can only make disks larger that are not volumes: use AttachDisk and DetachDisk for other changes")
	}
	return out, nil
}

// withSizes returns the disks of a VM with new sizes in GiB, by the ID of the disk. It returns InvalidArgument if a disk
// is missing, is a volume, or would get smaller.
func withSizes(vm *cloud.VM, sizes map[string]uint64) ([]cloud.Disk, error) {
	out := slices.Clone(vm.Spec.Disks)
	for _, id := range slices.Sorted(maps.Keys(sizes)) {
		at := vm.FindDisk(id)
		switch {
		case at < 0:
			return nil, fault.Invalid("disks", "VM %s has no disk %s", vm.Name, id)
		case out[at].Volume != "":
			return nil, fault.Invalid("disks["+id+"]", "the disk is a volume: resize the volume")
		case sizes[id] < out[at].SizeGiB:
			return nil, smaller("disks["+id+"].size_gib", out[at])
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

func smaller(field string, d cloud.Disk) error {
	return fault.Invalid(field, "the disk has %d GiB, and disks cannot be made smaller", d.SizeGiB)
}

// specWithDisks returns the spec with other disks.
func specWithDisks(spec cloud.Spec, disks []cloud.Disk) cloud.Spec {
	spec.Disks = disks
	return spec
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
