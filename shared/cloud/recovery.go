package cloud

import (
	"strconv"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Keys of the metadata of a VM that decide what happens when the VM's host is lost.
const (
	// HighAvailability is "none", the default, or "restart". With "restart", the control plane starts the VM on another
	// host after its host is lost, if all disks of the VM are volumes that several hosts can use, and no other state of it is on its host only (see
	// VM.StateOnHost). In return, the VM's
	// host powers the VM off when the host's lease ends, because the host must assume then that it counts as lost.
	HighAvailability = "trivet/ha"
	// HAPriority is a number from 0 to 100, by default 50. Of the VMs that wait for a new host, those with a higher
	// number are placed first.
	HAPriority = "trivet/ha-priority"
)

const (
	// DefaultHAPriority is the priority of a VM without HAPriority.
	DefaultHAPriority = 50
	// MaxHAPriority is the greatest value of HAPriority.
	MaxHAPriority = 100
)

// CheckHighAvailability returns InvalidArgument if the metadata of a VM has an invalid value for HighAvailability or
// HAPriority.
func CheckHighAvailability(metadata map[string]string) error {
	switch p := metadata[HighAvailability]; p {
	case "", "none", "restart":
	default:
		return fault.Invalid("metadata", "%s must be none or restart, not %q", HighAvailability, p)
	}
	if text := metadata[HAPriority]; text != "" {
		if n, err := strconv.Atoi(text); err != nil || n < 0 || n > MaxHAPriority {
			return fault.Invalid("metadata", "%s must be a number from 0 to %d, not %q", HAPriority, MaxHAPriority, text)
		}
	}
	return nil
}

// RestartsElsewhere reports whether the VM is started on another host when its host is lost.
func (vm *VM) RestartsElsewhere() bool { return vm.Metadata[HighAvailability] == "restart" }

// Priority returns the VM's priority among the VMs that wait for a new host.
func (vm *VM) Priority() int {
	if n, err := strconv.Atoi(vm.Metadata[HAPriority]); err == nil && n >= 0 && n <= MaxHAPriority {
		return n
	}
	return DefaultHAPriority
}

// Recovery describes the move of a VM from a lost host to another one.
type Recovery struct {
	// From is the lost host, and Began the time at which the VM lost it.
	From  NodeID
	Began Time
}

// LoseHost changes a VM whose host is fenced to PENDING, without a host. The caller must make sure that the host can
// neither run the VM nor write to its volumes. A VM that should run is started again on its next host, with the size of
// a pending resize. The result of vm.Reserved can be smaller afterwards: the caller must release the difference.
// LoseHost returns FailedPrecondition if the VM has no host, or if its state does not allow the event HostLost.
func (vm *VM) LoseHost(now Time) error { return vm.leaveHost(HostLost, "its host is lost", now) }

// LeaveDrainedHost changes a STOPPED VM whose host is drained to PENDING, without a host, as LoseHost does. It returns
// FailedPrecondition if the VM is not STOPPED or is to run.
func (vm *VM) LeaveDrainedHost(now Time) error {
	if vm.Desired.On || vm.Desired.StartAfterStop {
		return fault.New(fault.FailedPrecondition, "VM %s is to run", vm.Name)
	}
	return vm.leaveHost(HostDrained, "its host is drained", now)
}

// leaveHost changes the VM to PENDING, without a host, because of the event ev. why is the reason in a text.
func (vm *VM) leaveHost(ev Event, why string, now Time) error {
	lost := vm.Node
	if lost == "" {
		return fault.New(fault.FailedPrecondition, "VM %s is not placed on a host", vm.Name)
	}
	if err := vm.Apply(ev, now); err != nil {
		return err
	}
	vm.Generation++
	vm.endResize()
	vm.Node = ""
	vm.Recovery = &Recovery{From: lost, Began: now}
	vm.Status = Status{LastError: "the VM waits for another host: " + why}
	vm.NICRefusal, vm.DiskRefusal = nil, nil
	return nil
}

// PlaceOn gives a PENDING VM a host, which then builds the VM. The VM becomes CREATING.
func (vm *VM) PlaceOn(node NodeID, now Time) error {
	if err := vm.Apply(Placed, now); err != nil {
		return err
	}
	vm.Node = node
	vm.Generation++
	vm.Status.LastError = ""
	return nil
}

// Recoverable returns "" if the control plane may by itself start the VM on another host after its host has been lost.
// Otherwise it returns the reason, as the predicate of a sentence whose subject is the VM. It does not consider the
// VM's volumes. Unless the caller of an RPC has confirmed that the host is off, the VM's host must have confirmed that it
// powers the VM off when the host's lease ends. Otherwise the VM could run on two hosts.
func (vm *VM) Recoverable(off bool) string {
	switch {
	case vm.Migration != nil:
		return "is being migrated"
	case next[vm.State][HostLost] == Unspecified:
		return "is " + vm.State.String()
	case !vm.RestartsElsewhere():
		return "does not have the metadata " + HighAvailability + "=restart"
	case !vm.Desired.On && !vm.Desired.StartAfterStop:
		return "should not run"
	case !off && !vm.Status.StopsWithLease && !mutant.On(mutant.RecoverUnconfirmed):
		return "runs on a host that has not confirmed to stop it at the end of the host's lease"
	}
	return ""
}

// EndLostAttachment records that the volume's host is fenced while a VM has the volume attached. The VM keeps the volume.
// Another host must end the old attachment before the VM can use the volume there: an RBD volume is fenced in the Ceph
// cluster, and a volume in a shared pool must not be locked any more. The volume must be Movable.
func (v *Volume) EndLostAttachment() {
	v.Ending, v.Migrated = true, false
	if !mutant.On(mutant.KeepLostAttachment) {
		v.AttachmentGeneration = v.grant()
	}
	v.Generation++
	v.Fence = v.Driver == DriverRBD && !v.Flushed()
}
