package qemu

import "github.com/trivet-cloud/trivet/shared/mutant"

// NVRAMCopy is the name of the stream with which a migration copies the NVRAM of a UEFI firmware. No disk has this ID.
const NVRAMCopy = ".nvram"

// copyStream returns the name of the stream with which a migration copies a disk that is not a volume. It is the ID of the
// disk, except for a disk with the ID "memory", because the stream with the memory has that name (tunnel.Memory).
func copyStream(disk string) string {
	if disk == "memory" {
		return ".memory"
	}
	return disk
}

// nodeCopy describes a block node that a migration copies to the target.
type nodeCopy struct {
	name   string // name of its stream, and of its export at the target
	node   string // top node
	onBase bool   // the node has a base image, which the target has already
}

// mirrorPrefix is the beginning of the names of the jobs that copy block nodes to the target, and of their target
// nodes.
const mirrorPrefix = "migrate-"

func (c nodeCopy) mirrorNode() string { return mirrorPrefix + c.node }

// copies returns the block nodes that a migration copies to the target: those of the disks that are not volumes, and
// the NVRAM. QEMU also sends the NVRAM with the memory, but writes it to the target's file only when the guest runs.
// The copy makes the file complete before the switchover.
func (s Spec) copies() (out []nodeCopy) {
	for _, d := range s.Disks {
		if d.copied() {
			out = append(out, nodeCopy{copyStream(d.ID), d.node(), d.Base != ""})
		}
	}
	if s.UEFI && !mutant.On(mutant.SkipNVRAMCopy) {
		out = append(out, nodeCopy{name: NVRAMCopy, node: nvramNode})
	}
	return out
}

// Copies returns the names of the streams with which a migration copies disks and the NVRAM to the target.
func (s Spec) Copies() (names []string) {
	for _, c := range s.copies() {
		names = append(names, c.name)
	}
	return names
}
