package vm

import (
	"io"
	"strconv"
	"time"

	"github.com/trivet-cloud/trivet/cli/columns"
	"github.com/trivet-cloud/trivet/cli/show"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

func rows(w io.Writer, now time.Time, vms ...*vmv1.VirtualMachine) error {
	t, err := columns.Choose(&columns.Flags{}, listColumns(func() time.Time { return now }, false))
	if err != nil {
		return err
	}
	return t.Print(w, vms...)
}

func state(s vmv1.VmState) string { return show.Enum("VM_STATE", s) }

func cpu(c *vmv1.CpuSpec, model string) string {
	text := strconv.FormatUint(uint64(c.GetVcpus()), 10)
	if model != "" {
		text += " of " + model
	}
	return text
}

func disks(w io.Writer, disks []*vmv1.DiskSpec) error {
	table := make([][]string, len(disks))
	for i, d := range disks {
		source := "blank"
		switch src := d.GetSource().GetSource().(type) {
		case *vmv1.DiskSource_ImageId:
			source = "image " + src.ImageId
		case *vmv1.DiskSource_VolumeId:
			source = "volume " + src.VolumeId
		}
		table[i] = []string{
			d.GetId(), show.Bytes(d.GetSizeGib() << 30), source, show.Enum("DISK_BUS", d.GetBus()), show.Enum("DISK_CACHE", d.GetCache()),
			strconv.FormatUint(uint64(d.GetBootIndex()), 10),
		}
	}
	return show.Rows(w, []string{"DISK", "SIZE", "SOURCE", "BUS", "CACHE", "BOOT"}, table)
}
