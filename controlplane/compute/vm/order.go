package vm

import (
	"cmp"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// sortByBootOrder returns a copy of disks, sorted by boot_index and then by position. The host uses the order of the
// disks in place of boot_index, because boot_index is 0 for each disk by default and QEMU refuses two disks with the
// same bootindex.
func sortByBootOrder(disks []cloud.Disk) []cloud.Disk {
	out := slices.Clone(disks)
	slices.SortStableFunc(out, func(a, b cloud.Disk) int { return cmp.Compare(a.BootIndex, b.BootIndex) })
	return out
}
