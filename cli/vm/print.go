package vm

import (
	"strconv"

	"github.com/trivet-cloud/trivet/cli/show"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

func state(s vmv1.VmState) string { return show.Enum("VM_STATE", s) }

func cpu(c *vmv1.CpuSpec, model string) string {
	text := strconv.FormatUint(uint64(c.GetVcpus()), 10)
	if model != "" {
		text += ", CPU model " + model
	}
	return text
}
