package cloud

import (
	"reflect"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// PendingResize is the metadata key with which the API shows a resize that takes effect at the next start of the VM. Its
// value has the new values that differ from the spec, such as "vcpus=4,memory_mib=2048". It is computed, and never part
// of VM.Metadata.
const PendingResize = "trivet/pending-resize"

// Resize is a change of a VM's processors and memory that was requested while the VM may have had a process. The host
// uses the new values for the next process of the VM.
type Resize struct {
	CPU    CPU
	Memory Memory
	// Generation is the first generation of the desired state with these values.
	Generation uint64
	// Reserved has the most processors and memory that the VM may use until the resize has taken effect. Its StorageGiB
	// is 0.
	Reserved Capacity
}

// Reserved returns the capacity that the VM uses of its host and of its quota. While a resize is pending, that is the
// larger of the old and the new value of processors and memory, because the host can start the new process at any time.
func (vm *VM) Reserved() Capacity {
	need := vm.Spec.Need()
	if vm.Resize != nil {
		need.VCPUs, need.MemoryMiB = vm.Resize.Reserved.VCPUs, vm.Resize.Reserved.MemoryMiB
	}
	return need
}

// NextSpec returns the spec with which the host starts the next process of the VM. It differs from Spec while a resize is
// pending.
func (vm *VM) NextSpec() Spec {
	spec := vm.Spec
	if vm.Resize != nil {
		cpu, memory := vm.Resize.CPU, vm.Resize.Memory
		spec.CPU, spec.Memory = &cpu, &memory
	}
	return spec
}

// ResizeAtNextStart records that the next process of the VM gets the processors and memory of spec. The caller must
// reserve what Reserved then returns. It returns FailedPrecondition if the VM's state does not allow that.
func (vm *VM) ResizeAtNextStart(spec *Spec) error {
	switch vm.State {
	case Starting, Running, Stopping, Error:
	default:
		return fault.New(fault.FailedPrecondition, "cannot resize VM %s: it is %s", vm.Name, vm.State)
	}
	reserved, need := vm.Reserved(), spec.Need()
	if mutant.On(mutant.ReserveNewSize) {
		reserved = Capacity{}
	}
	vm.Generation++
	vm.Resize = &Resize{CPU: *spec.CPU, Memory: *spec.Memory, Generation: vm.Generation, Reserved: Capacity{
		VCPUs: max(reserved.VCPUs, need.VCPUs), MemoryMiB: max(reserved.MemoryMiB, need.MemoryMiB),
	}}
	return nil
}

// endResize makes the values of a pending resize those of the spec.
func (vm *VM) endResize() {
	if vm.Resize != nil {
		vm.Spec, vm.Resize = vm.NextSpec(), nil
	}
}

// observeResize ends a pending resize if a host's report, which must not be of an older generation than the VM's, shows
// that it has taken effect: the VM has no process, so that its next process has the new values, or its process has
// them. It returns whether it ended one. Agents that do not report the values of the process end a resize only by the
// first case.
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
		add("sockets", number(uint64(from.Sockets)), number(uint64(to.Sockets)))
		add("cores_per_socket", number(uint64(from.CoresPerSocket)), number(uint64(to.CoresPerSocket)))
		add("cpu_model", from.Model, to.Model)
		add("memory_mib", number(vm.Spec.Memory.SizeMiB), number(next.Memory.SizeMiB))
	}
	return strings.Join(pairs, ",")
}
