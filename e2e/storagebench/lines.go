package main

import (
	"fmt"
	"slices"

	"github.com/trivet-cloud/trivet/e2e/bench/table"
	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
)

// none is the target of a line without a target.
var none = verdict.Target{}

// maxIORatio is the design's bound for I/O inside a guest, as a ratio to the same QEMU started by hand.
const maxIORatio = 1.05

// tables holds all lines. Rates have no target, because they depend on other load on the machine more than CPU time
// does.
var tables = []table.Table{{Peer: "by hand", Lines: slices.Concat(
	ioLines("io", "", "MANAGED volume", "the same QEMU by hand"), volumeLines, ioLines("rbd", "rbd ", "RBD volume", "librbd in a QEMU by hand"),
)}}

// ioLines returns the lines about I/O inside a guest. prefix begins their IDs.
func ioLines(part, prefix, volume, peer string) (lines []table.Line) {
	for _, l := range []struct{ mode, what, operation, unit string }{
		{"randread", "4 KiB random reads inside a guest", "read", "/s"},
		{"randwrite", "4 KiB random writes inside a guest, each flushed", "write", "/s"},
		{"read", "sequential reads of 256 KiB inside a guest", "read", "MB/s"},
		{"write", "sequential writes of 256 KiB inside a guest", "write", "MB/s"},
	} {
		lines = append(lines,
			table.NewLine(part, prefix+l.mode+" rate", fmt.Sprintf("%s, %s, against %s", l.what, volume, peer), l.unit, none),
			table.NewLine(part, prefix+l.mode+" cpu", "… QEMU's CPU per "+l.operation, "µs", table.AtMost(maxIORatio)))
	}
	return lines
}

// volumeLines are the lines about changes of volumes and images.
var volumeLines = []table.Line{
	table.NewLine("clone", "clone attached", "volume from an image, attached to a running guest, against `qemu-img create -b` and QMP", "ms", none),
	table.NewLine("clone", "clone read", "… until the guest has read the first bytes", "ms", none),
	table.NewLine("attach", "attach", "20 volumes attached at once to 5 running guests, the first time, against QMP", "ms", none),
	table.NewLine("attach", "attach again", "20 volumes attached at once to 5 running guests, again, against QMP", "ms", none),
	table.NewLine("attach", "detach", "20 volumes detached at once from 5 running guests, until the host has flushed them, against QMP", "ms", none),
	table.NewLine("boot", "boot", "20 VMs, each with a new volume from one image, created and started at once, until all run, against `qemu-img create -b` and QEMU by hand", "ms", none),
	table.NewLine("resize", "resize", "volume of a running guest grown by 1 GiB, until the guest sees the size, against QMP", "ms", none),
	table.NewLine("snapshot", "snapshot", "snapshot of a volume of 1 GiB in use, until the copy is complete, against `blockdev-backup` and fsync", "ms", none),
	table.NewLine("snapshot", "snapshot large", "snapshot of a volume of 20 GiB in use, until the copy is complete, against `blockdev-backup` and fsync", "ms", none),
	table.NewLine("import", "import", "VMDK image of 256 MiB imported, against `qemu-img convert` and fsync", "s", none),
	table.NewLine("import", "import cpu", "… CPU, of the three members", "s", none),
	table.NewLine("upload", "upload", "256 MiB uploaded with `trivet image upload`, against cp, fsync and sha256sum", "MB/s", none),
	table.NewLine("upload", "upload cpu", "… CPU, of `trivet` and the three members", "s", none),
	table.NewLine("rbd", "rbd clone attached", "RBD volume from an image, attached to a running guest, against `rbd clone` and QMP", "ms", none),
	table.NewLine("rbd", "rbd clone read", "… until the guest has read the first bytes", "ms", none),
}
