package cloud

import "github.com/trivet-cloud/trivet/shared/fault"

// InstanceTypeKey is the key of VM metadata with the name of the instance type whose size the VM has. The program that
// creates or resizes the VM sets it. The control plane removes it if the size of the VM changes and the same request
// does not set it (see VM.ForgetInstanceType).
const InstanceTypeKey = "trivet/instance-type"

// InstanceType is the record of an instance type: a named size of VMs. The fields Name, VCPUs, MemoryMiB and RootDiskGiB
// never change.
type InstanceType struct {
	Name        string
	Description string `cbor:",omitempty"`
	VCPUs       uint32
	MemoryMiB   uint64
	// RootDiskGiB is the size of the disk from which the VM boots. If it is 0, the type has no size for this disk.
	RootDiskGiB uint64 `cbor:",omitempty"`
	// Available is false if programs must not use the type for new VMs and for resizes.
	Available bool
	CreatedAt Time
	UpdatedAt Time
}

// Check returns an InvalidArgument fault if a field that a caller may set is invalid. The sizes have the limits of VMs
// (see Spec.Check).
func (t *InstanceType) Check() error {
	if err := CheckName("name", t.Name); err != nil {
		return err
	}
	if t.VCPUs < 1 || t.VCPUs > MaxVCPUs {
		return fault.Invalid("vcpus", "must be 1 to %d, got %d", MaxVCPUs, t.VCPUs)
	}
	if t.MemoryMiB < MinMemoryMiB || t.MemoryMiB > MaxMemoryMiB {
		return fault.Invalid("memory_mib", "must be %d to %d, got %d", MinMemoryMiB, MaxMemoryMiB, t.MemoryMiB)
	}
	if t.RootDiskGiB > MaxDiskGiB {
		return fault.Invalid("root_disk_gib", "must be at most %d, got %d", MaxDiskGiB, t.RootDiskGiB)
	}
	return CheckDescription(t.Description)
}

// InstanceTypeUpdate is a change of an instance type. A field that is nil changes nothing.
type InstanceTypeUpdate struct {
	Description *string
	Available   *bool
}

// Update applies a change to the type, and reports whether the type changed. It returns InvalidArgument if a field of
// the change is invalid. After an error, the caller must not store the type.
func (t *InstanceType) Update(u InstanceTypeUpdate) (changed bool, err error) {
	before := *t
	if u.Description != nil {
		t.Description = *u.Description
	}
	if u.Available != nil {
		t.Available = *u.Available
	}
	if err := t.Check(); err != nil {
		return false, err
	}
	return *t != before, nil
}

// CheckInstanceTypeKey returns InvalidArgument if metadata, which a request sets, has a value for InstanceTypeKey that
// cannot be the name of an instance type. The type need not exist: it may have been deleted since the caller read it.
func CheckInstanceTypeKey(metadata map[string]string) error {
	if name := metadata[InstanceTypeKey]; name != "" && CheckName("metadata", name) != nil {
		return fault.Invalid("metadata", "%s must be the name of an instance type, not %.100q", InstanceTypeKey, name)
	}
	return nil
}

// ForgetInstanceType removes InstanceTypeKey from the metadata of a VM if an update changes the number of vCPUs or the
// size of the memory and does not set the key itself. Otherwise the metadata would name a type of another size. The
// parameters from and to are the specs before and after the update, and change is the metadata that the update sets.
func (vm *VM) ForgetInstanceType(from, to *Spec, change map[string]string) {
	if _, isSet := change[InstanceTypeKey]; isSet || from.CPU.VCPUs == to.CPU.VCPUs && from.Memory.SizeMiB == to.Memory.SizeMiB {
		return
	}
	vm.Metadata = Merge(vm.Metadata, map[string]string{InstanceTypeKey: ""})
}
