package cloud

import (
	"reflect"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// PendingResize is the metadata key with which the API shows a resize that takes effect at the next start of the VM.
// Its value lists the new values that differ from the spec, such as "vcpus=4,memory_mib=2048". The key is added to
// responses of the API, and is never stored in VM.Metadata.
const PendingResize = "trivet/pending-resize"

// Resize is a change of a VM's processors and memory that was requested while the VM may have had a process. The host
// uses the new values for the next process of the VM.
type Resize struct {
	CPU    CPU
	Memory Memory
	// Generation is the first generation of the desired state with these values.
	Generation uint64
	// Reserved has the maximum processors and memory that the VM can use until the resize has taken effect. Its StorageGiB
	// is 0.
	Reserved Capacity
}

// Reserved returns the capacity that is allocated to the VM on its host and in its quota. While a resize is pending,
// this is the larger of the old and the new value, for processors and memory separately, because the host can start the
// new process at any time.
func (vm *VM) Reserved() Capacity {
	need := vm.need(&vm.Spec)
	if vm.Resize != nil {
		storage := need.StorageGiB
		need = vm.Resize.Reserved
		need.StorageGiB = storage
	}
	return need
}

// need returns the amount of a host's resources that the VM requires if it has this spec.
func (vm *VM) need(spec *Spec) Capacity {
	need := spec.Need()
	if vm.DedicatedCPUs() {
		need.VCPUs, need.DedicatedVCPUs = 0, need.VCPUs
	}
	return need
}

// NextSpec returns the spec with which the host starts the next process of the VM. It differs from Spec while a resize
// is pending.
func (vm *VM) NextSpec() Spec {
	spec := vm.Spec
	if vm.Resize != nil {
		cpu, memory := vm.Resize.CPU, vm.Resize.Memory
		spec.CPU, spec.Memory = &cpu, &memory
	}
	return spec
}

// ResizeAtNextStart records that the next process of the VM gets the processors and memory of spec. The caller must
// then allocate the capacity that vm.Reserved returns. ResizeAtNextStart returns FailedPrecondition unless the VM is
// STARTING, RUNNING, STOPPING or in ERROR.
func (vm *VM) ResizeAtNextStart(spec *Spec) error {
	switch vm.State {
	case Starting, Running, Stopping, Error:
	default:
		return fault.New(fault.FailedPrecondition, "cannot resize VM %s: it is %s", vm.Name, vm.State)
	}
	reserved, need := vm.Reserved(), vm.need(spec)
	if mutant.On(mutant.ReserveNewSize) {
		reserved = Capacity{}
	}
	vm.Generation++
	vm.Resize = &Resize{CPU: *spec.CPU, Memory: *spec.Memory, Generation: vm.Generation, Reserved: Capacity{
		VCPUs: max(reserved.VCPUs, need.VCPUs), MemoryMiB: max(reserved.MemoryMiB, need.MemoryMiB),
		HugepagesMiB: max(reserved.HugepagesMiB, need.HugepagesMiB), DedicatedVCPUs: max(reserved.DedicatedVCPUs, need.DedicatedVCPUs),
	}}
	return nil
}

// endResize copies the values of a pending resize to the spec, and ends the resize.
func (vm *VM) endResize() {
	if vm.Resize != nil {
		vm.Spec, vm.Resize = vm.NextSpec(), nil
	}
}

// observeResize ends a pending resize if the host's report o shows that the resize has taken effect, and returns
// whether it has ended one. There are two cases: the VM has no process, so that its next process gets the new values,
// or the process of the VM has the new values. Reports of old agents lack the values of the process, so for them only
// the first case applies. The report must not have an older generation than the VM.
func (vm *VM) observeResize(o Observation) bool {
	r := vm.Resize
	if r == nil {
		return false
	}
	switch o.Observed {
	case ObservedAbsent, ObservedBuilding, ObservedBuilt, ObservedBuildFailed, ObservedEnded:
	default:
		launched := o.LaunchGeneration >= r.Generation || reflect.DeepEqual(vm.NextSpec(), vm.Spec)
		if !launched || o.VCPUs != r.CPU.VCPUs || o.MemoryMiB != r.Memory.SizeMiB {
			return false
		}
	}
	vm.endResize()
	return true
}

// PendingResize returns the value of the metadata PendingResize, or "" if no resize is pending.
func (vm *VM) PendingResize() string {
	next := vm.NextSpec()
	var pairs []string
	add := func(key, old, new string) {
		if old != new {
			pairs = append(pairs, key+"="+new)
		}
	}
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	if vm.Resize != nil {
		from, to := vm.Spec.CPU, next.CPU
		add("vcpus", number(uint64(from.VCPUs)), number(uint64(to.VCPUs)))
		if to.Sockets != 0 || to.CoresPerSocket != 0 { // Otherwise the host chooses them.
			add("sockets", number(uint64(from.Sockets)), number(uint64(to.Sockets)))
			add("cores_per_socket", number(uint64(from.CoresPerSocket)), number(uint64(to.CoresPerSocket)))
		}
		add("cpu_model", from.Model, to.Model)
		add("memory_mib", number(vm.Spec.Memory.SizeMiB), number(next.Memory.SizeMiB))
		add("hugepages", strconv.FormatBool(vm.Spec.Memory.Hugepages), strconv.FormatBool(next.Memory.Hugepages))
	}
	return strings.Join(pairs, ",")
}
