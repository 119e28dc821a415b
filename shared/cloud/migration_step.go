package cloud

import (
	"cmp"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// MigrationAction is the next step of a migration.
type MigrationAction uint8

const (
	// MigrationWait: no step is due.
	MigrationWait MigrationAction = iota
	// MigrationBeginTransfer changes the phase to TRANSFER, because both hosts are prepared.
	MigrationBeginTransfer
	// MigrationCommit is the switchover: VM.Node becomes the target, and the phase becomes SWITCHOVER.
	MigrationCommit
	// MigrationAbort ends the migration before the switchover. The VM stays at the source.
	MigrationAbort
	// MigrationComplete ends the migration after the switchover. The VM runs at the target.
	MigrationComplete
	// MigrationUndo ends the migration after the switchover, because the source has cancelled it and so never hands the
	// guest over. VM.Node becomes the source again.
	MigrationUndo
	// MigrationAskToGiveUp asks the target to end the migration, unless the target has the complete state of the guest.
	MigrationAskToGiveUp
	// MigrationRollBack changes the phase to ROLLBACK: VM.Node becomes the source, which continues the guest.
	MigrationRollBack
	// MigrationReturn ends the migration after a rollback. The VM runs at the source.
	MigrationReturn
	// MigrationLeave ends the migration after a rollback whose source has not continued the guest within RollbackTime. The
	// VM is RUNNING at the source in the records, like each VM whose host does not answer: it can be recovered or stopped.
	// The source continues the guest when it can.
	MigrationLeave
	// MigrationExplain writes into the VM's status why a migration waits longer than SwitchoverTime and GiveUpTime after
	// the switchover, and what a caller can do.
	MigrationExplain
	// MigrationAwaitTarget writes into the VM's status that the migration waits for a lost target, after the guest was lost
	// on both hosts. Only the target can report whether it ran the guest. If it did, it has the newest UEFI variables and
	// the newest state of the TPM; otherwise the source has them.
	MigrationAwaitTarget
	// MigrationLose ends the migration, because no host has the state of the guest any more. The VM keeps its VM.Node: the
	// target in the phase SWITCHOVER, the source in ROLLBACK. It can be started again from the disks on that host.
	MigrationLose
)

func (a MigrationAction) String() string {
	return [...]string{"wait", "begin transfer", "commit", "abort", "complete", "undo", "ask to give up", "roll back", "return",
		"leave", "explain", "await the target", "lose"}[min(a, MigrationLose)]
}

// MigrationFacts is a set of facts about the hosts of a migration. The exported facts do not come from the reports of
// the hosts: the caller of Step determines them. Step adds the others from the fields of the Migration.
type MigrationFacts uint16

const (
	// TargetFenced: the lease of the target has ended, and the target has powered off every QEMU that received a guest; or
	// a caller has confirmed that the host is off.
	TargetFenced MigrationFacts = 1 << iota
	// SourceSilent: the lease of the source has ended, or a caller has confirmed that the source is off. The guest may still
	// run there, because the lease does not end every guest.
	SourceSilent
	// SourceOff: a caller has confirmed that the source is off.
	SourceOff
	// OldPoolAgent: a host that shares a storage pool of the VM's volumes has an old agent, which could open a volume
	// that the target has open. The caller must determine this fact only before MigrationCommit.
	OldPoolAgent
	// HostState: besides its disks, the VM has state that is stored only on one host: UEFI variables or the state of a
	// TPM (see VM.StateOnHost). AdvanceMigration adds this fact.
	HostState
	// TargetGivenUp: an operator has evicted the target, which has not joined again. A migration then does not wait for it.
	TargetGivenUp

	sourceEnded
	canceled
	late
	gaveUp
	awaiting
)

type statesOf uint16

func states(all ...MigrationState) (set statesOf) {
	for _, s := range all {
		set |= 1 << s
	}
	return set
}

func (set statesOf) has(s MigrationState) bool { return set == 0 || set&(1<<s) != 0 }

// migrationRule is one rule of the migration: the step do follows in the phase if the states of the hosts are in the
// sets source and target, all facts in facts are true, and all facts in not are false. An empty set of states has all
// states. why is the reason in the result of a step that ends the migration without success.
type migrationRule struct {
	phase          MigrationPhase
	source, target statesOf
	facts, not     MigrationFacts
	do             MigrationAction
	why            string
}

// migrationRules has all rules of a migration. The first rule that applies gives the next step. Before the switchover,
// every failure ends the migration, and the guest continues on the source. After the switchover, the source runs the
// guest again only if the source has cancelled the attempt, or if the target has reported that it never runs the guest,
// or if the target is fenced.
//
// A target reports MigrationFailed only if it has never run the guest. The disks are then complete on both hosts. If
// the source is lost, the VM can therefore be started on the target. The state of the firmware and of the TPM is
// complete only on the source. A VM with such state returns to the source, and waits for the source if the source is
// lost.
//
// If both hosts lose the guest of a VM with such state, the newest state is on the target if the target has run the
// guest, and otherwise on the source. The migration therefore waits for the report of the target, until an operator
// evicts the target. The VM then returns to the source. The wait does not end when a lost source answers again: its guest
// may have ended, which its next report may say only later.
var migrationRules = []migrationRule{
	{phase: MigrationPrepare, facts: sourceEnded, do: MigrationAbort, why: "the guest's process on the source has ended"},
	{phase: MigrationPrepare, facts: canceled, do: MigrationAbort, why: "a call cancelled the migration"},
	{phase: MigrationPrepare, source: states(MigrationCancelled), do: MigrationAbort, why: "the source cancelled the migration"},
	{phase: MigrationPrepare, target: states(MigrationFailed), do: MigrationAbort, why: "the target could not prepare the migration"},
	{phase: MigrationPrepare, facts: TargetFenced, do: MigrationAbort, why: "the target is lost"},
	{phase: MigrationPrepare, facts: SourceSilent, do: MigrationAbort, why: "the source is lost"},
	{phase: MigrationPrepare, facts: late, do: MigrationAbort, why: "the hosts did not prepare it in time"},
	{phase: MigrationPrepare, source: states(MigrationPrepared), target: states(MigrationPrepared), do: MigrationBeginTransfer},

	{phase: MigrationTransfer, facts: sourceEnded, do: MigrationAbort, why: "the guest's process on the source has ended"},
	{phase: MigrationTransfer, facts: canceled, do: MigrationAbort, why: "a call cancelled the migration"},
	{phase: MigrationTransfer, source: states(MigrationCancelled), do: MigrationAbort, why: "the source cancelled the migration"},
	{phase: MigrationTransfer, target: states(MigrationFailed), do: MigrationAbort, why: "the target has failed"},
	{phase: MigrationTransfer, facts: TargetFenced, do: MigrationAbort, why: "the target is lost"},
	{phase: MigrationTransfer, facts: SourceSilent, do: MigrationAbort, why: "the source is lost"},
	{phase: MigrationTransfer, facts: late, do: MigrationAbort, why: "it did not finish in time"},
	{phase: MigrationTransfer, facts: OldPoolAgent, do: MigrationAbort,
		why: "a host whose agent is too old joined a storage pool of the VM during the migration: upgrade this agent, " +
			"or evict the host"},
	{phase: MigrationTransfer, source: states(MigrationAtSwitchover), target: states(MigrationPrepared, MigrationReceived),
		do: MigrationCommit},

	{phase: MigrationSwitchover, source: states(MigrationCancelled), do: MigrationUndo,
		why: "the source cancelled the migration before it received the switchover"},
	{phase: MigrationSwitchover, target: states(MigrationRunning), do: MigrationComplete},
	{phase: MigrationSwitchover, source: states(MigrationHandedOver), target: states(MigrationFailed), facts: sourceEnded,
		not: HostState, do: MigrationLose,
		why: "both hosts have lost the state of the guest"},
	{phase: MigrationSwitchover, source: states(MigrationHandedOver), target: states(MigrationFailed), facts: SourceOff,
		not: HostState, do: MigrationLose,
		why: "the target has failed and the source is off"},
	{phase: MigrationSwitchover, source: states(MigrationHandedOver), target: states(MigrationFailed), facts: SourceSilent,
		not: HostState, do: MigrationLose, why: "the target has failed and the source is lost"},
	{phase: MigrationSwitchover, target: states(MigrationFailed), do: MigrationRollBack, why: "the target has failed"},
	{phase: MigrationSwitchover, source: states(MigrationHandedOver), facts: TargetFenced | sourceEnded | HostState,
		not: TargetGivenUp | awaiting, do: MigrationAwaitTarget, why: "has ended the guest"},
	{phase: MigrationSwitchover, facts: TargetFenced | SourceSilent | HostState, not: TargetGivenUp | awaiting,
		do: MigrationAwaitTarget, why: "is lost too"},
	{phase: MigrationSwitchover, facts: TargetFenced | HostState | awaiting, not: TargetGivenUp, do: MigrationWait},
	{phase: MigrationSwitchover, source: states(MigrationHandedOver), facts: TargetFenced | sourceEnded, not: HostState,
		do: MigrationLose, why: "the target is lost, and the source has ended the guest"},
	{phase: MigrationSwitchover, source: states(MigrationHandedOver), facts: TargetFenced | SourceOff, not: HostState,
		do: MigrationLose, why: "both hosts are lost"},
	{phase: MigrationSwitchover, facts: TargetFenced, do: MigrationRollBack, why: "the target is lost"},
	{phase: MigrationSwitchover, facts: late, not: gaveUp, do: MigrationAskToGiveUp},
	{phase: MigrationSwitchover, facts: late | gaveUp, do: MigrationExplain,
		why: "the target has neither continued the guest nor reported that it never will"},

	{phase: MigrationRollback, source: states(MigrationRunning, MigrationCancelled), do: MigrationReturn},
	{phase: MigrationRollback, facts: sourceEnded, do: MigrationLose, why: "the source has ended the guest"},
	{phase: MigrationRollback, facts: SourceOff, do: MigrationLose, why: "the source is off"},
	{phase: MigrationRollback, facts: late, do: MigrationLeave, why: "the source has not continued the guest in time"},
}

// Step returns the next step of the migration at the time now, and the reason if the step ends the migration without
// success.
func (m *Migration) Step(facts MigrationFacts, now Time) (MigrationAction, string) {
	for fact, is := range map[MigrationFacts]bool{
		sourceEnded: m.SourceEnded, canceled: m.Canceled, late: m.Deadline != 0 && now >= m.Deadline, gaveUp: m.GiveUp,
		awaiting: m.AwaitsTarget,
	} {
		if is {
			facts |= fact
		}
	}
	switch {
	case mutant.On(mutant.CommitCanceled) && m.Phase == MigrationTransfer && m.SourceState == MigrationAtSwitchover:
		return MigrationCommit, ""
	case mutant.On(mutant.RollBackUnproven) && m.Phase == MigrationSwitchover && facts&late != 0:
		return MigrationRollBack, "the target does not answer"
	case mutant.On(mutant.ReleaseSourceEarly) && m.Phase == MigrationSwitchover:
		return MigrationComplete, ""
	}
	for _, r := range migrationRules {
		if r.do == MigrationAwaitTarget && mutant.On(mutant.GuessHostState) {
			continue
		}
		if r.phase == m.Phase && r.source.has(m.SourceState) && r.target.has(m.TargetState) && facts&r.facts == r.facts &&
			facts&r.not == 0 {
			return r.do, r.why
		}
	}
	return MigrationWait, ""
}

// AdvanceMigration makes the next step of the VM's migration, and returns this step. It returns MigrationWait if no
// step is due or the VM is not being migrated. The caller must store the VM's record, and update the records that
// depend on vm.Hosts, such as those of its ports. After a step that ends the migration, VM.Migration is nil.
func (vm *VM) AdvanceMigration(facts MigrationFacts, now Time) MigrationAction {
	m := vm.Migration
	if m == nil {
		return MigrationWait
	}
	if vm.StateOnHost() != "" && !mutant.On(mutant.LeaveHostState) {
		facts |= HostState
	}
	do, why := m.Step(facts, now)
	switch do {
	case MigrationWait:
		return do
	case MigrationBeginTransfer:
		vm.setPhase(MigrationTransfer, m.Source, m.Deadline)
	case MigrationCommit:
		vm.setPhase(MigrationSwitchover, m.Target, now+SwitchoverTime)
		vm.Migration.PausedAt = now - Time(m.DowntimeMS)
	case MigrationAskToGiveUp:
		vm.setPhase(MigrationSwitchover, m.Target, now+GiveUpTime)
		vm.Migration.GiveUp = true
	case MigrationExplain:
		vm.explainMigration("the migration waits for its target " + string(m.Target) + ": " + why + ". If that host is off, " +
			"confirm it with `trivet host fence --confirmed-off`")
	case MigrationAwaitTarget:
		vm.explainMigration("the guest runs on no host: the migration waits for its lost target " + string(m.Target) + ", and the " +
			"source " + string(m.Source) + " " + why + ". Only the target knows whether it has the newest UEFI variables and TPM " +
			"state. If it never comes back, evict it with `trivet host evict --force`: the VM then gets those of the source")
		vm.Migration.AwaitsTarget = true
	case MigrationRollBack:
		vm.setPhase(MigrationRollback, m.Source, now+RollbackTime)
		vm.Migration.Reason = cmp.Or(m.Reason, why)
	default:
		vm.endMigration(do, why, now)
	}
	return do
}

// setPhase changes the phase, the deadline and VM.Node, and increases the generation. It replaces vm.Migration instead
// of changing it, because transactions share records.
func (vm *VM) setPhase(p MigrationPhase, node NodeID, deadline Time) {
	vm.setMigrationHost(node)
	m := *vm.Migration
	m.Phase, m.Deadline = p, deadline
	vm.Migration = &m
	if !mutant.On(mutant.SwitchWithoutGeneration) {
		vm.Generation++
	}
}

// setMigrationHost changes VM.Node. Status.StopsWithLease is what VM.Node has confirmed: the confirmation of the source
// is kept in the migration while VM.Node is the target.
func (vm *VM) setMigrationHost(node NodeID) {
	if vm.Node == node {
		return
	}
	m := *vm.Migration
	if vm.Node == m.Source {
		m.SourceStopsWithLease, vm.Status.StopsWithLease = vm.Status.StopsWithLease, false
	} else if !mutant.On(mutant.KeepTargetLeaseRule) {
		vm.Status.StopsWithLease = m.SourceStopsWithLease
	}
	vm.Migration, vm.Node = &m, node
}

// explained reports whether the status says why the migration waits. Reports of the hosts without an error keep this
// text.
func (m *Migration) explained() bool { return m != nil && m.Deadline == 0 }

// explainMigration writes text into the status. The text must say why the migration waits, and what ends it: a report of
// the target, its fence or its eviction.
func (vm *VM) explainMigration(text string) {
	m := *vm.Migration
	m.Deadline = 0
	vm.Migration, vm.Status.LastError = &m, text
}

// endMigration ends the migration with the step do. The VM becomes RUNNING, except after MigrationLose: then it becomes
// ERROR, or STARTING if its restart policy starts it again. The VM's history has the reason of a migration that has
// failed.
func (vm *VM) endMigration(do MigrationAction, why string, now Time) {
	m := vm.Migration
	result := &MigrationResult{
		Attempt: m.Attempt, Source: m.Source, Target: m.Target, Moved: do == MigrationComplete, Began: m.Began, Ended: now,
		DowntimeMS: m.DowntimeMS,
	}
	if do == MigrationComplete && m.PausedAt != 0 {
		result.DowntimeMS = max(m.DowntimeMS, uint32(max(now-m.PausedAt, 0)))
	}
	switch do {
	case MigrationAbort, MigrationUndo, MigrationReturn, MigrationLeave:
		vm.setMigrationHost(m.Source)
		result.Reason = cmp.Or(m.Reason, why, "the guest was rolled back")
		if m.Canceled {
			result.Reason = "a call cancelled the migration"
		}
	case MigrationLose:
		result.Moved = vm.Node == m.Target
		result.Reason = why
	}
	if vm.Node == m.Target && m.Choice != "" {
		vm.Choice = &Choice{At: m.Began, Node: m.Target, Reason: m.Choice}
	}
	if m.Phase >= MigrationSwitchover && vm.Node == m.Source {
		vm.RolledBack = m.Attempt
	}
	vm.Migration, vm.LastMigration = nil, result
	vm.Generation++
	vm.enter(next[vm.State][MigrationEnded], MigrationEnded, now)
	vm.explainTransition(result.Reason)
	switch do {
	case MigrationLeave:
		vm.Status.LastError = "the migration was rolled back (" + result.Reason + "), but the source " + string(m.Source) +
			" has not continued the guest: if that host is off, confirm it with `trivet host fence --confirmed-off`, and recover the VM"
	case MigrationLose:
		vm.applyToDesired(Died, now)
		vm.enter(next[vm.State][Died], Died, now)
		vm.Status.LastError = "the guest was lost during a migration: " + why
		if m.AwaitsTarget && m.TargetState != MigrationFailed {
			vm.Status.LastError += "; the VM has the UEFI variables and the TPM state of the switchover, because its target was given up"
		}
		vm.explainTransition(vm.Status.LastError)
	}
}

// CancelMigration marks a migration that has not reached the switchover as cancelled. The caller must then call
// AdvanceMigration, which ends the migration. CancelMigration returns false, and changes nothing, if the VM is not
// being migrated or if the switchover is committed.
func (vm *VM) CancelMigration() bool {
	if vm.Migration == nil || vm.Migration.Phase >= MigrationSwitchover {
		return false
	}
	m := *vm.Migration
	m.Canceled = true
	vm.Migration = &m
	return true
}

// ObserveMigration updates the VM's migration with the report of a host, and returns whether it has changed.
func (vm *VM) ObserveMigration(host NodeID, o Observation) bool {
	if vm.Migration == nil {
		return false
	}
	m := *vm.Migration
	if !m.Observe(host, o) {
		return false
	}
	if len(vm.Migration.Machine) == 0 && len(m.Machine) > 0 {
		vm.Generation++ // the target must receive the description
	}
	vm.Migration = &m
	return true
}
