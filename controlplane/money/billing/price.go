package billing

import (
	"fmt"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// MaxPrice of one unit for an hour: the largest VM's hour still fits its number.
const MaxPrice = 1_000_000_000_000

// Prices of an hour, in units of credit.
type Prices struct {
	// VCPUHour and MemoryGiBHour are for a VM that runs, DiskGiBHour for the disks of every VM that is built.
	VCPUHour      int64 `yaml:"vcpu_hour"`
	MemoryGiBHour int64 `yaml:"memory_gib_hour"`
	DiskGiBHour   int64 `yaml:"disk_gib_hour"`
}

// Check says what cannot be a price.
func (p Prices) Check() error {
	for _, c := range []struct {
		name  string
		price int64
	}{{"vcpu_hour", p.VCPUHour}, {"memory_gib_hour", p.MemoryGiBHour}, {"disk_gib_hour", p.DiskGiBHour}} {
		if c.price < 0 || c.price > MaxPrice {
			return fmt.Errorf("%s must be 0 to %d, got %d", c.name, int64(MaxPrice), c.price)
		}
	}
	return nil
}

// Use is what of a VM is paid for.
type Use struct {
	VCPUs     uint32
	MemoryMiB uint64
	DiskGiB   uint64
}

func (u Use) String() string {
	if u.VCPUs == 0 {
		return fmt.Sprintf("off, %d GiB of disks", u.DiskGiB)
	}
	return fmt.Sprintf("%d vCPU, %d MiB, %d GiB of disks", u.VCPUs, u.MemoryMiB, u.DiskGiB)
}

// Hour is the price of an hour. Memory counts by the MiB; a broken unit of credit is a whole one.
func (p Prices) Hour(u Use) int64 {
	gib, mib := int64(u.MemoryMiB>>10), int64(u.MemoryMiB&1023)
	return int64(u.VCPUs)*p.VCPUHour + gib*p.MemoryGiBHour + (mib*p.MemoryGiBHour+1023)/1024 + int64(u.DiskGiB)*p.DiskGiBHour
}

// part is how much of a VM is paid for.
type part uint8

const (
	nothing part = iota
	disks
	all
)

// paid is the table of what is paid for in each state; nothing in those that are not listed. A VM that was not built costs
// nothing, one that is off, or on its way up or down, its disks.
var paid = map[cloud.State]part{
	cloud.Stopped: disks, cloud.Starting: disks, cloud.Stopping: disks, cloud.Error: disks, cloud.Running: all, cloud.Migrating: all,
}

// UseOf is what is paid for of a VM as its record has it.
func UseOf(vm *cloud.VM) Use {
	switch paid[vm.State] {
	case all:
		return FullUse(vm)
	case disks:
		return Use{DiskGiB: vm.Spec.Need().StorageGiB}
	}
	return Use{}
}

// FullUse is what is paid for of a VM that runs.
func FullUse(vm *cloud.VM) Use {
	need := vm.Spec.Need()
	return Use{VCPUs: need.VCPUs, MemoryMiB: need.MemoryMiB, DiskGiB: need.StorageGiB}
}
