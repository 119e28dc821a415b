package cloud

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Migration describes a live migration of a VM that has not ended. VM.Migration is set exactly while the VM is
// MIGRATING.
type Migration struct {
	// Attempt identifies the migration. It is the generation that the VM had when the migration began.
	Attempt        uint64
	Source, Target NodeID
	Phase          MigrationPhase
	Began          Time
	// Deadline is the time at which a migration that has not reached the switchover is aborted. In the phase SWITCHOVER it
	// is the time at which the target is asked to give up (see GiveUp), and after that the time at which the VM's status
	// explains the delay. In the phase ROLLBACK it is the time at which the migration ends although the source has not
	// continued the guest. 0 means that no further step is due because of the time.
	Deadline Time
	// Machine is the description of the source's QEMU that the target needs. Address is the host:port at which the target
	// waits for the source.
	Machine []byte
	Address string
	// SourceState and TargetState are the states that the hosts have reported.
	SourceState, TargetState MigrationState
	// SourceEnded is true if the source has reported that the guest's process has ended.
	SourceEnded bool
	// Canceled is true if a caller has cancelled the migration before the switchover.
	Canceled bool
	// GiveUp is true if the target was asked, after the switchover, to end the migration unless it has the complete state
	// of the guest.
	GiveUp bool
	// AwaitsTarget is true after MigrationAwaitTarget.
	AwaitsTarget bool `cbor:",omitempty"`
	// Reason is the first error that a host has reported, or, in the phase ROLLBACK, the reason for the rollback.
	Reason string
	// DowntimeMS is the time for which the guest has been paused, in milliseconds: the greatest value that the source has
	// reported.
	DowntimeMS uint32
	// PausedAt is the time at which the source paused the guest for the switchover. It is computed: the time of the
	// commit minus the DowntimeMS that the source had reported by then. It is 0 before the switchover.
	PausedAt Time `cbor:",omitempty"`
	// Choice says why the target was chosen (see Choice.Reason).
	Choice string `cbor:",omitempty"`
	// SendRunning is true if the target supported FeatureRunningMigration when the migration began. Otherwise the source
	// stops the guest before it sends the memory.
	SendRunning bool `cbor:",omitempty"`
	// TakesChannels is true if the target supported FeatureMemoryChannels when the migration began. MemoryChannels is the
	// number of connections, besides the main one, over which the memory is sent: what the source has reported together
	// with Machine, or 0 if TakesChannels is false.
	TakesChannels  bool   `cbor:",omitempty"`
	MemoryChannels uint32 `cbor:",omitempty"`
	// SourceStopsWithLease is the value of Status.StopsWithLease before the switchover. It is the confirmation of the
	// source, and counts again after a rollback.
	SourceStopsWithLease bool `cbor:",omitempty"`
}

// maxMemoryChannels is the greatest value of Migration.MemoryChannels.
const maxMemoryChannels = 16

// MigrationResult describes the last migration of a VM that has ended.
type MigrationResult struct {
	Attempt        uint64
	Source, Target NodeID
	// Moved is true if the target became the VM's host. Reason says why the migration failed. If the guest was lost,
	// Reason is set although Moved can be true.
	Moved        bool
	Reason       string
	Began, Ended Time
	// DowntimeMS is the duration of the pause of the guest, in milliseconds. If the migration succeeded, the pause ends
	// when the control plane receives the report that the guest runs on the target.
	DowntimeMS uint32
}

// MigrationPhase is a phase of a migration. It limits what the hosts may do. The numbers are those of
// agent.v1.MigrationPhase.
type MigrationPhase uint8

const (
	MigrationPhaseUnspecified MigrationPhase = iota
	// MigrationPrepare: the source describes its QEMU, and the target starts one that waits for the guest's state.
	MigrationPrepare
	// MigrationTransfer: the source sends disks and memory, and waits before the switchover.
	MigrationTransfer
	// MigrationSwitchover: VM.Node is the target. The source hands the guest over, and the target continues the guest.
	MigrationSwitchover
	// MigrationRollback: the target never runs the guest. VM.Node is the source again, and the source continues the guest.
	MigrationRollback
)

func (p MigrationPhase) String() string {
	return [...]string{"UNSPECIFIED", "PREPARE", "TRANSFER", "SWITCHOVER", "ROLLBACK"}[min(p, MigrationRollback)]
}

// Default and limits of the timeout of a migration, in seconds. The default is defaultMigrationSeconds for each GiB of
// memory and disk, and at least minMigrationSeconds.
const (
	MaxMigrationSeconds     = 24 * 3600
	minMigrationSeconds     = 300
	defaultMigrationSeconds = 150
)

// SwitchoverTime is the time after the switchover, in milliseconds, after which the target is asked to give up unless
// it has the complete state.
const SwitchoverTime = 60_000

// GiveUpTime is the time in milliseconds after the request to give up after which the VM's status explains why the
// migration has not ended. RollbackTime is the time in milliseconds that the source has after a rollback to continue the
// guest.
const (
	GiveUpTime   = 60_000
	RollbackTime = 60_000
)

// MigrationTimeout returns the timeout of a migration in milliseconds. The parameter seconds is the timeout that the
// caller has requested, or 0.
func (vm *VM) MigrationTimeout(seconds uint32) Time {
	if seconds == 0 {
		need := vm.Spec.Need()
		seconds = uint32(max(minMigrationSeconds, defaultMigrationSeconds*(need.AllMemoryMiB()/1024+need.StorageGiB)))
	}
	return Time(min(seconds, MaxMigrationSeconds)) * 1000
}

// Hosts returns the hosts to which the VM is assigned: VM.Node and OtherHost, without those that are empty.
func (vm *VM) Hosts() (hosts []NodeID) {
	if vm.Node != "" {
		hosts = append(hosts, vm.Node)
	}
	if other := vm.OtherHost(); other != "" {
		hosts = append(hosts, other)
	}
	return hosts
}

// OtherHost returns that host of the VM's migration that is not VM.Node. It returns "" if the VM is not being migrated,
// and in the phase ROLLBACK, because the target must then destroy the VM.
func (vm *VM) OtherHost() NodeID {
	m := vm.Migration
	switch {
	case m == nil || m.Phase == MigrationRollback:
		return ""
	case vm.Node == m.Source:
		return m.Target
	}
	return m.Source
}

// BeginMigration changes a RUNNING VM to MIGRATING. The caller must have checked NotMigratable and the target, and must
// reserve the capacity there. BeginMigration returns FailedPrecondition if the VM is not RUNNING or should be off.
func (vm *VM) BeginMigration(target NodeID, timeout, now Time) error {
	if vm.State == Running && !vm.Desired.On {
		return fault.New(fault.FailedPrecondition, "cannot migrate VM %s: it is to be stopped", vm.Name)
	}
	if err := vm.Apply(MigrateRequested, now); err != nil {
		return err
	}
	vm.Generation++
	vm.Migration = &Migration{
		Attempt: vm.Generation, Source: vm.Node, Target: target, Phase: MigrationPrepare, Began: now, Deadline: now + timeout,
	}
	return nil
}

// NotMigratable returns the reason why the VM cannot be migrated, apart from its state and its volumes, or "" if it
// can. Volume.NotMigratable has the reasons because of a volume. The text is the predicate of a sentence whose subject
// is the VM.
func (vm *VM) NotMigratable() string {
	for _, d := range vm.Spec.Disks {
		if d.Change != DeviceUnchanged {
			return "has the disk " + d.ID + ", which is being attached or detached"
		}
	}
	for _, n := range vm.Spec.Network {
		if n.Change != DeviceUnchanged {
			return "has the NIC " + n.ID + ", which is being attached or detached"
		}
	}
	switch {
	case vm.Desired.Reboots > vm.Status.RebootsDone || vm.Desired.Resets > vm.Status.ResetsDone:
		return "is being rebooted"
	case vm.Resize != nil: // the process at the target must have the size of the present one
		return "has a resize that takes effect at its next start: reboot it, or resize it to its present size"
	}
	return ""
}

// sourceRank and targetRank have the states that the source and the target can report, numbered in their order. A
// report of an earlier state than the last one is ignored.
var (
	sourceRank = map[MigrationState]int{MigrationPrepared: 1, MigrationTransferring: 2, MigrationAtSwitchover: 3,
		MigrationHandedOver: 4, MigrationRunning: 5}
	targetRank = map[MigrationState]int{MigrationPrepared: 1, MigrationReceived: 2, MigrationRunning: 3}
)

// Observe updates m with a report of one of its hosts, and returns whether m has changed. A report about another
// attempt changes nothing.
func (m *Migration) Observe(host NodeID, o Observation) bool {
	r := o.Migration
	before := *m
	// A source that has no record of the VM any more reports ABSENT. It cannot continue the guest either.
	if ended := o.Observed == ObservedEnded || o.Observed == ObservedAbsent; host == m.Source && ended && o.Generation >= m.Attempt {
		m.SourceEnded = true
	}
	if r != nil && (r.Attempt == m.Attempt || mutant.On(mutant.ObeyOldAttempt)) {
		switch host {
		case m.Source:
			m.observeSource(r)
		case m.Target:
			m.observeTarget(r)
		}
	}
	return m.SourceState != before.SourceState || m.TargetState != before.TargetState || m.SourceEnded != before.SourceEnded ||
		m.Address != before.Address || m.Reason != before.Reason || m.DowntimeMS != before.DowntimeMS ||
		!slices.Equal(m.Machine, before.Machine)
}

func (m *Migration) observeSource(r *MigrationObservation) {
	switch {
	case m.Phase == MigrationPrepare && (r.State == MigrationUnknown && r.Error != "" || len(r.Machine) > MaxMigrationMachine):
		// The source cannot describe its QEMU. It has begun nothing, so that the migration can be aborted.
		m.SourceState = MigrationCancelled
		if r.Error == "" {
			m.Reason = cmp.Or(m.Reason, fmt.Sprintf("the source's description of the VM has %d bytes, the limit is %d",
				len(r.Machine), MaxMigrationMachine))
		}
	case r.State == MigrationCancelled:
		// A source that has handed the guest over cannot cancel any more.
		if m.SourceState < MigrationHandedOver {
			m.SourceState = MigrationCancelled
		}
	case m.SourceState == MigrationCancelled || sourceRank[r.State] == 0:
		return
	case m.Phase == MigrationPrepare && sourceRank[r.State] > sourceRank[MigrationPrepared]:
		return // This is the state of an earlier attempt, which the source has not ended yet.
	case r.State == MigrationRunning && m.Phase != MigrationRollback:
		return
	case sourceRank[r.State] > sourceRank[m.SourceState]:
		m.SourceState = r.State
	}
	if len(m.Machine) == 0 && len(r.Machine) <= MaxMigrationMachine {
		m.Machine = r.Machine
		if m.TakesChannels && len(m.Machine) > 0 {
			m.MemoryChannels = min(r.MemoryChannels, maxMemoryChannels)
		}
	}
	m.DowntimeMS = max(m.DowntimeMS, r.DowntimeMS)
	m.Reason = cmp.Or(m.Reason, r.Error)
}

func (m *Migration) observeTarget(r *MigrationObservation) {
	switch {
	case r.State == MigrationFailed:
		if m.TargetState != MigrationRunning {
			m.TargetState = MigrationFailed
		}
	case m.TargetState == MigrationFailed || targetRank[r.State] == 0:
		return
	case r.State == MigrationRunning && m.Phase != MigrationSwitchover:
		return
	case targetRank[r.State] > targetRank[m.TargetState]:
		m.TargetState = r.State
	}
	m.Address = cmp.Or(m.Address, r.Address)
	m.Reason = cmp.Or(m.Reason, r.Error)
}
