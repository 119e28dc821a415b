// Package drain decides what happens next to the VMs on a host that is drained. The main function is Next. The package
// is pure: it takes values and the time now, and does no I/O. Package vm of the VM controller carries the decisions out.
//
// Decisions:
//   - VMs with a higher priority (the metadata trivet/ha-priority) are moved first, and of equal ones the older first.
//     At most Parallel VMs leave a host at a time, so that each migration gets enough bandwidth to end.
//   - A VM whose move has failed is tried again after a time that doubles from RetryFirst to RetryMax. After MaxTries
//     failures it is not tried again. One failing VM does not delay the others.
//   - With force, VMs that cannot be moved are shut down, but only when no other VM moves or can be moved: until then a
//     move may make room, and the operator can still cancel the drain. VMs that start, stop or reboot delay this for a
//     limited time only. VMs that cannot be moved because of another host, such as one with an old agent, are never shut
//     down: an upgrade of that host helps, and they run on meanwhile.
//   - A STOPPED VM all of whose disks are volumes that other hosts can use gets another host without a migration. Any
//     other VM that does not run and is not to run stays on the host, and does not prevent maintenance.
package drain

import (
	"cmp"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Limits on the moves of a drain.
const (
	// Parallel is the maximum number of VMs that leave one drained host at a time.
	Parallel = 2
	// MaxArriving is the maximum number of VMs that drains move to one host at a time.
	MaxArriving = 2
	// maxRelocations is the maximum number of VMs that Next relocates at a time.
	maxRelocations = 20
	// MaxTries is the number of failed tries after which a VM is not tried again.
	MaxTries = 10
	// hopelessTries is the number of failed tries after which a VM counts as one that cannot be moved. It is still tried
	// again.
	hopelessTries = 2

	RetryFirst = 10 * time.Second
	RetryMax   = 5 * time.Minute
	// RetryBusy is the time after which a VM is tried again whose possible hosts all receive other VMs.
	RetryBusy = 5 * time.Second
	// changingPatience is the time from the begin of a forced drain for which VMs that change or arrive delay the shutdown
	// of others. Without this limit, a VM that its user starts or reboots again and again would delay it for ever.
	changingPatience = 10 * time.Minute
)

// RetryAfter returns the time between a failed try and the next one. tries is the number of failed tries, at least 1.
func RetryAfter(tries int) time.Duration {
	return min(RetryFirst<<min(tries-1, 10), RetryMax)
}

// VM is a VM on the drained host, or one that has left it and is not removed from it yet.
type VM struct {
	ID       cloud.VMID
	Priority int
	Activity Activity
	// Why explains the activity, as the predicate of a sentence whose subject is the VM.
	Why string
	// Portable is true if the VM is Off and can get another host without a migration. NoHost is why this failed, or empty
	// if it was not tried.
	Portable bool
	NoHost   string
	// Tries is the number of tries to move the VM that have failed. Error is why the last one failed, and Next the time
	// before which the VM is not tried again.
	Tries int
	Next  cloud.Time
	Error string
}

// Action names the step that the leader takes for a VM of a drained host.
type Action uint8

const (
	Wait Action = iota
	// Move begins a migration to another host.
	Move
	// ShutDown presses the power button of the VM, and powers it off if the guest does not shut down.
	ShutDown
	// CancelArrival cancels the migration of the VM to the drained host.
	CancelArrival
	// Relocate gives a VM that does not run another host.
	Relocate
)

func (a Action) String() string {
	return [...]string{"wait", "move", "shut down", "cancel arrival", "relocate"}[min(a, Relocate)]
}

// Decision is the decision for one VM.
type Decision struct {
	VM     cloud.VMID
	Do     Action
	Status Status
	// Reason explains the status. It can be empty.
	Reason string
}

// Plan is the result of Next.
type Plan struct {
	// Decisions has one decision for each VM, in the order in which VMs are moved. VMs that are not moved are last.
	Decisions []Decision
	// Empty is true if no VM runs on the host or will run there.
	Empty bool
	// Expired is true if the deadline of the drain has passed. No VM is moved or shut down then.
	Expired bool
}

// Next returns what the leader does next with the VMs on a drained host.
func Next(d *cloud.Drain, vms []VM, now cloud.Time) Plan {
	vms = slices.Clone(vms)
	slices.SortStableFunc(vms, func(a, b VM) int {
		return cmp.Or(cmp.Compare(a.Activity.rank(), b.Activity.rank()), cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.ID, b.ID))
	})
	p := Plan{Empty: true, Expired: now >= d.Deadline}
	leaving, relocated, hopeful := 0, 0, false
	for i := range vms {
		vm := &vms[i]
		if vm.Activity == Leaving {
			leaving++
		}
		hopeful = hopeful || vm.hopeful(now < d.Began+changingPatience.Milliseconds())
		p.Empty = p.Empty && !vm.Activity.Blocks() && !vm.relocatable()
	}
	for i := range vms {
		one := vms[i].decide(now, leaving < Parallel && !p.Expired)
		if one.Do == Move {
			leaving++
		}
		if vms[i].relocatable() && !p.Expired && relocated < maxRelocations {
			one.Do, one.Status = Relocate, Waiting
			relocated++
		}
		may := vms[i].Activity != Obstructed || mutant.On(mutant.ShutDownObstructed)
		if !p.Expired && one.Status == CannotMove && d.Force && may && (!hopeful || mutant.On(mutant.ShutDownMovable)) {
			one.Do, one.Status = ShutDown, ShuttingDown
		}
		p.Decisions = append(p.Decisions, one)
	}
	return p
}

// relocatable reports whether the VM can get another host without a migration, and this was not tried yet.
func (vm *VM) relocatable() bool { return vm.Activity == Off && vm.Portable && vm.NoHost == "" }

// hopeful reports whether a forced drain must still wait for this VM before it shuts others down: the VM is about to leave
// the host or to stop, or may still be moved. If patient is false, VMs that change or arrive do not count.
func (vm *VM) hopeful(patient bool) bool {
	switch vm.Activity {
	case Running:
		return vm.Tries < hopelessTries
	case Changing, Arriving:
		return patient
	case Leaving:
		return true
	}
	return false
}

// decide returns the decision for the VM without regard to force. The parameter room is true if another VM may leave
// the host.
func (vm *VM) decide(now cloud.Time, room bool) Decision {
	out := Decision{VM: vm.ID, Status: Waiting, Reason: vm.Why}
	switch vm.Activity {
	case Off:
		out.Status = Stays
		if vm.Portable && vm.NoHost != "" {
			out.Reason += ": " + vm.NoHost
		}
	case Fixed, Obstructed:
		out.Status = CannotMove
	case Leaving:
		out.Status = Moving
	case Arriving:
		out.Do = CancelArrival
	case Running:
		out.Reason = vm.Error
		if vm.Tries >= hopelessTries {
			out.Status = CannotMove
		}
		if room && now >= vm.Next && vm.Tries < MaxTries {
			out.Do = Move
		}
	}
	return out
}
