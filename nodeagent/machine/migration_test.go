package machine

import (
	"fmt"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var phases = map[string]agentv1.MigrationPhase{
	"prepare": agentv1.MigrationPhase_MIGRATION_PHASE_PREPARE, "transfer": agentv1.MigrationPhase_MIGRATION_PHASE_TRANSFER,
	"switchover": agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER, "rollback": agentv1.MigrationPhase_MIGRATION_PHASE_ROLLBACK,
}

// assignedMigration returns the migration of an assignment in a script of TestPlan.
func assignedMigration(t *testing.T, d *datadriven.TestData) *agentv1.AssignedMigration {
	m := &agentv1.AssignedMigration{Machine: []byte("{}")}
	var phase string
	d.MaybeScanArgs(t, "phase", &phase)
	m.Phase = phases[phase]
	switch {
	case d.MaybeScanArgs(t, "source", &m.Attempt):
		m.Role = agentv1.MigrationRole_MIGRATION_ROLE_SOURCE
	case d.MaybeScanArgs(t, "target", &m.Attempt):
		m.Role = agentv1.MigrationRole_MIGRATION_ROLE_TARGET
	default:
		return nil
	}
	if d.HasArg("undescribed") {
		m.Machine = nil
	}
	return m
}

// transferred changes the state of the transfer in a script of TestPlan.
func (h *paper) transferred(t *testing.T, d *datadriven.TestData) {
	tr := &h.s.Transfer
	switch what := d.CmdArgs[0].Key; what {
	case "copied": // All disks have been copied.
		tr.Ready = true
	case "sent": // Everything but the last part of the state has been sent.
		tr.Status = "pre-switchover"
	case "lost": // The record of the VM is lost, and its process has ended.
		h.s.Record, h.s.Exists, h.s.Guest = Record{}, false, None
		*tr = Transfer{}
	case "completed":
		tr.Status = "completed"
		if h.s.Guest == Arriving {
			h.s.Guest = Paused
		}
	case "failed":
		tr.Status = "failed"
	case "breaks": // A disk cannot be copied.
		tr.Failure = "a disk could not be copied"
	case "untunneled":
		tr.Tunnel = false
	case "running": // The host sends the memory of running guests, and QEMU has sent enough of it.
		h.sendsRunning = true
	case "early": // QEMU has sent the memory before the guest was stopped.
		tr.Status, h.s.Guest = "pre-switchover", Paused
	case "little": // Little memory remains.
		tr.Memory = memory{known: true, rate: 1 << 30, now: qemu.Memory{Pass: 2, Remaining: 1 << 20}}
	case "marked": // The guest is stopped, but the agent has ended before it has changed QEMU's downtime limit.
		tr.Held, tr.Stopped, h.s.Guest = true, true, Paused
	default:
		d.Fatalf(t, "unknown event %q", what)
	}
}

// doMigration simulates the actions of a migration.
func (h *paper) doMigration(p Plan) {
	r, tr := &h.s.Record, &h.s.Transfer
	attempt := h.want.GetMigration().GetAttempt()
	switch p.Action {
	case BeginTransfer:
		r.Migration.Outgoing = attempt
		tr.Disks, tr.Mirrors, tr.Tunnel = 1, 1, true
	case SendState:
		tr.Status = "active"
		if h.sendsRunning {
			r.Migration.Running, tr.Running = attempt, true
			break
		}
		tr.Held, tr.Stopped, h.s.Guest, h.s.Trouble = true, true, Paused, ""
	case StopGuest:
		tr.Held, tr.Stopped, tr.Ending, h.s.Guest, h.s.Trouble = true, true, true, Paused, ""
	case CompleteDisks:
		r.Migration.Copied, tr.Mirrors = r.Migration.Outgoing, 0
	case HandOver:
		r.Migration.HandedOver, tr.Status = r.Migration.Outgoing, "device"
	case CancelTransfer:
		if !r.Migration.sending() {
			r.Migration.Outgoing = attempt
		}
		r.Migration.Cancelled, r.Migration.Error = r.Migration.Outgoing, p.Reason
	case EndTransfer:
		if tr.Held || tr.Running { // A guest that was not stopped is resumed by QEMU.
			h.s.Guest = Running
		}
		*tr = Transfer{}
	case Receive:
		r.Migration.Incoming, r.Live, h.s.Guest = attempt, true, Arriving
		*tr = Transfer{Held: true, Tunnel: true}
		h.s.Guarded = true
	case Arrive:
		r.Migration.Committed, h.s.Guest, tr.Held = r.Migration.Incoming, Running, false
		r.StartsDone, r.ResetsDone = h.want.GetStarts(), h.want.GetResets()
	case RecordFailure:
		r.Migration.Failed, r.Migration.Incoming, r.Migration.Error = max(r.Migration.Incoming, attempt), 0, p.Reason
		r.Live, r.End = false, End{Exit: cloud.ExitFailed, Error: p.Reason}
		r.StartsDone = h.want.GetStarts()
	case Settle:
		r.Migration.Incoming = 0
	}
}

// TestTransferStatus checks that transferStatus ignores the status of an earlier migration that QEMU still reports,
// also if the agent was restarted before it sent the command migrate to QEMU.
func TestTransferStatus(t *testing.T) {
	source, handedOver := Migrations{Outgoing: 7}, Migrations{Outgoing: 7, Copied: 7, HandedOver: 7}
	for _, c := range []struct {
		record       Migrations
		begun        bool
		status, want string
	}{
		{source, false, "none", ""},
		{source, false, "completed", ""},
		{source, false, "failed", ""},
		{source, false, "cancelled", ""},
		{source, true, "none", ""},
		{source, true, "completed", ""},
		{source, true, "failed", "failed"},
		{source, true, "cancelled", "cancelled"},
		{source, true, "active", "active"},
		{source, true, "pre-switchover", "pre-switchover"},
		{handedOver, true, "completed", "completed"},
		{Migrations{Outgoing: 9, HandedOver: 7, Cancelled: 7}, true, "completed", ""},
		{Migrations{Incoming: 7}, true, "active", "active"},
		{Migrations{Incoming: 7}, true, "completed", "completed"},
	} {
		require.Equal(t, c.want, transferStatus(c.record, c.begun, qemu.Migration{Status: c.status}), "%+v", c)
	}
}

// TestMigrationRules checks the rules of migrationRule for all combinations of an assigned migration, the record, the
// guest and the transfer.
func TestMigrationRules(t *testing.T) { require.Empty(t, migrationViolation()) }

// migrationViolation calls NextAction with every combination. It returns a description of the first plan that violates
// migrationRule, or "".
func migrationViolation() string {
	var wants []*agentv1.AssignedVm
	for _, power := range []agentv1.Power{agentv1.Power_POWER_OFF, agentv1.Power_POWER_ON} {
		wants = append(wants, &agentv1.AssignedVm{Power: power, Starts: 2, Resets: 1, Reboots: 1},
			&agentv1.AssignedVm{Power: power, Starts: 2, Resets: 1, Reboots: 1, RolledBackAttempt: 1})
		for role := agentv1.MigrationRole_MIGRATION_ROLE_SOURCE; role <= agentv1.MigrationRole_MIGRATION_ROLE_TARGET; role++ {
			for _, phase := range phases {
				for attempt := uint64(1); attempt <= 2; attempt++ {
					wants = append(wants, &agentv1.AssignedVm{Power: power, Starts: 2, Resets: 1, Reboots: 1,
						Migration: &agentv1.AssignedMigration{Attempt: attempt, Role: role, Phase: phase, Machine: []byte("{}")}})
				}
			}
		}
	}
	for _, want := range wants {
		for guest := None; guest <= OrphanProcess; guest++ {
			for _, status := range []string{"", "active", "pre-switchover", "completed", "failed"} {
				for bits := range 1 << 9 {
					if status != "pre-switchover" && bits>>8 != 0 {
						break
					}
					s := Observation{Exists: true, Guest: guest, Recoverable: true, PausedFor: resumeAfter, OffFor: 0, PressedFor: -1, RebootFor: -1}
					bit := func(n int) uint64 { return uint64(bits >> n & 1) }
					s.Record = Record{Built: true, Live: guest != None, StartsDone: 1 + bit(7), ResetsDone: bit(7), RebootsBegun: 1, RebootsDone: 1, Migration: Migrations{
						Outgoing: bit(0), Copied: bit(1) & bit(0), HandedOver: bit(2) & bit(1) & bit(0), Cancelled: bit(3) & bit(0),
						Incoming: bit(4), Committed: bit(5) & bit(4), Failed: bit(6) &^ bit(4),
					}}
					s.Transfer = Transfer{Status: status, Held: guest == Paused, Tunnel: status != "" || bit(3) == 0, Stopped: bit(8) == 0}
					if broken := migrationRule(want, s, NextAction(want, s)); broken != "" {
						return fmt.Sprintf("%s: desired %v, observed %+v, plan %+v", broken, want, s, NextAction(want, s))
					}
				}
			}
		}
	}
	return ""
}

func migrationRule(want *agentv1.AssignedVm, s Observation, p Plan) string {
	m, r := want.GetMigration(), s.Record.Migration
	switchover := m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER
	boots := p.Action == Start || p.Action == Relaunch || p.Action == Resume
	runs := boots || p.Action == ResumeAfterDiskError || p.Action == EndTransfer || p.Action == Reset || p.Action == Restart
	handedOver := r.HandedOver > r.Cancelled
	target := m.GetRole() == agentv1.MigrationRole_MIGRATION_ROLE_TARGET && m.GetAttempt() > r.Committed
	switch {
	case handedOver && r.Incoming == 0 && (runs || p.Action == BeginTransfer):
		return "the source runs a guest that it has handed over"
	case handedOver && p.Action == CancelTransfer && want.GetRolledBackAttempt() != r.HandedOver &&
		!(m.GetPhase() == agentv1.MigrationPhase_MIGRATION_PHASE_ROLLBACK && m.GetAttempt() == r.HandedOver):
		return "the source cancels an attempt after it has handed the guest over"
	case boots && s.Guest == None && switchover && m.GetRole() == agentv1.MigrationRole_MIGRATION_ROLE_SOURCE && m.GetAttempt() > max(r.Outgoing, r.Cancelled):
		return "the source starts a guest of which it does not know whether the target runs it"
	case p.Action == RecordFailure && s.Guest != None:
		return "the target records a failure while its QEMU has a process"
	case p.Action == HandOver && !(switchover && m.GetAttempt() == r.Outgoing):
		return "the source hands the guest over before the switchover is committed"
	case (p.Action == HandOver || p.Action == SendState || p.Action == StopGuest || p.Action == CompleteDisks) && r.Outgoing <= r.Cancelled:
		return "the source continues an attempt that it has cancelled"
	case p.Action == BeginTransfer && m.GetAttempt() <= r.Cancelled:
		return "the source begins an attempt that it has cancelled"
	case p.Action == HandOver && !s.Transfer.Stopped:
		return "the source hands over a guest that was not stopped before QEMU had sent its memory"
	case p.Action == HandOver && (s.Transfer.Status != "pre-switchover" || r.Copied != r.Outgoing):
		return "the source hands the guest over before everything is sent"
	case target && (boots || p.Action == ResumeAfterDiskError || p.Action == Reset):
		return "the target boots the guest"
	case p.Action == Arrive && s.Transfer.Status != "completed" && r.Committed != r.Incoming:
		return "the target runs an incomplete guest"
	case p.Action == Arrive && m != nil && m.GetPhase() < agentv1.MigrationPhase_MIGRATION_PHASE_SWITCHOVER && r.Committed != r.Incoming:
		return "the target runs the guest before the switchover is committed"
	case p.Action == Receive && m.GetAttempt() <= r.Failed:
		return "the target receives an attempt that it has reported as failed"
	case p.Migration == cloud.MigrationFailed && s.Guest != None:
		return "the target reports a failure while it has a QEMU"
	case p.Migration == cloud.MigrationCancelled && m.GetAttempt() > r.Cancelled:
		return "the source reports an attempt as cancelled before it is recorded"
	}
	return ""
}
