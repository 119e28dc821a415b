package billing

import (
	"fmt"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// MaxPrice is the maximum price, in units of credit, of one vCPU or one GiB for an hour. It is so low that the price of
// an hour of the largest VM or volume fits an int64.
const MaxPrice = 1_000_000_000_000

// Prices are the prices of an hour, in units of credit, per vCPU, per GiB of memory, per GiB of disk and per GiB of
// volume.
type Prices struct {
	// VCPUHour and MemoryGiBHour are charged for a running VM, and DiskGiBHour for the disks of every VM that is built.
	VCPUHour      int64 `yaml:"vcpu_hour"`
	MemoryGiBHour int64 `yaml:"memory_gib_hour"`
	DiskGiBHour   int64 `yaml:"disk_gib_hour"`
	// VolumeGiBHour is charged for each volume, attached or not, from its creation to its deletion.
	VolumeGiBHour int64 `yaml:"volume_gib_hour"`
}

// Check returns an error if a price is out of range.
func (p Prices) Check() error {
	for _, c := range []struct {
		name  string
		price int64
	}{{"vcpu_hour", p.VCPUHour}, {"memory_gib_hour", p.MemoryGiBHour}, {"disk_gib_hour", p.DiskGiBHour},
		{"volume_gib_hour", p.VolumeGiBHour}} {
		if c.price < 0 || c.price > MaxPrice {
			return fmt.Errorf("%s must be 0 to %d, got %d", c.name, int64(MaxPrice), c.price)
		}
	}
	return nil
}

// Use holds the resources for which a VM or a volume is charged.
type Use struct {
	VCPUs     uint32
	MemoryMiB uint64
	DiskGiB   uint64
	VolumeGiB uint64 `cbor:",omitempty"` // the size of a volume; the other fields are then 0
}

func (u Use) String() string {
	if u.VolumeGiB > 0 {
		return fmt.Sprintf("%d GiB", u.VolumeGiB)
	}
	if u.VCPUs == 0 {
		return fmt.Sprintf("off, %d GiB of disks", u.DiskGiB)
	}
	return fmt.Sprintf("%d vCPU, %d MiB, %d GiB of disks", u.VCPUs, u.MemoryMiB, u.DiskGiB)
}

// Hour returns the price of an hour of the use u. Memory is priced per MiB, and a fraction of a unit of credit is
// rounded up.
func (p Prices) Hour(u Use) int64 {
	gib, mib := int64(u.MemoryMiB>>10), int64(u.MemoryMiB&1023)
	return int64(u.VCPUs)*p.VCPUHour + gib*p.MemoryGiBHour + (mib*p.MemoryGiBHour+1023)/1024 + int64(u.DiskGiB)*p.DiskGiBHour +
		int64(u.VolumeGiB)*p.VolumeGiBHour
}

// part says which resources of a VM are charged: nothing, the disks, or all.
type part uint8

const (
	nothing part = iota
	disks
	all
)

// paid contains which resources of a VM are charged in each state. A VM in a state that is not listed costs nothing,
// because it is not built. A VM that is off, starting or stopping pays for its disks.
var paid = map[cloud.State]part{
	cloud.Stopped: disks, cloud.Starting: disks, cloud.Stopping: disks, cloud.Error: disks, cloud.Running: all, cloud.Migrating: all,
}

// UseOf returns the resources for which a VM is charged in the state that its record has.
func UseOf(vm *cloud.VM) Use {
	switch paid[vm.State] {
	case all:
		return FullUse(vm)
	case disks:
		return Use{DiskGiB: vm.Spec.Need().StorageGiB}
	}
	return Use{}
}

// FullUse returns the resources for which a VM is charged while it runs.
func FullUse(vm *cloud.VM) Use {
	need := vm.Spec.Need()
	return Use{VCPUs: need.VCPUs, MemoryMiB: need.AllMemoryMiB(), DiskGiB: need.StorageGiB}
}

// VolumeUse returns the resources for which a volume is charged: its size. The status and the class of the volume do
// not matter.
func VolumeUse(v *cloud.Volume) Use { return Use{VolumeGiB: v.SizeGiB} }
