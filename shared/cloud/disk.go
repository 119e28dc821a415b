package cloud

import (
	"cmp"
	"slices"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// DiskRefusal names a disk that a host could not attach to a guest or detach from it, with the reason.
type DiskRefusal struct{ Disk, Error string }

// DiskObservation is a host's report about one disk of a running guest that is a volume.
type DiskObservation struct {
	ID string
	// Attached is true while the guest has the device or the host has the volume open.
	Attached bool
	// Error is why the host could not attach or detach the disk as desired.
	Error string
}

// Visible returns the disk without the fields that the API does not show.
func (d Disk) Visible() Disk {
	d.Change = DeviceUnchanged
	return d
}

// Volumes returns the IDs of the volumes among the disks.
func (s *Spec) Volumes() (ids []VolumeID) {
	for _, d := range s.Disks {
		if d.Volume != "" {
			ids = append(ids, d.Volume)
		}
	}
	return ids
}

// FindDisk returns the index of the disk in the VM's spec, or -1 if the VM has no disk with this ID.
func (vm *VM) FindDisk(id string) int {
	return slices.IndexFunc(vm.Spec.Disks, func(d Disk) bool { return d.ID == id })
}

// CheckDiskChange returns FailedPrecondition unless the VM is STOPPED or RUNNING. A STOPPED VM has no process, and the
// host of a RUNNING VM can ask the guest to accept or release a disk.
func (vm *VM) CheckDiskChange(verb string) error {
	if vm.State != Stopped && vm.State != Running {
		return fault.New(fault.FailedPrecondition, "cannot %s a disk of VM %s: it is %s", verb, vm.Name, vm.State)
	}
	return nil
}

// Hotpluggable reports whether disks on the bus can be attached to a running guest. QEMU's IDE and AHCI controllers do
// not support hotplug.
func (b DiskBus) Hotpluggable() bool { return b != BusIDE && b != BusSATA }

// AttachDisk adds a disk whose volume is attached to the VM. The host of a RUNNING VM then attaches it to the guest.
func (vm *VM) AttachDisk(d Disk) {
	d.Change = DeviceUnchanged
	if vm.State == Running {
		d.Change = DeviceAttaching
	}
	vm.setDisks(append(slices.Clone(vm.Spec.Disks), d))
	vm.DiskRefusal = nil
	vm.Generation++
}

// DetachDisk removes the disk at index i from a STOPPED VM. For a RUNNING VM it only marks the disk, and Observe
// removes the disk when the host has reported that the guest has released it.
func (vm *VM) DetachDisk(i int) {
	if vm.State == Running && vm.Spec.Disks[i].Change == DeviceDetaching {
		return
	}
	disks := slices.Clone(vm.Spec.Disks)
	if vm.State == Running {
		disks[i].Change = DeviceDetaching
	} else {
		disks = slices.Delete(disks, i, i+1)
	}
	vm.setDisks(disks)
	vm.DiskRefusal = nil
	vm.Generation++
}

// setDisks replaces the disks in the spec, and the ResolvedDisks of those that are volumes.
func (vm *VM) setDisks(disks []Disk) {
	old := vm.Disks
	vm.Spec.Disks, vm.Disks = disks, nil
	for _, d := range SortByBootOrder(disks) {
		switch i := slices.IndexFunc(old, func(o ResolvedDisk) bool { return o.ID == d.ID }); {
		case d.Volume != "":
			vm.Disks = append(vm.Disks, ResolvedDisk{ID: d.ID, Bus: d.Bus, Cache: d.Cache, Volume: d.Volume})
		case i >= 0:
			vm.Disks = append(vm.Disks, old[i])
		}
	}
}

// SortByBootOrder returns a copy of disks, sorted by boot_index and then by position. The host derives QEMU's bootindex
// from this order and not from boot_index, because boot_index is 0 for each disk by default, and QEMU refuses two disks
// with the same bootindex.
func SortByBootOrder(disks []Disk) []Disk {
	out := slices.Clone(disks)
	slices.SortStableFunc(out, func(a, b Disk) int { return cmp.Compare(a.BootIndex, b.BootIndex) })
	return out
}

// observeDisks completes the attachments and detachments that a host's report shows as done or refused. It removes a
// disk that could not be attached, and keeps a disk that could not be detached. It returns whether it changed the VM.
func (vm *VM) observeDisks(o Observation) bool {
	process, known := o.hasProcess()
	if !known {
		return false
	}
	changed, rest := false, make([]Disk, 0, len(vm.Spec.Disks))
	for _, d := range vm.Spec.Disks {
		report := o.disk(d.ID)
		attached := process && report.Attached && !(d.Change == DeviceDetaching && mutant.On(mutant.ReleaseAttachedDisk))
		result := d.Change.result(process, attached, report.Error)
		if result.refused {
			vm.DiskRefusal = &DiskRefusal{d.ID, report.Error}
			vm.Generation++
		}
		if result.ended {
			d.Change = DeviceUnchanged
			changed = true
		}
		if result.stays {
			rest = append(rest, d)
		}
	}
	if changed {
		vm.setDisks(rest)
	}
	return changed
}

// disk returns the report about a disk, or the zero value if there is none.
func (o *Observation) disk(id string) DiskObservation {
	if i := slices.IndexFunc(o.Disks, func(d DiskObservation) bool { return d.ID == id }); i >= 0 {
		return o.Disks[i]
	}
	return DiskObservation{}
}
