package cloud

import "slices"

// AcceleratorLabel is the label of a host whose value is its accelerator: AcceleratorKVM, or "tcg" if the host emulates
// the CPUs of guests.
const (
	AcceleratorLabel = "trivet/accel"
	AcceleratorKVM   = "kvm"
)

// cpuRank lists the CPU models of x86-64 that BaselineCPU can choose, the preferred first. Of the
// models of one vendor, those with more features are before those with fewer. A name without a version, such as Haswell, is an alias whose meaning depends on the
// machine type, so only versioned names are listed. Versions of Intel's
// models with TSX are left out, because microcode updates have removed TSX from many CPUs.
var cpuRank = []string{
	"EPYC-Genoa-v1", "EPYC-Milan-v2", "EPYC-Milan-v1", "Icelake-Server-v6", "Icelake-Server-v5",
	"Icelake-Server-v4", "Icelake-Server-v3", "Icelake-Server-v2", "Cascadelake-Server-v5", "Cascadelake-Server-v4",
	"Cascadelake-Server-v3", "Skylake-Server-v5", "Skylake-Server-v4", "Skylake-Server-v3", "EPYC-Rome-v2", "EPYC-Rome-v1",
	"EPYC-v4", "EPYC-v3", "EPYC-v2", "EPYC-v1", "Skylake-Client-v4", "Skylake-Client-v3", "Broadwell-v4", "Broadwell-v2",
	"Haswell-v4", "Haswell-v2", "IvyBridge-v2", "IvyBridge-v1", "SandyBridge-v2", "SandyBridge-v1", "Westmere-v2",
	"Westmere-v1", "Nehalem-v2", "Nehalem-v1", "Opteron_G3-v1", "Penryn-v1", "Conroe-v1", "kvm64-v1", "qemu64-v1",
}

// hostCPU and maxCPU are the models of QEMU without a fixed set of features.
const hostCPU, maxCPU = "host", "max"

// BaselineCPU returns the CPU model for VMs that request none, so that they can move to every host. offers has the
// CPU models of each host. If all hosts emulate CPUs in software (TCG), it is the model with all features that QEMU
// emulates. Otherwise it is the first model of cpuRank that all hosts offer. BaselineCPU returns "" if there is none.
// Hosts that offer no models are ignored.
func BaselineCPU(offers [][]string) string {
	offers = slices.DeleteFunc(slices.Clone(offers), func(models []string) bool { return len(models) == 0 })
	if len(offers) == 0 {
		return ""
	}
	all := func(model string) bool {
		return !slices.ContainsFunc(offers, func(models []string) bool { return !slices.Contains(models, model) })
	}
	emulated := !slices.ContainsFunc(offers, func(models []string) bool { return slices.Contains(models, hostCPU) })
	if emulated && all(maxCPU) {
		return maxCPU
	}
	if i := slices.IndexFunc(cpuRank, all); i >= 0 {
		return cpuRank[i]
	}
	return ""
}

// CPUModel returns the CPU model that the VM requests, or else the baseline that was chosen when the VM was placed. It
// returns "" if the VM has the default model of its host.
func (vm *VM) CPUModel() string {
	if vm.Spec.CPU != nil && vm.Spec.CPU.Model != "" {
		return vm.Spec.CPU.Model
	}
	return vm.BaselineCPU
}

// HostCPU reports whether a CPU model has no fixed set of features. Under KVM, a VM with such a model cannot be migrated.
func HostCPU(model string) bool { return model == "" || model == hostCPU || model == maxCPU }
