package machine

import (
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Guest is what there is of a guest's process.
type Guest uint8

const (
	None          Guest = iota // no process
	Waiting                    // a process whose guest has never run: the launch is not over
	Running                    // guest CPUs run
	Paused                     // QEMU stopped the guest: its disk fails, it panicked
	Off                        // the guest is off, and QEMU about to end
	Unresponsive               // a process that does not answer
	OrphanProcess              // processes that belong to no guest that we know of
)

func (g Guest) String() string {
	return [...]string{"none", "waiting", "running", "paused", "off", "unresponsive", "orphan process"}[g]
}

// Observation is what is on the host of one VM. Durations are by the monotonic clock of this run of the agent; a negative one
// means never.
type Observation struct {
	Exists  bool // anything at all: a directory, a control group
	Refused bool // its disks cannot be made, and trying again will not help
	// Foreign means that the counts are of another cluster, so that nobody who rules now has ruled on this VM before.
	Foreign bool
	Record  Record
	Guest   Guest
	// Trouble says why a guest is held or mute, or how a process ended whose end the record does not have yet.
	Trouble string
	// Exit of such a process.
	Exit cloud.Exit
	// Recoverable is set when a held guest may go on by itself after a while: its disk was full.
	Recoverable bool
	// Error is the last step's, until a step succeeds.
	Error string

	OffFor     time.Duration // since power off was first wanted of this guest
	PressedFor time.Duration // since the power button was last pressed
	RebootFor  time.Duration // since a reboot was begun
	PausedFor  time.Duration // since the guest was first seen held
}

// Action is what to do next.
type Action uint8

const (
	Nothing              Action = iota
	Build                       // make the disks
	Start                       // record the start, then launch
	Resume                      // let a launched guest run
	PressPowerButton            // the power button
	PowerOff                    // end the processes, by power off
	RecordExit                  // record how a process ended that is no more, and clean up after it
	Reset                       // record the reset, then press the reset button
	Reboot                      // record that a reboot is begun
	Relaunch                    // end a reboot: the guest has gone down, launch it again
	Restart                     // end a reboot: the guest does not go down, press the reset button
	AckStart                    // record that the guest that runs is what the latest start asked for
	ResumeAfterDiskError        // let a held guest go on
	AdoptCounters               // record that the counts are of this cluster
	Destroy                     // end everything and remove it
)

func (a Action) String() string {
	return [...]string{"", "build disks", "start", "resume", "press power button", "power off", "record exit",
		"reset", "begin reboot", "relaunch", "reset to end reboot", "acknowledge start", "resume after disk error", "adopt counters", "destroy"}[a]
}

// Times of the plan.
const (
	// pressInterval: a guest that is still booting misses the button, and one that shuts down ignores it.
	pressInterval = 10 * time.Second
	// rebootTimeout is how long a reboot waits for the guest.
	rebootTimeout = 30 * time.Second
	// resumeAfter is how long a guest stays held before it may try again.
	resumeAfter = 30 * time.Second
	// pollInterval is when to look again at a process that does not answer.
	pollInterval = 5 * time.Second
)

// Ways to break the rules of this file, each caught by TestMutants.
const (
	startTwice     = "start-twice"     // a start that is on record is made again
	destroyUnruled = "destroy-unruled" // a VM that nobody has ruled on is destroyed
	judgeForeign   = "judge-foreign"   // records that may be older than a VM rule on it at once
)

// Plan is what to do, and what to say.
type Plan struct {
	Action   Action
	Observed cloud.Observed
	Exit     cloud.Exit
	Error    string
	// Wait is when to look again, with nothing to do; 0: when something happens.
	Wait time.Duration
}

// note is what the host's operator should read.
func (p Plan) note() string {
	if p.Error == startedSince || p.Error == madeSince {
		return p.Error
	}
	return ""
}

// NextAction says what to do next towards want, nil being no wish. It is the whole behaviour of a VM on a host.
func NextAction(want *agentv1.AssignedVm, o Observation) Plan {
	p := plan(want, o)
	if p.Error == "" && p.Observed != cloud.ObservedAbsent {
		p.Error = o.Error
	}
	return p
}

func plan(want *agentv1.AssignedVm, o Observation) Plan {
	power := want.GetPower()
	if mutant.On(destroyUnruled) && want == nil {
		power = agentv1.Power_POWER_DESTROYED
	}
	if o.Foreign && !mutant.On(judgeForeign) {
		if p, ok := planForeign(want, o); ok {
			return p
		}
	}
	switch power {
	case agentv1.Power_POWER_ON:
		return planOn(want, o)
	case agentv1.Power_POWER_OFF:
		return planOff(want, o)
	case agentv1.Power_POWER_DESTROYED:
		if !o.Exists {
			return Plan{Observed: cloud.ObservedAbsent}
		}
		return Plan{Action: Destroy, Observed: removalState(o)}
	case agentv1.Power_POWER_ORPHANED:
		switch {
		case !o.Exists:
			return Plan{Observed: cloud.ObservedAbsent}
		case o.Guest != None:
			return Plan{Action: PowerOff, Observed: cloud.ObservedStopping}
		case o.Record.Live:
			return Plan{Action: RecordExit, Observed: cloud.ObservedBuilt}
		}
		return Plan{Observed: cloud.ObservedBuilt, Error: "no record knows this VM; its disks are kept"}
	}
	return reportOnly(o)
}

// What is said of guests that a cluster's records do not explain. It was made of older ones.
const (
	startedSince = "it was started after the backup that the records are of, which have it off: start it to keep it, and then stop it if it should be off"
	stoppedSince = "it was stopped after the backup that the records are of, which have it on: start it if it should run"
	madeSince    = "no record knows this VM, which is of before this cluster: its guest is left alone until it ends, its disks are kept"
)

// planForeign is the first word of a cluster on a VM that ran under another; ok is false when it is like any other. The records
// may be older than what is here, so what they do not explain is kept, and said.
func planForeign(want *agentv1.AssignedVm, o Observation) (p Plan, ok bool) {
	p = reportOnly(o)
	switch power := want.GetPower(); {
	case power == agentv1.Power_POWER_ORPHANED && o.Guest != None:
		p.Error = madeSince
	case power == agentv1.Power_POWER_OFF && o.Guest != None && o.Record.StartsDone > want.GetStarts():
		p.Error = startedSince
	case power == agentv1.Power_POWER_OFF || power == agentv1.Power_POWER_ON:
		p.Action = AdoptCounters
	default:
		return Plan{}, false
	}
	return p, true
}

// reportOnly is what to say of a VM that nobody has ruled on.
func reportOnly(o Observation) Plan {
	switch o.Guest {
	case Waiting:
		return Plan{Observed: cloud.ObservedLaunching}
	case Running:
		return Plan{Observed: cloud.ObservedRunning}
	case OrphanProcess:
		return Plan{Observed: cloud.ObservedRunning, Error: "processes run whose start this host has no record of", Wait: pollInterval}
	case Paused:
		return Plan{Observed: cloud.ObservedRunning, Error: o.Trouble}
	case Unresponsive:
		return Plan{Observed: cloud.ObservedRunning, Error: o.Trouble, Wait: pollInterval}
	case Off:
		return Plan{Observed: cloud.ObservedStopping, Wait: pollInterval}
	}
	switch {
	case !o.Exists:
		return Plan{Observed: cloud.ObservedAbsent}
	case o.Record.Live:
		return exitReport(o)
	case !o.Record.Built:
		return Plan{Observed: cloud.ObservedBuilding}
	case o.Record.End.Exit == cloud.ExitGuest || o.Record.End.Exit == cloud.ExitFailed:
		return exitReport(o)
	}
	return Plan{Observed: cloud.ObservedBuilt}
}

// removalState is what to say of a VM that is about to be removed.
func removalState(o Observation) cloud.Observed {
	if o.Guest == None {
		return cloud.ObservedBuilt
	}
	return cloud.ObservedStopping
}

// exitReport is the report of an end that nobody asked for.
func exitReport(o Observation) Plan {
	if o.Record.Live {
		return Plan{Observed: cloud.ObservedEnded, Exit: o.Exit, Error: o.Trouble}
	}
	return Plan{Observed: cloud.ObservedEnded, Exit: o.Record.End.Exit, Error: o.Record.End.Error}
}

// planBuild is the way to complete disks; ok is false when they are complete.
func planBuild(o Observation) (Plan, bool) {
	switch {
	case o.Record.Built || o.Guest != None:
		return Plan{}, false
	case o.Refused:
		return Plan{Observed: cloud.ObservedBuildFailed}, true
	}
	return Plan{Action: Build, Observed: cloud.ObservedBuilding}, true
}

func planOn(want *agentv1.AssignedVm, o Observation) Plan {
	if p, ok := planBuild(o); ok {
		return p
	}
	r := o.Record
	due := r.StartsDone < want.GetStarts() || mutant.On(startTwice) && want.GetStarts() > 0
	switch o.Guest {
	case None:
		switch {
		case r.Live && r.rebooting() && o.Exit != cloud.ExitFailed:
			return Plan{Action: Relaunch, Observed: cloud.ObservedRunning}
		case r.Live:
			p := exitReport(o)
			p.Action = RecordExit
			return p
		case due:
			return Plan{Action: Start, Observed: cloud.ObservedLaunching}
		case r.StartsDone == 0:
			return Plan{Observed: cloud.ObservedBuilt}
		}
		return exitReport(o)
	case OrphanProcess:
		return Plan{Action: PowerOff, Observed: cloud.ObservedStopping}
	case Waiting:
		return Plan{Action: Resume, Observed: cloud.ObservedLaunching}
	case Off:
		return Plan{Observed: cloud.ObservedRunning, Wait: pollInterval}
	}
	if due {
		return Plan{Action: AckStart, Observed: cloud.ObservedRunning}
	}
	return planRunning(want, o)
}

// planRunning is what a guest that is wanted on, and is, may still be asked for.
func planRunning(want *agentv1.AssignedVm, o Observation) Plan {
	r := o.Record
	p := Plan{Observed: cloud.ObservedRunning, Error: o.Trouble}
	switch {
	case want.GetResets() > r.ResetsDone:
		p.Action = Reset
	case want.GetReboots() > r.RebootsBegun:
		p.Action = Reboot
	case r.rebooting() && (o.Guest == Paused || o.RebootFor >= rebootTimeout):
		p.Action = Restart
	case r.rebooting() && o.Guest == Running:
		p.Action, p.Wait = pressOrWait(o, rebootTimeout-o.RebootFor)
	case r.rebooting():
		p.Wait = rebootTimeout - o.RebootFor
	case o.Guest == Paused && o.Recoverable && o.PausedFor >= resumeAfter:
		p.Action = ResumeAfterDiskError
	case o.Guest == Paused && o.Recoverable:
		p.Wait = resumeAfter - o.PausedFor
	case o.Guest == Unresponsive:
		p.Wait = pollInterval
	}
	return p
}

// pressOrWait presses the button, at once or again after a while, or waits for whichever is first: that, or left.
func pressOrWait(o Observation, left time.Duration) (Action, time.Duration) {
	if o.PressedFor < 0 || o.PressedFor >= pressInterval {
		return PressPowerButton, 0
	}
	return Nothing, min(left, pressInterval-o.PressedFor)
}

func planOff(want *agentv1.AssignedVm, o Observation) Plan {
	if p, ok := planBuild(o); ok {
		return p
	}
	grace := time.Duration(min(want.GetStopGraceMs(), maxGraceMS)) * time.Millisecond
	switch o.Guest {
	case None:
		if o.Record.Live {
			return Plan{Action: RecordExit, Observed: cloud.ObservedBuilt}
		}
		return Plan{Observed: cloud.ObservedBuilt}
	case Off:
		if o.OffFor >= grace {
			return Plan{Action: PowerOff, Observed: cloud.ObservedStopping}
		}
		return Plan{Observed: cloud.ObservedStopping, Wait: min(grace-o.OffFor, pollInterval)}
	case Waiting, Paused, OrphanProcess: // none of them could answer the button
		return Plan{Action: PowerOff, Observed: cloud.ObservedStopping}
	}
	p := Plan{Observed: cloud.ObservedStopping, Error: o.Trouble}
	switch {
	case o.OffFor >= grace:
		p.Action = PowerOff
	case o.Guest == Running:
		p.Action, p.Wait = pressOrWait(o, grace-o.OffFor)
	default:
		p.Wait = min(grace-o.OffFor, pollInterval)
	}
	return p
}

// maxGraceMS is more than any stop may take (cloud.MaxStopSeconds), and fits a duration.
const maxGraceMS = 24 * 3600 * 1000
