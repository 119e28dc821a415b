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
	None    Guest = iota // no process
	Waiting              // a process whose guest has never run: the launch is not over
	Running              // guest CPUs run
	Held                 // QEMU stopped the guest: its disk fails, it panicked
	Off                  // the guest is off, and QEMU about to end
	Mute                 // a process that does not answer
	Stray                // processes that belong to no guest that we know of
)

func (g Guest) String() string {
	return [...]string{"none", "waiting", "running", "held", "off", "mute", "stray"}[g]
}

// Sight is what is on the host of one VM. Durations are by the monotonic clock of this run of the agent; a negative one
// means never.
type Sight struct {
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
	// Cure is set when a held guest may go on by itself after a while: its disk was full.
	Cure bool
	// Error is the last step's, until a step succeeds.
	Error string

	OffFor     time.Duration // since power off was first wanted of this guest
	PressedFor time.Duration // since the power button was last pressed
	RebootFor  time.Duration // since a reboot was begun
	HeldFor    time.Duration // since the guest was first seen held
}

// Action is what to do next.
type Action uint8

const (
	Nothing  Action = iota
	Build           // make the disks
	Start           // record the start, then launch
	Go              // let a launched guest run
	Press           // the power button
	Cut             // end the processes, by power off
	Bury            // record how a process ended that is no more, and clean up after it
	Reset           // record the reset, then press the reset button
	Reboot          // record that a reboot is begun
	Relaunch        // end a reboot: the guest has gone down, launch it again
	Restart         // end a reboot: the guest does not go down, press the reset button
	Credit          // record that the guest that runs is what the latest start asked for
	Resume          // let a held guest go on
	Recount         // record that the counts are of this cluster
	Destroy         // end everything and remove it
)

func (a Action) String() string {
	return [...]string{"", "build disks", "start", "let run", "press power button", "cut power", "record end",
		"reset", "begin reboot", "start again", "reset at last", "credit start", "resume", "take over", "destroy"}[a]
}

// Times of the plan.
const (
	// pressAgain: a guest that is still booting misses the button, and one that shuts down ignores it.
	pressAgain = 10 * time.Second
	// hardAfter is how long a reboot waits for the guest.
	hardAfter = 30 * time.Second
	// resumeAfter is how long a guest stays held before it may try again.
	resumeAfter = 30 * time.Second
	// askAgain is when to look again at a process that does not answer.
	askAgain = 5 * time.Second
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

// Decide says what to do next towards want, nil being no wish. It is the whole behaviour of a VM on a host.
func Decide(want *agentv1.AssignedVm, s Sight) Plan {
	p := plan(want, s)
	if p.Error == "" && p.Observed != cloud.ObservedAbsent {
		p.Error = s.Error
	}
	return p
}

func plan(want *agentv1.AssignedVm, s Sight) Plan {
	power := want.GetPower()
	if mutant.On(destroyUnruled) && want == nil {
		power = agentv1.Power_POWER_DESTROYED
	}
	if s.Foreign && !mutant.On(judgeForeign) {
		if p, ok := foreign(want, s); ok {
			return p
		}
	}
	switch power {
	case agentv1.Power_POWER_ON:
		return wantedOn(want, s)
	case agentv1.Power_POWER_OFF:
		return wantedOff(want, s)
	case agentv1.Power_POWER_DESTROYED:
		if !s.Exists {
			return Plan{Observed: cloud.ObservedAbsent}
		}
		return Plan{Action: Destroy, Observed: gone(s)}
	case agentv1.Power_POWER_ORPHANED:
		switch {
		case !s.Exists:
			return Plan{Observed: cloud.ObservedAbsent}
		case s.Guest != None:
			return Plan{Action: Cut, Observed: cloud.ObservedStopping}
		case s.Record.Live:
			return Plan{Action: Bury, Observed: cloud.ObservedBuilt}
		}
		return Plan{Observed: cloud.ObservedBuilt, Error: "no record knows this VM; its disks are kept"}
	}
	return seen(s)
}

// What is said of guests that a cluster's records do not explain. It was made of older ones.
const (
	startedSince = "it was started after the backup that the records are of, which have it off: start it to keep it, and then stop it if it should be off"
	stoppedSince = "it was stopped after the backup that the records are of, which have it on: start it if it should run"
	madeSince    = "no record knows this VM, which is of before this cluster: its guest is left alone until it ends, its disks are kept"
)

// foreign is the first word of a cluster on a VM that ran under another; ok is false when it is like any other. The records
// may be older than what is here, so what they do not explain is kept, and said.
func foreign(want *agentv1.AssignedVm, s Sight) (p Plan, ok bool) {
	p = seen(s)
	switch power := want.GetPower(); {
	case power == agentv1.Power_POWER_ORPHANED && s.Guest != None:
		p.Error = madeSince
	case power == agentv1.Power_POWER_OFF && s.Guest != None && s.Record.StartsDone > want.GetStarts():
		p.Error = startedSince
	case power == agentv1.Power_POWER_OFF || power == agentv1.Power_POWER_ON:
		p.Action = Recount
	default:
		return Plan{}, false
	}
	return p, true
}

// seen is what to say of a VM that nobody has ruled on.
func seen(s Sight) Plan {
	switch s.Guest {
	case Waiting:
		return Plan{Observed: cloud.ObservedLaunching}
	case Running:
		return Plan{Observed: cloud.ObservedRunning}
	case Stray:
		return Plan{Observed: cloud.ObservedRunning, Error: "processes run whose start this host has no record of", Wait: askAgain}
	case Held:
		return Plan{Observed: cloud.ObservedRunning, Error: s.Trouble}
	case Mute:
		return Plan{Observed: cloud.ObservedRunning, Error: s.Trouble, Wait: askAgain}
	case Off:
		return Plan{Observed: cloud.ObservedStopping, Wait: askAgain}
	}
	switch {
	case !s.Exists:
		return Plan{Observed: cloud.ObservedAbsent}
	case s.Record.Live:
		return ended(s)
	case !s.Record.Built:
		return Plan{Observed: cloud.ObservedBuilding}
	case s.Record.End.Exit == cloud.ExitGuest || s.Record.End.Exit == cloud.ExitFailed:
		return ended(s)
	}
	return Plan{Observed: cloud.ObservedBuilt}
}

// gone is what to say of a VM that is about to be removed.
func gone(s Sight) cloud.Observed {
	if s.Guest == None {
		return cloud.ObservedBuilt
	}
	return cloud.ObservedStopping
}

// ended is the report of an end that nobody asked for.
func ended(s Sight) Plan {
	if s.Record.Live {
		return Plan{Observed: cloud.ObservedEnded, Exit: s.Exit, Error: s.Trouble}
	}
	return Plan{Observed: cloud.ObservedEnded, Exit: s.Record.End.Exit, Error: s.Record.End.Error}
}

// building is the way to complete disks; ok is false when they are complete.
func building(s Sight) (Plan, bool) {
	switch {
	case s.Record.Built || s.Guest != None:
		return Plan{}, false
	case s.Refused:
		return Plan{Observed: cloud.ObservedBuildFailed}, true
	}
	return Plan{Action: Build, Observed: cloud.ObservedBuilding}, true
}

func wantedOn(want *agentv1.AssignedVm, s Sight) Plan {
	if p, ok := building(s); ok {
		return p
	}
	r := s.Record
	due := r.StartsDone < want.GetStarts() || mutant.On(startTwice) && want.GetStarts() > 0
	switch s.Guest {
	case None:
		switch {
		case r.Live && r.rebooting() && s.Exit != cloud.ExitFailed:
			return Plan{Action: Relaunch, Observed: cloud.ObservedRunning}
		case r.Live:
			p := ended(s)
			p.Action = Bury
			return p
		case due:
			return Plan{Action: Start, Observed: cloud.ObservedLaunching}
		case r.StartsDone == 0:
			return Plan{Observed: cloud.ObservedBuilt}
		}
		return ended(s)
	case Stray:
		return Plan{Action: Cut, Observed: cloud.ObservedStopping}
	case Waiting:
		return Plan{Action: Go, Observed: cloud.ObservedLaunching}
	case Off:
		return Plan{Observed: cloud.ObservedRunning, Wait: askAgain}
	}
	if due {
		return Plan{Action: Credit, Observed: cloud.ObservedRunning}
	}
	return alive(want, s)
}

// alive is what a guest that is wanted on, and is, may still be asked for.
func alive(want *agentv1.AssignedVm, s Sight) Plan {
	r := s.Record
	p := Plan{Observed: cloud.ObservedRunning, Error: s.Trouble}
	switch {
	case want.GetResets() > r.ResetsDone:
		p.Action = Reset
	case want.GetReboots() > r.RebootsBegun:
		p.Action = Reboot
	case r.rebooting() && (s.Guest == Held || s.RebootFor >= hardAfter):
		p.Action = Restart
	case r.rebooting() && s.Guest == Running:
		p.Action, p.Wait = press(s, hardAfter-s.RebootFor)
	case r.rebooting():
		p.Wait = hardAfter - s.RebootFor
	case s.Guest == Held && s.Cure && s.HeldFor >= resumeAfter:
		p.Action = Resume
	case s.Guest == Held && s.Cure:
		p.Wait = resumeAfter - s.HeldFor
	case s.Guest == Mute:
		p.Wait = askAgain
	}
	return p
}

// press presses the button, at once or again after a while, or waits for whichever is first: that, or left.
func press(s Sight, left time.Duration) (Action, time.Duration) {
	if s.PressedFor < 0 || s.PressedFor >= pressAgain {
		return Press, 0
	}
	return Nothing, min(left, pressAgain-s.PressedFor)
}

func wantedOff(want *agentv1.AssignedVm, s Sight) Plan {
	if p, ok := building(s); ok {
		return p
	}
	grace := time.Duration(min(want.GetStopGraceMs(), maxGraceMS)) * time.Millisecond
	switch s.Guest {
	case None:
		if s.Record.Live {
			return Plan{Action: Bury, Observed: cloud.ObservedBuilt}
		}
		return Plan{Observed: cloud.ObservedBuilt}
	case Off:
		if s.OffFor >= grace {
			return Plan{Action: Cut, Observed: cloud.ObservedStopping}
		}
		return Plan{Observed: cloud.ObservedStopping, Wait: min(grace-s.OffFor, askAgain)}
	case Waiting, Held, Stray: // none of them could answer the button
		return Plan{Action: Cut, Observed: cloud.ObservedStopping}
	}
	p := Plan{Observed: cloud.ObservedStopping, Error: s.Trouble}
	switch {
	case s.OffFor >= grace:
		p.Action = Cut
	case s.Guest == Running:
		p.Action, p.Wait = press(s, grace-s.OffFor)
	default:
		p.Wait = min(grace-s.OffFor, askAgain)
	}
	return p
}

// maxGraceMS is more than any stop may take (cloud.MaxStopSeconds), and fits a duration.
const maxGraceMS = 24 * 3600 * 1000
