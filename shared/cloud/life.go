package cloud

import (
	"slices"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Time that a transient state may take before the leader settles it (milliseconds). Stopping adds its grace.
const (
	CreatingTime = 30 * 60_000
	StartingTime = 120_000
	StoppingTime = 60_000
)

// RestartPolicy is the metadata key of the restart policy: "never" (default) or "on-failure".
const RestartPolicy = "trivet/restart"

// RestartLimit automatic starts within RestartWindow (milliseconds); the next death leaves the VM in ERROR.
const (
	RestartLimit  = 3
	RestartWindow = 10 * 60_000
)

// On lets an event happen at now. Refused, it returns a FailedPrecondition and has changed nothing.
func (vm *VM) On(ev Event, now Time) error {
	to, ok := next[vm.State][ev]
	if !ok {
		return fault.New(fault.FailedPrecondition, "cannot %s VM %s: it is %s", ev.verb(), vm.Name, vm.State)
	}
	vm.effect(ev, now)
	vm.enter(to, now)
	return nil
}

// verb is the event as something one asks for.
func (e Event) verb() string {
	switch e {
	case CutAsked:
		return "stop"
	case ForcedDeleteAsked:
		return "delete"
	}
	return e.String()
}

// effect is what an event changes in the wish, judged in the state before it.
func (vm *VM) effect(ev Event, now Time) {
	w := vm.Wish
	switch ev {
	case StartAsked:
		switch vm.State {
		case Stopped, Error:
			w = vm.Wish.started()
		case Pending, Creating:
			if !w.On {
				w = vm.Wish.started()
			}
		case Stopping:
			w.Again = true
		}
	case StopAsked, CutAsked:
		w.On, w.Again = false, false
	case GuestOff, LaunchFailed:
		w.On = false
	case Died:
		if vm.mayRestart(now) {
			w.Starts++
			vm.Restarts = append(vm.Restarts, now)
		} else {
			w.On = false
		}
	}
	vm.wish(w)
}

func (w Wish) started() Wish {
	w.On, w.Again, w.GraceMS = true, false, 0
	w.Starts++
	return w
}

// wish replaces the wish; a different one is a new generation.
func (vm *VM) wish(w Wish) {
	if w != vm.Wish {
		vm.Wish = w
		vm.Generation++
	}
}

// enter moves to a state and sets its deadline. Two states are passed through: STOPPED by what was asked to start
// again, ERROR by what restarts by policy.
func (vm *VM) enter(to State, now Time) {
	switch {
	case to == Stopped && vm.Wish.Again:
		vm.wish(vm.Wish.started())
		to = Starting
	case to == Stopped && vm.Wish.On:
		to = Starting
	case to == Error && vm.Wish.On && vm.State == Running:
		to = Starting
	}
	if to == vm.State && to != Stopping {
		return
	}
	vm.State = to
	switch to {
	case Creating:
		vm.Deadline = now + CreatingTime
	case Starting:
		vm.Deadline = now + StartingTime
	case Stopping:
		vm.Deadline = now + int64(vm.Wish.GraceMS) + StoppingTime
	default:
		vm.Deadline = 0
	}
}

func (vm *VM) mayRestart(now Time) bool {
	if vm.State != Running || vm.Metadata[RestartPolicy] != "on-failure" {
		return false
	}
	vm.Restarts = slices.DeleteFunc(slices.Clone(vm.Restarts), func(t Time) bool { return now-t > RestartWindow })
	return len(vm.Restarts) < RestartLimit
}

// Stop asks for power off: the button, and after graceMS the cut. Asking again while STOPPING can only shorten the
// grace.
func (vm *VM) Stop(graceMS uint64, now Time) error {
	ev := StopAsked
	if graceMS == 0 {
		ev = CutAsked
	}
	before := *vm
	if err := vm.On(ev, now); err != nil {
		return err
	}
	if vm.State != Stopping {
		return nil
	}
	w := vm.Wish
	if before.State != Stopping || graceMS < w.GraceMS {
		w.GraceMS = graceMS
		vm.Deadline = now + int64(graceMS) + StoppingTime
	}
	vm.wish(w)
	return nil
}

// Reboot and Reset count a wish that the host does once. Only what runs can be rebooted.
func (vm *VM) Reboot() error { return vm.pulse("reboot", func(w *Wish) { w.Reboots++ }) }

// Reset presses the reset button.
func (vm *VM) Reset() error { return vm.pulse("reset", func(w *Wish) { w.Resets++ }) }

func (vm *VM) pulse(verb string, count func(*Wish)) error {
	if vm.State != Running {
		return fault.New(fault.FailedPrecondition, "cannot %s VM %s: it is %s", verb, vm.Name, vm.State)
	}
	w := vm.Wish
	count(&w)
	vm.wish(w)
	return nil
}

// Observe takes a host's report at now and says whether the record changed. Reports of an older generation, or from a
// host that does not own the VM (the caller checks), say nothing about what is wanted now and are dropped.
func (vm *VM) Observe(o Observation, now Time) bool {
	if o.Generation < vm.Generation && !mutant.On(mutant.IgnoreGeneration) {
		return false
	}
	before, generation, deadline := vm.Status, vm.Generation, vm.Deadline
	beforeState := vm.State
	for _, ev := range vm.events(o) {
		if _, ok := next[vm.State][ev]; ok {
			vm.effect(ev, now)
			vm.enter(next[vm.State][ev], now)
		}
	}
	vm.Status = Status{
		Actual: o.actual(), PID: o.PID, StartedAt: o.StartedAt, Addresses: o.Addresses, LastError: o.LastError,
		StartsDone: o.StartsDone, RebootsDone: o.RebootsDone, ResetsDone: o.ResetsDone,
	}
	if o.LastError == "" && (vm.State == Error || vm.State == Failed) {
		vm.Status.LastError = before.LastError
	}
	return vm.State != beforeState || vm.Generation != generation || vm.Deadline != deadline || !before.equal(vm.Status)
}

func (s Status) equal(t Status) bool {
	return slices.Equal(s.Addresses, t.Addresses) && s.Actual == t.Actual && s.PID == t.PID && s.StartedAt == t.StartedAt &&
		s.LastError == t.LastError && s.StartsDone == t.StartsDone && s.RebootsDone == t.RebootsDone && s.ResetsDone == t.ResetsDone
}

// events is what a level means, in order: a host may have gone through several steps since it last spoke.
func (vm *VM) events(o Observation) []Event {
	switch o.Observed {
	case ObservedBuilt:
		return vm.off(o)
	case ObservedBuildFailed:
		return []Event{BuildFailed}
	case ObservedLaunching:
		return []Event{Built}
	case ObservedRunning:
		if !vm.Wish.On {
			return nil // told to stop, and has not yet looked
		}
		return []Event{Built, Up}
	case ObservedEnded:
		return vm.ended(o)
	}
	return nil
}

// off is the sight of a VM without a process. In ERROR it counts only for one that was last seen on, so after a stop that
// came too late; what failed or died stays in ERROR to be read.
func (vm *VM) off(o Observation) []Event {
	if vm.State == Creating || vm.State == Error && o.StartsDone == 0 {
		return []Event{Built}
	}
	if a := vm.Status.Actual; vm.State == Error && a != Running && a != Stopping {
		return nil
	}
	return []Event{Off}
}

// ended is the end of a VM. One that was wanted on counts only if the last start that was asked for is the one that
// ended.
func (vm *VM) ended(o Observation) []Event {
	if !vm.Wish.On {
		return vm.off(o)
	}
	if o.StartsDone < vm.Wish.Starts {
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

// TimeOut settles a transient state whose deadline has passed, and says whether it did.
func (vm *VM) TimeOut(now Time) bool {
	if vm.Deadline == 0 || now < vm.Deadline {
		return false
	}
	was := vm.State
	if err := vm.On(TimedOut, now); err != nil {
		return false
	}
	vm.Deadline = 0
	vm.Status.LastError = "the host " + string(vm.Node) + " did not finish " + was.String() + " in time"
	return true
}
