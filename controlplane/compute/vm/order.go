package vm

import (
	"cmp"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// sortByBootOrder sorts disks by boot_index, then by position. QEMU refuses two disks of the same index, and the wire
// contract's default is 0 for each disk.
func sortByBootOrder(disks []cloud.Disk) []cloud.Disk {
	out := slices.Clone(disks)
	slices.SortStableFunc(out, func(a, b cloud.Disk) int { return cmp.Compare(a.BootIndex, b.BootIndex) })
	return out
}
