package drain

import (
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Activity classifies a VM on a drained host.
type Activity uint8

const (
	// Off: the VM does not run, and no call has requested that it runs.
	Off Activity = iota
	// Running: the VM runs and can be migrated.
	Running
	// Fixed: the VM runs, or may run, and cannot be migrated.
	Fixed
	// Obstructed: the VM runs, and cannot be migrated until an operator has removed an obstacle that is neither in the VM
	// nor on its host. A forced drain does not shut it down.
	Obstructed
	// Changing: the VM cannot be migrated now, but perhaps soon. It starts, stops, reboots or changes devices, one of
	// its volumes is being changed, or its host does not answer. The drain checks the VM again every second.
	Changing
	// Leaving: the VM is being migrated to another host.
	Leaving
	// Arriving: the VM is being migrated to the drained host.
	Arriving
	// Removing: the VM has left the host or was deleted, and the host has not reported yet that it has removed the VM.
	Removing
)

func (a Activity) String() string {
	return [...]string{"off", "running", "fixed", "obstructed", "changing", "leaving", "arriving", "removing"}[min(a, Removing)]
}

// Blocks reports whether a VM with this activity keeps the host from entering maintenance.
func (a Activity) Blocks() bool { return a != Off && !mutant.On(mutant.MaintenanceEarly) }

// rank orders VMs: those that do not run are last.
func (a Activity) rank() int {
	if a == Off || a == Removing {
		return 1
	}
	return 0
}

// Status is how far the drain is with a VM.
type Status uint8

const (
	// Waiting: the VM is not moved yet.
	Waiting Status = iota
	// Moving: the VM is being moved.
	Moving
	// CannotMove: the VM runs and cannot be moved.
	CannotMove
	// ShuttingDown: the VM is being shut down because it cannot be moved.
	ShuttingDown
	// Stays: the VM does not run and stays on the host.
	Stays
	// Moved: the drain has moved the VM to another host.
	Moved
	// ShutDownDone: the drain has shut the VM down.
	ShutDownDone
)

func (s Status) String() string {
	return [...]string{"WAITING", "MOVING", "CANNOT_MOVE", "SHUTTING_DOWN", "STAYS", "MOVED", "SHUT_DOWN"}[min(s, ShutDownDone)]
}

// ActivityOf returns the activity of a VM on the host with the ID on, and a text that explains it. The parameter
// obstacle is the reason why the VM cannot be migrated although it is RUNNING, or "" if there is none. The parameter
// elsewhere is such a reason on another host (see Obstructed), or "". The parameter temporary is a reason that will
// disappear without an operator, or "". The parameter silent is true if the host does not answer.
func ActivityOf(vm *cloud.VM, on cloud.NodeID, obstacle, elsewhere, temporary string, silent bool) (Activity, string) {
	switch m := vm.Migration; {
	case m != nil && m.Source == on:
		return Leaving, ""
	case m != nil:
		return Arriving, "is being migrated to this host"
	case vm.Node != on:
		return Removing, "has moved; the host has not deleted its files yet"
	}
	wanted := vm.Desired.On || vm.Desired.StartAfterStop
	process := vm.Status.Actual == cloud.Running || vm.Status.Actual == cloud.Starting || vm.Status.Actual == cloud.Stopping
	switch vm.State {
	case cloud.Error:
		if !wanted && !process {
			return Off, "is in ERROR and does not run"
		}
		if !silent {
			return Fixed, "is in ERROR and may still run"
		}
	case cloud.Stopped, cloud.Failed, cloud.Creating:
		if !wanted && vm.CertainlyOff() {
			return Off, "is " + vm.State.String() + " and stays on this host"
		}
	}
	switch {
	case silent:
		return Changing, "is on a host that does not answer"
	case vm.State != cloud.Running:
		return Changing, "is " + vm.State.String()
	case !vm.Desired.On:
		return Changing, "was requested to stop"
	case vm.Desired.Reboots > vm.Status.RebootsDone || vm.Desired.Resets > vm.Status.ResetsDone:
		return Changing, "is being rebooted"
	case changesDevices(vm):
		return Changing, "has a device that is being attached or detached"
	case obstacle != "":
		return Fixed, obstacle
	case elsewhere != "":
		return Obstructed, elsewhere
	case temporary != "":
		return Changing, temporary
	}
	return Running, ""
}

func changesDevices(vm *cloud.VM) bool {
	return slices.ContainsFunc(vm.Spec.Disks, func(d cloud.Disk) bool { return d.Change != cloud.DeviceUnchanged }) ||
		slices.ContainsFunc(vm.Spec.Network, func(n cloud.NIC) bool { return n.Change != cloud.DeviceUnchanged })
}
