package cloud

import (
	"slices"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Times in milliseconds after which the leader ends a transient state of a VM with the event TimedOut. For STOPPING,
// the time is StoppingTime + Desired.GraceMS.
const (
	CreatingTime = 30 * 60_000
	StartingTime = 120_000
	StoppingTime = 60_000
)

// RestartPolicy is the metadata key of a VM's restart policy. With "never", the default, a VM whose process died is not
// started again. With "on-failure", it is.
const RestartPolicy = "trivet/restart"

// MetadataTokens is the metadata key of a VM that decides whether the metadata service answers its guest without a
// session token. With "required", the default, it does not. With "optional", it does.
const MetadataTokens = "trivet/metadata-tokens"

// GuestExec is the metadata key of a VM that decides whether members of its project may run programs in its guest. With
// "refused", the default, they may not. With "allowed", they may.
const GuestExec = "trivet/guest-exec"

// TokensOptional reports whether the metadata service answers the guest without a session token.
func (vm *VM) TokensOptional() bool { return vm.Metadata[MetadataTokens] == "optional" }

// RestartLimit is the maximum number of automatic starts of a VM within RestartWindow, which is in milliseconds. If the
// VM's process dies again within that time, the VM stays in ERROR.
const (
	RestartLimit  = 3
	RestartWindow = 10 * 60_000
)

// Apply changes the VM's state and desired state after the event ev, which occurred at the time now. The table next
// contains the transitions. If it has none for the VM's state and ev, Apply returns FailedPrecondition and changes
// nothing.
func (vm *VM) Apply(ev Event, now Time) error {
	to, ok := next[vm.State][ev]
	if !ok {
		return fault.New(fault.FailedPrecondition, "cannot %s VM %s: it is %s", ev.verb(), vm.Name, vm.State)
	}
	vm.applyToDesired(ev, now)
	vm.enter(to, ev, now)
	return nil
}

// verb returns the word for the event in error messages. For an event that an API call causes, it is the word for the
// call.
func (e Event) verb() string {
	switch e {
	case PowerOffRequested:
		return "stop"
	case ForceDeleteRequested:
		return "delete"
	}
	return e.String()
}

// applyToDesired changes vm.Desired as the event ev requires. Call it before the method enter, because it uses the
// state that the VM had before the event.
func (vm *VM) applyToDesired(ev Event, now Time) {
	w := vm.Desired
	switch ev {
	case StartRequested:
		switch vm.State {
		case Stopped, Error:
			w = vm.Desired.withStart()
		case Pending, Creating:
			if !w.On {
				w = vm.Desired.withStart()
			}
		case Stopping:
			w.StartAfterStop = true
		}
	case StopRequested, PowerOffRequested:
		w.On, w.StartAfterStop = false, false
	case GuestOff, LaunchFailed:
		w.On = false
	case HostLost:
		if w.On || w.StartAfterStop {
			w = w.withStart()
		}
	case Died:
		if vm.mayRestart(now) {
			w.Starts++
			vm.Restarts = append(vm.Restarts, now)
		} else {
			w.On = false
		}
	}
	vm.setDesired(w)
}

// withStart returns a copy of w that is on and has one more requested start.
func (w Desired) withStart() Desired {
	w.On, w.StartAfterStop, w.GraceMS = true, false, 0
	w.Starts++
	return w
}

// setDesired replaces vm.Desired and increases the generation if the value differs.
func (vm *VM) setDesired(w Desired) {
	if w != vm.Desired {
		vm.Desired = w
		vm.Generation++
	}
}

// enter changes the VM's state to the state in the parameter to because of the event ev, records the change in
// vm.History, and sets the deadline of the new state. In two cases the new state is STARTING instead: if to is STOPPED
// but the VM should be on, and if to is ERROR but the VM's restart policy starts the VM again.
func (vm *VM) enter(to State, ev Event, now Time) {
	switch {
	case to == Stopped && vm.Desired.StartAfterStop:
		vm.setDesired(vm.Desired.withStart())
		to = Starting
	case to == Stopped && vm.Desired.On:
		to = Starting
	case to == Error && vm.Desired.On && vm.State == Running:
		to = Starting
	}
	if to == vm.State && to != Stopping {
		return
	}
	vm.recordTransition(to, ev, now)
	vm.State = to
	if to == Running || to == Stopped || to == Error || to == Failed {
		vm.Recovery = nil
	}
	switch to {
	case Creating:
		vm.Deadline = now + CreatingTime
	case Starting:
		vm.Deadline = now + StartingTime
	case Stopping:
		vm.Deadline = now + int64(vm.Desired.GraceMS) + StoppingTime
	default:
		vm.Deadline = 0
	}
}

// mayRestart reports whether a VM whose process died is to be started again. That requires the policy "on-failure", or
// a VM that RestartsElsewhere, because such a VM also runs again after the loss of its host. It also requires the state
// RUNNING, and that the VM was restarted fewer than RestartLimit times within RestartWindow.
func (vm *VM) mayRestart(now Time) bool {
	if vm.State != Running || vm.Metadata[RestartPolicy] != "on-failure" && !vm.RestartsElsewhere() {
		return false
	}
	vm.Restarts = slices.DeleteFunc(slices.Clone(vm.Restarts), func(t Time) bool { return now-t > RestartWindow })
	return len(vm.Restarts) < RestartLimit
}

// Stop requests that the host presses the VM's power button and powers the VM off after graceMS milliseconds. If the VM
// is already STOPPING, another request can only shorten this time.
func (vm *VM) Stop(graceMS uint64, now Time) error {
	ev := StopRequested
	if graceMS == 0 {
		ev = PowerOffRequested
	}
	before := *vm
	if err := vm.Apply(ev, now); err != nil {
		return err
	}
	if vm.State != Stopping {
		return nil
	}
	w := vm.Desired
	if before.State != Stopping || graceMS < w.GraceMS {
		w.GraceMS = graceMS
		vm.Deadline = now + int64(graceMS) + StoppingTime
	}
	vm.setDesired(w)
	return nil
}

// Reboot requests a reboot of the guest by incrementing Desired.Reboots. It returns FailedPrecondition unless the VM is
// RUNNING.
func (vm *VM) Reboot() error { return vm.pulse("reboot", func(w *Desired) { w.Reboots++ }) }

// Reset requests a hard reset of the VM by incrementing Desired.Resets. It returns FailedPrecondition unless the VM is
// RUNNING.
func (vm *VM) Reset() error { return vm.pulse("reset", func(w *Desired) { w.Resets++ }) }

// pulse calls count on a copy of vm.Desired to increment a counter, and stores the copy. It returns FailedPrecondition
// if the VM is not RUNNING.
func (vm *VM) pulse(verb string, count func(*Desired)) error {
	if vm.State != Running {
		return fault.New(fault.FailedPrecondition, "cannot %s VM %s: it is %s", verb, vm.Name, vm.State)
	}
	w := vm.Desired
	count(&w)
	vm.setDesired(w)
	return nil
}

// Observe updates the VM's state and status from a host's report, which was received at the time now, and returns
// whether the record changed. It ignores a report with an older generation than the VM's, because the host had not
// received the current desired state when it sent the report. NICs that the guest has released, or that could not be
// attached, are removed from the VM's spec: the caller must release their ports, and likewise detach the volumes of
// removed disks. If a pending resize ends, the result of vm.Reserved can be smaller afterwards: the caller must release
// the difference. The caller must check that the VM is placed on the host.
func (vm *VM) Observe(o Observation, now Time) bool {
	if o.Generation < vm.Generation && !mutant.On(mutant.IgnoreGeneration) {
		return false
	}
	before, generation, deadline := vm.Status, vm.Generation, vm.Deadline
	beforeState := vm.State
	nicsChanged := vm.observeNICs(o)
	disksChanged := vm.observeDisks(o)
	resized := vm.observeResize(o)
	for _, ev := range vm.events(o) {
		if _, ok := next[vm.State][ev]; ok {
			vm.applyToDesired(ev, now)
			vm.enter(next[vm.State][ev], ev, now)
		}
	}
	vm.Status = Status{
		Actual: o.actual(), PID: o.PID, StartedAt: o.StartedAt, Addresses: o.Addresses, LastError: o.LastError,
		StartsDone: o.StartsDone, RebootsDone: o.RebootsDone, ResetsDone: o.ResetsDone,
		StopsWithLease: o.StopsWithLease,
	}
	if o.LastError == "" && (vm.State == Error || vm.State == Failed || vm.Migration.explained()) {
		vm.Status.LastError = before.LastError
	}
	if vm.State != beforeState {
		vm.explainTransition(o.LastError)
	}
	return nicsChanged || disksChanged || resized || vm.State != beforeState || vm.Generation != generation || vm.Deadline != deadline || !before.equal(vm.Status)
}

func (s Status) equal(t Status) bool {
	return slices.Equal(s.Addresses, t.Addresses) && s.Actual == t.Actual && s.PID == t.PID && s.StartedAt == t.StartedAt &&
		s.LastError == t.LastError && s.StartsDone == t.StartsDone && s.RebootsDone == t.RebootsDone && s.ResetsDone == t.ResetsDone && s.StopsWithLease == t.StopsWithLease
}

// events returns the events that follow from a host's report, in order. There may be several, because the VM's state
// can have changed several times since the host's last report.
func (vm *VM) events(o Observation) []Event {
	switch o.Observed {
	case ObservedBuilt:
		return vm.offEvents(o)
	case ObservedBuildFailed:
		return []Event{BuildFailed}
	case ObservedLaunching:
		return []Event{Built}
	case ObservedRunning:
		if !vm.Desired.On {
			return nil // the host has not acted on the stop request yet
		}
		return []Event{Built, Up}
	case ObservedEnded:
		return vm.exitEvents(o)
	}
	return nil
}

// offEvents returns the event for a VM that has no process. The event is Built if the VM is CREATING. It is also Built
// if the VM is in ERROR and the host has executed no start, because its creation then finished after the deadline.
// Otherwise the event is Off, with one exception: a VM in ERROR that was neither running nor stopping in the last
// report gets no event. It failed or died, and stays in ERROR so that its owner can read the error.
func (vm *VM) offEvents(o Observation) []Event {
	if vm.State == Creating || vm.State == Error && o.StartsDone == 0 {
		return []Event{Built}
	}
	if a := vm.Status.Actual; vm.State == Error && a != Running && a != Stopping {
		return nil
	}
	return []Event{Off}
}

// exitEvents returns the events for a VM whose process ended. If the VM should be off, it returns what offEvents
// returns. If the VM should be on, but the process that ended is older than the latest requested start, it returns
// none.
func (vm *VM) exitEvents(o Observation) []Event {
	if !vm.Desired.On {
		return vm.offEvents(o)
	}
	if o.StartsDone < vm.Desired.Starts {
		return nil
	}
	var ev Event
	switch {
	case o.Exit == ExitGuest:
		ev = GuestOff
	case vm.State == Creating || vm.State == Starting:
		ev = LaunchFailed
	default:
		ev = Died
	}
	return []Event{Built, ev}
}

// actual returns the VM state that corresponds to the host's report, for the field Status.Actual.
func (o *Observation) actual() State {
	switch o.Observed {
	case ObservedBuilding:
		return Creating
	case ObservedBuilt:
		return Stopped
	case ObservedLaunching:
		return Starting
	case ObservedRunning:
		return Running
	case ObservedStopping:
		return Stopping
	case ObservedBuildFailed:
		return Failed
	case ObservedEnded:
		if o.Exit == ExitFailed {
			return Error
		}
		return Stopped
	}
	return Unspecified
}

// CertainlyOff reports whether no host has a process of the VM. A host starts a VM that is CREATING as soon as its disks
// are complete, if a start was requested. It may not have reported that yet when the VM is stopped or deleted. Therefore
// a VM that is CREATING is certainly off only before the first request to start it.
func (vm *VM) CertainlyOff() bool {
	switch vm.State {
	case Stopped, Failed:
		return true
	case Creating:
		return vm.Desired.Starts == 0 || mutant.On(mutant.CreatingIsOff)
	}
	return false
}

// TimeOut applies the event TimedOut if the deadline of the VM's state has passed. It returns true if it did so.
func (vm *VM) TimeOut(now Time) bool {
	if vm.Deadline == 0 || now < vm.Deadline {
		return false
	}
	was := vm.State
	if err := vm.Apply(TimedOut, now); err != nil {
		return false
	}
	vm.Deadline = 0
	vm.Status.LastError = "the host " + string(vm.Node) + " did not finish " + was.String() + " in time"
	vm.explainTransition(vm.Status.LastError)
	return true
}
