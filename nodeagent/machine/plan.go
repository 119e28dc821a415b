package machine

import (
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Guest is the state of a VM's QEMU process and of the guest in it.
type Guest uint8

const (
	None          Guest = iota // no process
	Waiting                    // the process was launched, but its guest CPUs have not run yet
	Arriving                   // QEMU receives the state of a guest from another host
	Running                    // guest CPUs run
	Paused                     // QEMU stopped the guest's CPUs, for example after a disk error
	Off                        // the guest has ended, and QEMU is about to end
	Unresponsive               // QEMU does not respond to QMP commands
	OrphanProcess              // the VM's control group has processes, but the VM has no record of them
)

func (g Guest) String() string {
	return [...]string{"none", "waiting", "arriving", "running", "paused", "off", "unresponsive", "orphan process"}[g]
}

// Observation is the state of one VM on the host. Durations begin at events that this agent process has seen. A
// negative duration means that it has not seen the event.
type Observation struct {
	Exists  bool // the VM has a record, a home or a control group on the host
	Refused bool // the disks cannot be built, and another attempt would fail the same way
	// Foreign means that the record's counters belong to another cluster than the host's: AdoptCounters has not been
	// executed since the host joined its cluster.
	Foreign bool
	// LeaseEnded means that the host's lease has ended. A VM whose record has StopsWithLease must then be off.
	LeaseEnded bool
	Record     Record
	Guest      Guest
	// Trouble is the reason why the guest is Paused or Unresponsive. After the process has failed, it is the reason of
	// the failure, until that is written to Record.
	Trouble string
	// Exit is how the last process ended. It is used until it is written to Record.
	Exit cloud.Exit
	// Recoverable means that a Paused guest may be resumed after a while, because a disk error paused it.
	Recoverable bool
	// Error is the error of the last step, or "" if that step succeeded.
	Error string
	// NICs are the network interfaces of the process. LastNIC is the id of the one that the last PlugNIC or UnplugNIC
	// was for.
	NICs    []qemu.AttachedNIC
	LastNIC string
	// Volumes are the disks of the process that are volumes. LastDisk is the id of the disk of the last PlugDisk,
	// UnplugDisk, ResizeDisk, FlattenDisk or TakeBackDisk.
	Volumes  []qemu.AttachedDisk
	LastDisk string
	// Sizes are the sizes in bytes, by id, of the process's disks that are not volumes.
	Sizes map[string]uint64
	// Transfer is the state of a migration from or to the host.
	Transfer Transfer
	// Guarded means that the guard process runs. It powers off VMs that must not run without a lease, even if the
	// agent has ended.
	Guarded bool
	// Unreleased means that the last process has ended, and that its volumes are not flushed yet.
	Unreleased bool

	OffFor     time.Duration // since power off was first seen as desired for this guest
	PressedFor time.Duration // since the power button was last pressed
	RebootFor  time.Duration // since the reboot began
	PausedFor  time.Duration // since the guest was first seen Paused
}

// Action is one step that changes a VM on the host.
type Action uint8

const (
	Nothing              Action = iota
	Build                       // create the disks
	Start                       // record the start, then launch QEMU
	Resume                      // start the CPUs of a launched guest
	PressPowerButton            // request a shutdown from the guest
	PowerOff                    // end the VM's processes
	RecordExit                  // write the exit of the last process to the record
	Reset                       // record the reset, then reset the guest
	Reboot                      // record that a reboot began
	Relaunch                    // finish a reboot whose guest has shut down: launch QEMU again
	Restart                     // finish a reboot whose guest does not shut down: reset the guest
	AckStart                    // record the latest start as done, because the guest runs already
	ResumeAfterDiskError        // start the CPUs of a guest again that a disk error has paused
	AdoptCounters               // set the record's cluster to the host's, and lower the counters
	PlugNIC                     // attach a network interface to the running guest
	UnplugNIC                   // detach a network interface from the running guest
	PlugDisk                    // attach a volume to the running guest
	UnplugDisk                  // detach a volume from the running guest
	ResizeDisk                  // grow a disk of the guest
	FlattenDisk                 // start, cancel or complete QEMU's copy of a volume's image into the volume
	TakeBackDisk                // get a volume of the running guest back after a migration has failed
	RecordLeaseRule             // write to the record whether the VM must be off after the host's lease has ended
	Destroy                     // end the VM's processes and remove its files
	BeginTransfer               // record that the source begins a migration, then copy the disks to the target
	SendState                   // begin to send the guest's memory to the target
	StopGuest                   // stop the guest, so that QEMU sends the rest of its memory
	CompleteDisks               // end the copies of the disks, and record that they are complete
	HandOver                    // record that the guest may run at the target, then send the rest of its state
	CancelTransfer              // record that the source cancels a migration
	EndTransfer                 // remove all parts of a cancelled migration, and resume the guest
	Receive                     // record that QEMU is launched as the target of a migration, then launch it
	Arrive                      // record that the guest runs at the target, then start its CPUs
	RecordFailure               // record that the migration has failed at the target
	Settle                      // record that the VM's migration to this host has ended
)

func (a Action) String() string {
	return [...]string{"", "build disks", "start", "resume", "press power button", "power off", "record exit",
		"reset", "begin reboot", "relaunch", "reset to end reboot", "acknowledge start", "resume after disk error", "adopt counters", "attach network interface",
		"detach network interface", "attach disk", "detach disk", "resize disk", "flatten disk", "take back disk", "record lease rule", "destroy",
		"begin transfer", "send state", "stop guest", "complete disks", "hand over", "cancel transfer", "end transfer", "receive guest", "continue guest", "record failure",
		"end migration"}[a]
}

// Durations that NextAction uses.
const (
	// pressInterval is the time between two presses of the power button. A guest that is still booting ignores the
	// first press, and a guest that is shutting down ignores further ones.
	pressInterval = 10 * time.Second
	// rebootTimeout is how long a reboot waits for the guest to shut down.
	rebootTimeout = 30 * time.Second
	// resumeAfter is how long a guest stays paused after a disk error before it is resumed.
	resumeAfter = 30 * time.Second
	// pollInterval is the time until the next observation of a VM when NextAction waits for a change that causes no
	// event.
	pollInterval = 5 * time.Second
	// flattenInterval is the time between two observations of a VM while QEMU copies a volume's image.
	flattenInterval = time.Second
)

// Plan is the next action for a VM, and the state to report to the control plane.
type Plan struct {
	Action   Action
	NIC      string // id of the network interface that PlugNIC attaches or UnplugNIC detaches
	Disk     string // id of the disk of PlugDisk, UnplugDisk, ResizeDisk, FlattenDisk or TakeBackDisk
	Observed cloud.Observed
	Exit     cloud.Exit
	Error    string
	// Migration is the state of the assigned migration to report. Reason is the reason of the actions CancelTransfer
	// and RecordFailure.
	Migration cloud.MigrationState
	Reason    string
	// Wait is the time until the next observation if Action is Nothing. 0 means that the VM is observed again only
	// after a change.
	Wait time.Duration
}

// note returns a warning for the host's operator, or "". It warns about a running guest whose VM is stopped or missing
// in the data of a cluster that was restored from an older backup.
func (p Plan) note() string {
	if p.Error == msgStartedSinceBackup || p.Error == msgUnknownVM {
		return p.Error
	}
	return ""
}

// NextAction returns the next action towards the desired state want, and what to report. A nil want means that the VM
// has no desired state.
func NextAction(want *agentv1.AssignedVm, o Observation) Plan {
	p := plan(want, o)
	if p.Error == "" && p.Observed != cloud.ObservedAbsent {
		p.Error = o.Error
	}
	return p
}

// plan returns the same as NextAction, but does not report the error of the last step.
func plan(want *agentv1.AssignedVm, o Observation) Plan {
	power := want.GetPower()
	if mutant.On(mutant.DestroyUnruled) && want == nil {
		power = agentv1.Power_POWER_DESTROYED
	}
	if o.LeaseEnded && o.Record.needsLease() && power != agentv1.Power_POWER_DESTROYED {
		return planWithoutLease(o)
	}
	if o.Foreign && !mutant.On(mutant.ApplyForeign) {
		if p, ok := planForeign(want, o); ok {
			return p
		}
	}
	assigned := power == agentv1.Power_POWER_ON || power == agentv1.Power_POWER_OFF
	if assigned && o.Record.Built && o.Record.StopsWithLease != want.GetStopsWithLease() {
		p := reportOnly(o)
		p.Action = RecordLeaseRule
		return p
	}
	if assigned {
		if p, ok := planMigration(want, o); ok {
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
			return Plan{Action: RecordExit, Observed: removalState(o)}
		}
		return Plan{Observed: cloud.ObservedBuilt, Error: "no record of this VM exists; its disks are kept"}
	}
	return reportOnly(o)
}

// Errors that are reported for VMs whose state differs from the data of a cluster that was restored from a backup.
const (
	msgStartedSinceBackup = "the VM is running, but the restored backup says it is stopped: start it to keep it running, then stop it if it should be off"
	msgStoppedSinceBackup = "the VM is stopped, but the restored backup says it is running: start it if it should run"
	msgUnknownVM          = "no record of this VM exists in the restored cluster: its guest keeps running until it ends, and its disks are kept"
)

// planForeign returns the plan for a VM whose counters belong to another cluster than the host's. The host's cluster
// may have been restored from a backup that is older than the VM. A guest that was started since that backup, or whose
// VM the cluster does not have, is therefore only reported and continues. If ok is false, the caller must plan as for a
// VM of the host's own cluster.
func planForeign(want *agentv1.AssignedVm, o Observation) (p Plan, ok bool) {
	p = reportOnly(o)
	switch power := want.GetPower(); {
	case power == agentv1.Power_POWER_ORPHANED && o.Guest != None:
		p.Error = msgUnknownVM
	case power == agentv1.Power_POWER_OFF && o.Guest != None && o.Record.StartsDone > want.GetStarts():
		p.Error = msgStartedSinceBackup
	case power == agentv1.Power_POWER_OFF || power == agentv1.Power_POWER_ON:
		p.Action = AdoptCounters
	default:
		return Plan{}, false
	}
	return p, true
}

// msgLeaseEnded is reported for a VM that is powered off because the host's lease has ended.
const msgLeaseEnded = "the host powers the VM off: it has lost the connection to the control plane, which may start the VM on another host"

// planWithoutLease returns the plan for a VM that must be off, because the host's lease has ended.
func planWithoutLease(o Observation) Plan {
	switch {
	case o.Guest != None:
		return Plan{Action: PowerOff, Observed: cloud.ObservedStopping, Error: msgLeaseEnded}
	case o.Record.Live:
		p := exitReport(o)
		p.Action = RecordExit
		return p
	}
	return reportOnly(o)
}

// reportOnly returns the plan for a VM without desired state: no action, only a report.
func reportOnly(o Observation) Plan {
	switch o.Guest {
	case Waiting, Arriving:
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

// removalState returns the state to report for a VM that is about to be removed or to be off. A VM counts as stopped
// only when its volumes are flushed.
func removalState(o Observation) cloud.Observed {
	if o.Guest == None && !o.Unreleased {
		return cloud.ObservedBuilt
	}
	return cloud.ObservedStopping
}

// exitReport returns a plan without an action that reports how the last process ended. Until the volumes of the process
// are flushed, the VM is reported as stopping.
func exitReport(o Observation) Plan {
	if o.Record.Live && o.Unreleased {
		return Plan{Observed: cloud.ObservedStopping, Error: o.Trouble}
	}
	if o.Record.Live {
		return Plan{Observed: cloud.ObservedEnded, Exit: o.Exit, Error: o.Trouble}
	}
	return Plan{Observed: cloud.ObservedEnded, Exit: o.Record.End.Exit, Error: o.Record.End.Error}
}

// planBuild returns the plan to build the disks. It returns false if the disks are complete or the VM has a process.
func planBuild(o Observation) (Plan, bool) {
	switch {
	case o.Record.Built || o.Guest != None:
		return Plan{}, false
	case o.Refused:
		return Plan{Observed: cloud.ObservedBuildFailed}, true
	}
	return Plan{Action: Build, Observed: cloud.ObservedBuilding}, true
}

// planOn returns the plan for a VM that should run.
func planOn(want *agentv1.AssignedVm, o Observation) Plan {
	if p, ok := planBuild(o); ok {
		return p
	}
	r := o.Record
	due := r.StartsDone < want.GetStarts() || mutant.On(mutant.StartTwice) && want.GetStarts() > 0
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
	case OrphanProcess, Arriving: // For Arriving: the record has no migration to this host.
		return Plan{Action: PowerOff, Observed: cloud.ObservedStopping}
	case Waiting:
		p := Plan{Action: Resume, Observed: cloud.ObservedLaunching}
		if id := resizeOf(changesOfDisks(want, o)); id != "" { // QEMU must have the size before the guest reads it
			p.Action, p.Disk = ResizeDisk, id
		}
		return p
	case Off:
		return Plan{Observed: cloud.ObservedRunning, Wait: pollInterval}
	}
	if due {
		return Plan{Action: AckStart, Observed: cloud.ObservedRunning}
	}
	return planRunning(want, o)
}

// planRunning returns the plan for a guest that should run and has been started: it executes requested resets and
// reboots, resumes the guest after a disk error, and attaches and detaches network interfaces and volumes. A guest can
// release a device only while it runs.
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
	case o.Guest == Running:
		if changes := nicChanges(nics(want), o.NICs); len(changes) > 0 {
			next := nextNICChange(changes, o.LastNIC)
			p.Action, p.NIC = next.action, next.nic
		} else if changes := changesOfDisks(want, o); len(changes) > 0 {
			next := nextDiskChange(changes, o.LastDisk)
			p.Action, p.Disk = next.action, next.disk
		} else if flattening(o.Volumes) {
			p.Wait = flattenInterval
		}
	}
	return p
}

// pressOrWait returns PressPowerButton if the button has not been pressed yet, or was pressed at least pressInterval
// ago. Otherwise it returns Nothing and the time until the next press. The returned time is at most left.
func pressOrWait(o Observation, left time.Duration) (Action, time.Duration) {
	if o.PressedFor < 0 || o.PressedFor >= pressInterval {
		return PressPowerButton, 0
	}
	return Nothing, min(left, pressInterval-o.PressedFor)
}

// planOff returns the plan for a VM that should be off.
func planOff(want *agentv1.AssignedVm, o Observation) Plan {
	if p, ok := planBuild(o); ok {
		return p
	}
	grace := time.Duration(min(want.GetStopGraceMs(), maxGraceMS)) * time.Millisecond
	switch o.Guest {
	case None:
		if o.Record.Live {
			return Plan{Action: RecordExit, Observed: removalState(o)}
		}
		return Plan{Observed: cloud.ObservedBuilt}
	case Off:
		if o.OffFor >= grace {
			return Plan{Action: PowerOff, Observed: cloud.ObservedStopping}
		}
		return Plan{Observed: cloud.ObservedStopping, Wait: min(grace-o.OffFor, pollInterval)}
	case Waiting, Arriving, Paused, OrphanProcess: // such a guest cannot react to its power button
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

// maxGraceMS is the largest grace period in milliseconds. It is above cloud.MaxStopSeconds and does not overflow a
// Duration.
const maxGraceMS = 24 * 3600 * 1000
