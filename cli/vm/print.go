package vm

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/cli/show"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

func rows(w io.Writer, now time.Time, vms ...*vmv1.VirtualMachine) error {
	table := make([][]string, len(vms))
	for i, vm := range vms {
		var disk uint64
		for _, d := range vm.GetSpec().GetDisks() {
			disk += d.GetSizeGib()
		}
		table[i] = []string{
			vm.GetName(), vm.GetId(), state(vm.GetState()), strconv.FormatUint(uint64(vm.GetSpec().GetCpu().GetVcpus()), 10),
			show.Bytes(vm.GetSpec().GetMemory().GetSizeMib() << 20), show.Bytes(disk << 30), vm.GetNodeId(), show.Age(now, vm.GetCreatedAt()),
		}
	}
	return show.Rows(w, []string{"NAME", "ID", "STATE", "VCPUS", "MEMORY", "DISK", "NODE", "AGE"}, table)
}

func state(s vmv1.VmState) string { return show.Enum("VM_STATE", s) }

// detail prints a VM as lines of name and value, for `trivet vm show`.
func detail(w io.Writer, now time.Time, vm *vmv1.VirtualMachine) error {
	spec, status := vm.GetSpec(), vm.GetStatus()
	at := func(ms int64) string {
		if ms == 0 {
			return ""
		}
		return show.When(ms) + " (" + show.Age(now, ms) + " ago)"
	}
	pid := ""
	if status.GetHostPid() != 0 {
		pid = strconv.FormatUint(uint64(status.GetHostPid()), 10)
	}
	fields := [][2]string{
		{"Name", vm.GetName()},
		{"ID", vm.GetId()},
		{"Tenant", vm.GetOrgId() + "/" + vm.GetProjectId()},
		{"State", state(vm.GetState())},
		{"Seen by its host", state(status.GetActualState())},
		{"Last error", status.GetLastError()},
		{"Node", vm.GetNodeId()},
		{"Process", pid},
		{"Started", at(status.GetStartedAt())},
		{"Addresses", strings.Join(status.GetIpAddresses(), ", ")},
		{"vCPUs", cpu(spec.GetCpu())},
		{"Memory", show.Bytes(spec.GetMemory().GetSizeMib() << 20)},
	}
	if u := status.GetResourceUsage(); u != nil {
		fields = append(fields, [2]string{"Uses", fmt.Sprintf("%.1f %% CPU, %s memory, disk %s read %s written, network %s in %s out",
			u.GetCpuPercent(), show.Bytes(u.GetMemoryUsedMib()<<20), show.Bytes(u.GetDiskReadBytes()), show.Bytes(u.GetDiskWriteBytes()),
			show.Bytes(u.GetNetworkRxBytes()), show.Bytes(u.GetNetworkTxBytes()))})
	}
	if b := spec.GetBoot(); b.GetKernel() != "" {
		fields = append(fields, [2]string{"Kernel", b.GetKernel()}, [2]string{"Initrd", b.GetInitrd()}, [2]string{"Command line", b.GetCmdline()})
	}
	fields = append(fields, [2]string{"Created", at(vm.GetCreatedAt()) + " by " + vm.GetCreatedBy()}, [2]string{"Changed", at(vm.GetUpdatedAt())})
	for _, m := range []struct {
		name  string
		pairs map[string]string
	}{{"Label ", vm.GetLabels()}, {"Metadata ", vm.GetMetadata()}} {
		for _, k := range slices.Sorted(maps.Keys(m.pairs)) {
			fields = append(fields, [2]string{m.name + k, m.pairs[k]})
		}
	}
	if err := show.Fields(w, fields); err != nil || len(spec.GetDisks()) == 0 {
		return err
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return disks(w, spec.GetDisks())
}

func cpu(c *vmv1.CpuSpec) string {
	text := strconv.FormatUint(uint64(c.GetVcpus()), 10)
	if c.GetCpuModel() != "" {
		text += " of " + c.GetCpuModel()
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
