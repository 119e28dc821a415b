package machine

import (
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Migrations is the part of a VM's record that describes its live migrations. The numbers are attempts. A later
// migration of the VM has a greater attempt. The agent writes each field before it acts on it, except Copied, so that
// an agent that was restarted knows what an earlier one may have done.
type Migrations struct {
	// Outgoing is the last attempt that this host has begun as the source. The attempt has ended if Cancelled is not
	// smaller.
	Outgoing uint64 `json:"outgoing,omitempty"`
	// Running is the last attempt whose memory is sent while the guest runs.
	Running uint64 `json:"running,omitempty"`
	// Copied is the last attempt whose disks were copied to the target completely.
	Copied uint64 `json:"copied,omitempty"`
	// HandedOver is the last attempt whose guest may run at the target. If HandedOver is greater than Cancelled, the
	// host must not run the guest.
	HandedOver uint64 `json:"handed_over,omitempty"`
	// Cancelled is the greatest attempt that this host has cancelled as the source. The host never continues an attempt
	// that is not greater.
	Cancelled uint64 `json:"cancelled,omitempty"`

	// Incoming is the attempt for which this host has launched QEMU as the target. It is 0 again after the attempt has
	// failed, or after the control plane has assigned the VM to this host without a migration.
	Incoming uint64 `json:"incoming,omitempty"`
	// Committed is the last attempt for which this host, as the target, has started to run the guest.
	Committed uint64 `json:"committed,omitempty"`
	// Failed is the greatest attempt that has failed at this host as the target. The host launches no QEMU for it any
	// more.
	Failed uint64 `json:"failed,omitempty"`

	// Error is the reason why the attempt in Cancelled or Failed has ended.
	Error string `json:"error,omitempty"`
}

// sending reports whether an attempt has begun at the source and has not ended.
func (m Migrations) sending() bool { return m.Outgoing > m.Cancelled }

// handedOver reports whether the guest may run at the target. This host must then not run it.
func (m Migrations) handedOver() bool {
	return m.HandedOver > m.Cancelled && !mutant.On(mutant.RunHandedOver)
}

// Transfer is the observed state of a migration on the host. It contains what Migrations does not have.
type Transfer struct {
	// Status is the status of QEMU (qapi/migration.json), or "" if QEMU neither sends nor receives memory.
	Status string
	// Disks is the number of disks that must be copied to the target. Mirrors is the number of QEMU jobs that copy
	// them. Ready means that each disk has a job, and that all jobs have copied everything.
	Disks, Mirrors int
	Ready          bool
	// Failure is the reason why the attempt cannot complete, or "".
	Failure string
	// Held means that QEMU must not run the guest because of a migration (see qemu.ErrMigrating).
	Held bool
	// Running means that QEMU sends memory, or has begun to, while the guest runs. Memory is then the progress.
	Running bool
	Memory  memory
	// MaxDowntime is the host's setting for the maximum time for which the rest of the memory may be sent while the guest
	// is stopped.
	MaxDowntime time.Duration
	// Stopped means that the source stopped the guest before QEMU had sent all of its memory. If Stopped is false, the
	// source must not hand the guest over (see qemu.ErrGuestRan). Ending means that this agent has completed StopGuest.
	Stopped, Ending bool
	// Tunnel means that the tunnel process of the attempt is running.
	Tunnel bool
	// StalledFor is the time since the number of transferred bytes last changed. SwitchoverFor is the time since this
	// agent has first observed that the source is ready for the switchover, or 0.
	StalledFor, SwitchoverFor time.Duration
}

// active reports whether QEMU sends or receives memory.
func (t Transfer) active() bool {
	switch t.Status {
	case "", "none", "completed", "failed", "cancelled":
		return false
	}
	return true
}

// left reports whether the QEMU of a source still has parts of a migration: a stopped guest, a transfer of memory, or
// copies of disks. A tunnel process is also such a part. A thread of QEMU that waits for ever after its tunnel process was
// killed is none (see qemu.ErrNotEnded), because only the end of QEMU removes it.
func (t Transfer) left() bool {
	waits := t.Status == "cancelling" && !t.Held && !t.Tunnel
	return t.Held || t.active() && !waits || t.Mirrors > 0 || t.Tunnel
}

const (
	// switchoverWait is the maximum time for which a source with a stopped guest waits for the switchover. After that
	// time it cancels the attempt.
	switchoverWait = 3 * time.Second
	// stallTimeout is the time without progress after which the source cancels the attempt. QEMU has no such timeout:
	// it waits for ever if the link to the target is down.
	stallTimeout = 30 * time.Second
	// transferInterval is the time between two observations of a VM during a transfer.
	transferInterval = 200 * time.Millisecond
	// memoryInterval is the time between two observations of a VM whose memory is sent while the guest runs.
	memoryInterval = 50 * time.Millisecond
	// pausedInterval is the time between two observations of a VM whose guest is paused by a migration: at the source,
	// and after the switchover at the target, which must continue the guest.
	pausedInterval = 20 * time.Millisecond
)

// planMigration returns the plan for a VM with a migration, or with parts of an earlier one. If ok is false, the caller
// must plan as for a VM without a migration.
func planMigration(want *agentv1.AssignedVm, o Observation) (p Plan, ok bool) {
	m, r := want.GetMigration(), o.Record.Migration
	switch {
	case r.Incoming != 0 || m.GetRole() == agentv1.MigrationRole_MIGRATION_ROLE_TARGET && m.GetAttempt() > r.Committed:
		return planTarget(want, o), true
	case m.GetRole() == agentv1.MigrationRole_MIGRATION_ROLE_TARGET:
		// A target never boots the guest. The attempt is over here, or of a cluster that was restored from a backup.
		return reportOnly(o), true
	case m.GetRole() == agentv1.MigrationRole_MIGRATION_ROLE_SOURCE || r.sending() || r.Outgoing > 0 && o.Transfer.left():
		return planSource(want, o), true
	}
	return Plan{}, false
}

// planSource returns the plan for the source of a migration.
func planSource(want *agentv1.AssignedVm, o Observation) Plan {
	m, r := want.GetMigration(), o.Record.Migration
	switch {
	case r.sending():
		plan := planSending
		if r.handedOver() {
			plan = planHandedOver
		}
		p := plan(want, o)
		if m != nil && m.GetAttempt() != r.Outgoing {
			p.Migration = cloud.MigrationUnknown // p has the state of an earlier attempt.
		}
		return p
	case o.Transfer.left() && o.Guest != None && want.GetPower() == agentv1.Power_POWER_ON:
		return Plan{Action: EndTransfer, Observed: cloud.ObservedRunning, Migration: sourceState(want, o)}
	}
	if m != nil && o.Guest == None && m.GetAttempt() > max(r.Outgoing, r.Cancelled) &&
		(!o.Record.Built || m.GetPhase() > agentv1.MigrationPhase_MIGRATION_PHASE_TRANSFER) {
		// The host has lost its record of the guest or of the attempt. The target may run the guest, so that the VM must not
		// be started here.
		return reportOnly(o)
	}
	if m != nil && o.Guest == None && o.Record.Live && m.GetAttempt() > r.Cancelled {
		// Cancel the attempt first: RecordExit can succeed only when the target has closed the volumes in shared pools.
		return Plan{Action: CancelTransfer, Observed: cloud.ObservedStopping, Reason: "the guest has ended at the source"}
	}
	p := planPower(want, o)
	if m == nil {
		return p
	}
	p.Migration = sourceState(want, o)
	if m.GetAttempt() <= r.Cancelled && !mutant.On(mutant.ContinueCancelled) || p.Action != Nothing {
		return p
	}
	switch {
	case o.Guest == None:
		p.Action, p.Reason = CancelTransfer, "the guest does not run at the source"
	case m.GetPhase() > agentv1.MigrationPhase_MIGRATION_PHASE_TRANSFER:
		p.Action, p.Reason = CancelTransfer, "the source had not begun to send the guest"
	case o.Guest != Running:
	case m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_PREPARE:
		p.Migration = cloud.MigrationPrepared
	case m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_TRANSFER:
		p.Action, p.Migration = BeginTransfer, cloud.MigrationPrepared
	}
	return p
}

// sourceState returns the migration state that a source reports before it has begun the assigned attempt, or after it
// has cancelled it.
func sourceState(want *agentv1.AssignedVm, o Observation) cloud.MigrationState {
	m, r := want.GetMigration(), o.Record.Migration
	switch {
	case m == nil || m.GetAttempt() > r.Cancelled:
		return cloud.MigrationUnknown
	case m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_ROLLBACK && o.Guest == Running && !o.Transfer.left():
		return cloud.MigrationRunning
	}
	return cloud.MigrationCancelled
}

// planPower returns the plan for the assigned power state, as for a VM that is not migrated.
func planPower(want *agentv1.AssignedVm, o Observation) Plan {
	if want.GetPower() == agentv1.Power_POWER_OFF {
		return planOff(want, o)
	}
	return planOn(want, o)
}

// planHandedOver returns the plan for a source that has handed the guest over. The source runs the guest again only
// after the control plane has assigned the phase ROLLBACK or the rolled back attempt. The control plane does this when the
// target cannot run the guest any more.
func planHandedOver(want *agentv1.AssignedVm, o Observation) Plan {
	m, r := want.GetMigration(), o.Record.Migration
	p := Plan{Observed: cloud.ObservedStopping, Migration: cloud.MigrationHandedOver}
	current := m.GetAttempt() == r.HandedOver
	switch {
	case o.Guest == None && o.Record.Live:
		p = exitReport(o)
		p.Action, p.Migration = RecordExit, cloud.MigrationHandedOver
	case o.Guest == None && m == nil && want.GetRolledBackAttempt() == r.HandedOver:
		// The guest is lost. Without this action, the host would never execute a later start.
		p = exitReport(o)
		p.Action, p.Reason = CancelTransfer, "the guest has ended after the rollback"
	case o.Guest == None:
		p = exitReport(o)
		p.Migration = cloud.MigrationHandedOver
	case o.Guest == OrphanProcess || want.GetPower() == agentv1.Power_POWER_OFF && m == nil:
		p.Action = PowerOff
	case o.Guest == Off || o.Guest == Unresponsive:
		p.Wait, p.Error = pollInterval, o.Trouble
	case current && m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_ROLLBACK || want.GetRolledBackAttempt() == r.HandedOver:
		p.Action, p.Reason = CancelTransfer, "the target failed after the switchover"
	case current && m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER && o.Transfer.Status == "pre-switchover" &&
		o.Transfer.Stopped && o.Transfer.Tunnel:
		// The agent has ended, or QEMU has not answered, after the record was written. Without a tunnel process QEMU may
		// hang while it sends the rest. The target then fails, and the guest continues at the source after the rollback.
		p.Action = HandOver
	case o.Transfer.active():
		p.Wait = transferInterval
	}
	return p
}

// planSending returns the plan for a source that copies its disks or sends memory, and has not handed the guest over.
func planSending(want *agentv1.AssignedVm, o Observation) Plan {
	m, r, t := want.GetMigration(), o.Record.Migration, o.Transfer
	p := Plan{Observed: cloud.ObservedRunning, Migration: cloud.MigrationTransferring, Wait: transferInterval}
	atSwitchover := t.Status == "pre-switchover" && r.Copied == r.Outgoing
	commit := m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER
	if p.Reason = cancelReason(want, o, atSwitchover); p.Reason != "" {
		p.Action = CancelTransfer
		return p
	}
	switch {
	case o.Guest == Unresponsive: // The observed state of the transfer may be out of date.
	case atSwitchover && (commit || mutant.On(mutant.SwitchUncommitted)):
		p.Action = HandOver
	case atSwitchover:
		p.Migration, p.Wait = cloud.MigrationAtSwitchover, max(switchoverWait-t.SwitchoverFor, time.Millisecond)
	case t.Status == "pre-switchover":
		p.Action = CompleteDisks
	case t.Status == "" && t.Ready:
		p.Action = SendState
	case t.Running && t.Status == "active" && !t.Ending && (t.Held || t.Memory.mustStop(maxDowntime(m, t))):
		p.Action = StopGuest
	case t.Stopped:
		p.Wait = pausedInterval
	case t.Running && t.Status == "active":
		p.Wait = memoryInterval
	}
	return p
}

// cancelReason returns the reason why a source must cancel the attempt that it has begun, or "" if it must not.
func cancelReason(want *agentv1.AssignedVm, o Observation, atSwitchover bool) string {
	m, r, t := want.GetMigration(), o.Record.Migration, o.Transfer
	commit := m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER
	switch {
	case o.Guest == None || o.Guest == Off || o.Guest == OrphanProcess:
		return "the guest has ended at the source"
	case m == nil:
		return "the migration was cancelled"
	case m.GetAttempt() != r.Outgoing || m.GetRole() != agentv1.MigrationRole_MIGRATION_ROLE_SOURCE:
		return "the migration was replaced by another one"
	case want.GetPower() != agentv1.Power_POWER_ON:
		return "the VM was requested to power off"
	case t.Failure != "":
		return t.Failure
	case atSwitchover && !t.Tunnel:
		// QEMU cannot send the rest without the tunnel. With several connections, QEMU 7.2 may hang if it tries.
		return "the tunnel process of the source has ended"
	case t.StalledFor >= stallTimeout && !atSwitchover:
		return "the transfer made no progress for 30 seconds"
	case o.Guest == Unresponsive:
		return ""
	case t.Status != "" && t.Status != "pre-switchover" && !t.active():
		return "QEMU ended the transfer: " + t.Status
	case t.Status == "pre-switchover" && !t.Stopped && !mutant.On(mutant.HandOverRunning):
		return "QEMU had sent the memory before the agent could stop the guest"
	case t.Mirrors < t.Disks && r.Copied != r.Outgoing:
		return "the copies of the disks were interrupted"
	case commit && !atSwitchover:
		return "the source was not ready for the switchover"
	case m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_ROLLBACK:
		return "the target failed"
	case atSwitchover && !commit && t.SwitchoverFor >= switchoverWait:
		return "the control plane did not confirm the switchover within 3 seconds"
	}
	return ""
}

// planTarget returns the plan for the target of a migration.
func planTarget(want *agentv1.AssignedVm, o Observation) Plan {
	m, r := want.GetMigration(), o.Record.Migration
	if r.Incoming == 0 {
		return planReceive(want, o)
	}
	if r.Committed == r.Incoming {
		return planArrived(want, o)
	}
	p := Plan{Observed: cloud.ObservedLaunching, Wait: pollInterval}
	phase := m.GetPhase()
	if phase == agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER {
		// QEMU sends no event when it has received the complete state. The guest is paused until the agent continues it.
		p.Wait = pausedInterval
	}
	switch {
	case o.Guest == None:
		p.Action, p.Reason = RecordFailure, "QEMU ended before it had the complete state of the guest"
		if o.Trouble != "" {
			p.Reason += ": " + o.Trouble
		}
	case o.Guest == OrphanProcess || o.Guest == Running || o.Guest == Off || m != nil && m.GetAttempt() != r.Incoming:
		p.Action = PowerOff // This QEMU cannot belong to the attempt: before the switchover, its guest does not run.
	case m == nil && want.GetPower() != agentv1.Power_POWER_ON:
		p.Action = PowerOff // The migration has ended here, and the VM should be off.
	case o.Transfer.Status == "completed" && o.Guest == Paused:
		p.Migration = cloud.MigrationReceived
		committed := m == nil || phase >= agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER
		if (committed || mutant.On(mutant.RunUncommitted)) && want.GetPower() == agentv1.Power_POWER_ON {
			p.Action = Arrive
		}
	case o.Guest == Unresponsive && !o.Transfer.Tunnel && phase < agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER:
		p.Action = PowerOff // QEMU may wait for ever for a connection that has ended.
	case o.Guest == Unresponsive && m != nil && phase != agentv1.MigrationPhase_MIGRATION_PHASE_ROLLBACK:
	case m == nil || phase == agentv1.MigrationPhase_MIGRATION_PHASE_ROLLBACK || !o.Transfer.Tunnel || o.Transfer.Failure != "":
		p.Action = PowerOff
	case o.Guarded:
		p.Migration = cloud.MigrationPrepared
	}
	return p
}

// planReceive returns the plan for a target that has not launched QEMU for an attempt. The plan never starts the VM.
func planReceive(want *agentv1.AssignedVm, o Observation) Plan {
	m, r := want.GetMigration(), o.Record.Migration
	switch {
	case o.Guest != None:
		return Plan{Action: PowerOff, Observed: cloud.ObservedStopping}
	case o.Record.Live:
		return Plan{Action: RecordExit, Observed: removalState(o)}
	case m.GetAttempt() <= r.Failed:
		return Plan{Observed: cloud.ObservedBuilding, Migration: cloud.MigrationFailed}
	case m.GetPhase() > agentv1.MigrationPhase_MIGRATION_PHASE_TRANSFER:
		return Plan{Action: RecordFailure, Observed: cloud.ObservedBuilding, Reason: "the target was not prepared when the switchover began"}
	case o.Refused:
		return Plan{Action: RecordFailure, Observed: cloud.ObservedBuildFailed, Reason: o.Error}
	case !o.Record.Built:
		return Plan{Action: Build, Observed: cloud.ObservedBuilding}
	case o.LeaseEnded || len(m.GetMachine()) == 0 || m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_UNSPECIFIED:
		return Plan{Observed: cloud.ObservedBuilt}
	}
	return Plan{Action: Receive, Observed: cloud.ObservedLaunching}
}

// planArrived returns the plan for a target that has recorded that it runs the guest. When the assignment has no
// migration any more, the plan is Settle.
func planArrived(want *agentv1.AssignedVm, o Observation) Plan {
	if o.Guest != None && o.Transfer.Held { // The guest's CPUs have not been started.
		p := Plan{Observed: cloud.ObservedLaunching, Migration: cloud.MigrationReceived, Wait: pollInterval}
		if o.Guest == Paused || o.Guest == Running {
			p.Action = Arrive
		}
		return p
	}
	p := reportOnly(o)
	if want.GetMigration() == nil {
		p.Action = Settle
		return p
	}
	p.Migration = cloud.MigrationRunning
	switch {
	case o.Guest == None && o.Record.Live:
		p = exitReport(o)
		p.Action, p.Migration = RecordExit, cloud.MigrationRunning
	case o.Guest == None:
		p = exitReport(o)
		p.Migration = cloud.MigrationRunning
	case o.Guest == OrphanProcess:
		p.Action = PowerOff
	}
	return p
}
