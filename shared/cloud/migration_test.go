package cloud

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
)

var migrationStates = map[string]MigrationState{
	"prepared": MigrationPrepared, "transferring": MigrationTransferring, "at-switchover": MigrationAtSwitchover,
	"handed-over": MigrationHandedOver, "received": MigrationReceived, "running": MigrationRunning,
	"cancelled": MigrationCancelled, "failed": MigrationFailed, "unknown": MigrationUnknown,
}

// TestMigration runs the scripts in testdata/migration. The command `begin` begins a migration of a running VM from
// host n1 to n2. The argument `tpm` gives the VM a TPM. `source` and `target` are reports of the hosts, after the given
// number of seconds. `cancel` is the call, `wait` lets time pass, and `facts` changes the facts that the control plane
// knows about the hosts. Each command prints the steps that follow, and the changed fields.
func TestMigration(t *testing.T) {
	datadriven.Walk(t, "testdata/migration", func(t *testing.T, path string) {
		var vm VM
		var now Time
		var facts MigrationFacts
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			before := vm
			switch d.Cmd {
			case "begin":
				if vm.Generation == 0 || d.HasArg("new") {
					now, facts = 0, 0
					vm = VM{Name: "a", Node: "n1", State: Running, Generation: 4, Desired: Desired{On: true, Starts: 1}}
					vm.Spec.Security.TPM = d.HasArg("tpm")
					if d.HasArg("restart") {
						vm.Metadata = map[string]string{RestartPolicy: "on-failure"}
					}
				}
				before = vm
				if err := vm.BeginMigration("n2", 300_000, now); err != nil {
					return "refused: " + err.Error()
				}
			case "source", "target":
				var seconds int64
				d.MaybeScanArgs(t, "after", &seconds)
				now += seconds * 1000
				host := map[string]NodeID{"source": "n1", "target": "n2"}[d.Cmd]
				vm.ObserveMigration(host, migrationReport(t, d, &vm))
			case "cancel":
				if !vm.CancelMigration() {
					return "refused"
				}
			case "facts":
				facts = 0
				for _, a := range d.CmdArgs {
					facts |= map[string]MigrationFacts{"target-fenced": TargetFenced, "source-silent": SourceSilent,
						"source-off": SourceOff, "old-pool-agent": OldPoolAgent, "target-given-up": TargetGivenUp}[a.Key]
				}
			case "wait":
				var seconds int64
				d.ScanArgs(t, "s", &seconds)
				now += seconds * 1000
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			var steps []string
			for step := vm.AdvanceMigration(facts, now); step != MigrationWait; step = vm.AdvanceMigration(facts, now) {
				steps = append(steps, step.String())
			}
			return migrationChange(strings.Join(steps, ", "), before, vm)
		})
	})
}

func migrationReport(t *testing.T, d *datadriven.TestData, vm *VM) Observation {
	o := Observation{Generation: vm.Generation, Observed: ObservedRunning}
	if d.HasArg("ended") {
		o.Observed = ObservedEnded
	}
	if d.HasArg("absent") {
		o.Observed = ObservedAbsent
	}
	d.MaybeScanArgs(t, "gen", &o.Generation)
	r := MigrationObservation{}
	if vm.Migration != nil {
		r.Attempt = vm.Migration.Attempt
	}
	d.MaybeScanArgs(t, "attempt", &r.Attempt)
	d.MaybeScanArgs(t, "error", &r.Error)
	d.MaybeScanArgs(t, "paused", &r.DowntimeMS)
	var state string
	if d.MaybeScanArgs(t, "is", &state); state != "" {
		r.State = migrationStates[state]
		require.NotZero(t, r.State, "unknown state %q", state)
		o.Migration = &r
	}
	if r.State == MigrationPrepared {
		r.Machine, r.Address = []byte("q35"), "198.51.100.2:7000"
	}
	return o
}

// migrationChange prints the steps and what they have changed: the phase, the host, the generation and the result.
func migrationChange(steps string, a, b VM) string {
	if steps == "" && a.Generation == b.Generation {
		return "wait"
	}
	out := []string{}
	if steps != "" {
		out = append(out, steps)
	}
	phase := "none"
	if b.Migration != nil {
		phase = b.Migration.Phase.String()
	}
	out = append(out, fmt.Sprintf("%s on %s  gen %d  phase %s", b.State, b.Node, b.Generation, phase))
	if a.Desired != b.Desired {
		out = append(out, fmt.Sprintf("desired on=%v starts=%d", b.Desired.On, b.Desired.Starts))
	}
	if r := b.LastMigration; r != nil && (a.LastMigration == nil || *r != *a.LastMigration) {
		out = append(out, fmt.Sprintf("moved=%v reason=%q", r.Moved, r.Reason))
		if r.DowntimeMS > 0 {
			out = append(out, fmt.Sprintf("paused for %d ms", r.DowntimeMS))
		}
	}
	return strings.Join(out, "\n")
}

// TestMigrationRulesNeverRunTwoGuests checks every combination of phase, states and facts: the source gets the guest
// back after the switchover only if the target has failed or is fenced, or if the source has cancelled the attempt.
func TestMigrationRulesNeverRunTwoGuests(t *testing.T) {
	for source := MigrationUnknown; source <= MigrationFailed; source++ {
		for target := MigrationUnknown; target <= MigrationFailed; target++ {
			for facts := range 2 * awaiting {
				m := Migration{Attempt: 5, Source: "n1", Target: "n2", Phase: MigrationSwitchover, Deadline: 10,
					SourceState: source, TargetState: target}
				do, _ := m.Step(facts, 20)
				gone := facts&SourceSilent != 0 || source == MigrationHandedOver && facts&sourceEnded != 0
				if facts&(HostState|TargetFenced|TargetGivenUp) == HostState|TargetFenced && gone && source != MigrationCancelled &&
					target != MigrationFailed && target != MigrationRunning {
					require.Contains(t, []MigrationAction{MigrationAwaitTarget, MigrationWait}, do,
						"the lost target may have the newest state of the TPM")
				}
				switch do {
				case MigrationUndo:
					require.Equal(t, MigrationCancelled, source)
				case MigrationRollBack:
					require.True(t, target == MigrationFailed || facts&TargetFenced != 0, "%s %s %b", source, target, facts)
				case MigrationComplete:
					require.Equal(t, MigrationRunning, target)
				case MigrationLose:
					require.NotEqual(t, MigrationRunning, target)
					require.False(t, target == MigrationFailed && facts&HostState != 0,
						"the VM is assigned to a target that does not have the state of its TPM")
					require.True(t, target == MigrationFailed || facts&TargetFenced != 0, "%s %s %b", source, target, facts)
				case MigrationWait, MigrationAskToGiveUp, MigrationExplain, MigrationAwaitTarget:
				default:
					t.Fatalf("%s after the switchover", do)
				}
			}
		}
	}
}

// TestMigrationsEnd checks every combination of states and facts: a migration whose deadline has passed never waits,
// except after the switchover, when only the target or its fence can end it, and when the VM's status has said so. Also,
// no migration waits for a lost source before the switchover, and none ends with disks older than those of a source that
// may have continued the guest.
func TestMigrationsEnd(t *testing.T) {
	for phase := MigrationPrepare; phase <= MigrationRollback; phase++ {
		for source := MigrationUnknown; source <= MigrationFailed; source++ {
			for target := MigrationUnknown; target <= MigrationFailed; target++ {
				for facts := range sourceEnded {
					m := Migration{Attempt: 5, Source: "n1", Target: "n2", Phase: phase, Deadline: 10, SourceState: source, TargetState: target}
					do, _ := m.Step(facts, 20)
					require.NotEqual(t, MigrationWait, do, "%s %s %s %b", phase, source, target, facts)
					if do == MigrationLose && phase == MigrationSwitchover {
						require.Equal(t, MigrationHandedOver, source, "the source may have newer disks")
					}
					m.Deadline = 30
					if do, _ := m.Step(facts, 20); phase < MigrationSwitchover && facts&SourceSilent != 0 {
						require.Equal(t, MigrationAbort, do, "%s %s %s %b", phase, source, target, facts)
					}
				}
			}
		}
	}
	vm := VM{Name: "a", Node: "n1", State: Running, Generation: 4, Desired: Desired{On: true}}
	require.NoError(t, vm.BeginMigration("n2", 10, 0))
	vm.setPhase(MigrationSwitchover, "n2", 10)
	require.Equal(t, MigrationAskToGiveUp, vm.AdvanceMigration(0, 10))
	require.Equal(t, MigrationWait, vm.AdvanceMigration(0, 10+GiveUpTime-1))
	require.Equal(t, MigrationExplain, vm.AdvanceMigration(0, 10+GiveUpTime))
	require.Contains(t, vm.Status.LastError, "waits for its target n2")
	require.Contains(t, vm.Status.LastError, "`trivet host fence --confirmed-off`")
	require.Equal(t, MigrationWait, vm.AdvanceMigration(0, 1<<40), "the status is written once")
	vm.Observe(Observation{Generation: vm.Generation, Observed: ObservedRunning}, 1<<40)
	require.Contains(t, vm.Status.LastError, "waits for its target n2", "a report of the target removes the explanation")
}

// TestLeaseRuleOfMigration checks which host's promise to stop the VM at the end of its lease is in the status: that of
// VM.Node. With another host's promise, the VM could be started elsewhere while VM.Node runs it.
func TestLeaseRuleOfMigration(t *testing.T) {
	begin := func(promised bool) *VM {
		vm := &VM{Name: "a", Node: "n1", State: Running, Generation: 4, Desired: Desired{On: true}, Status: Status{StopsWithLease: promised}}
		require.NoError(t, vm.BeginMigration("n2", 10, 0))
		vm.setPhase(MigrationSwitchover, "n2", 10)
		require.False(t, vm.Status.StopsWithLease, "the target has promised nothing")
		return vm
	}
	vm := begin(false)
	vm.Status.StopsWithLease = true // the target has reported
	vm.setPhase(MigrationRollback, "n1", 10)
	require.False(t, vm.Status.StopsWithLease, "the source has not promised it")
	vm = begin(true)
	vm.setPhase(MigrationRollback, "n1", 10)
	require.True(t, vm.Status.StopsWithLease, "the source has promised it")
}

// TestUndescribedMachine checks that a migration ends at once if the source cannot describe its QEMU.
func TestUndescribedMachine(t *testing.T) {
	for _, c := range []struct {
		report MigrationObservation
		why    string
	}{
		{MigrationObservation{State: MigrationUnknown, Error: "the description is too long"}, "the description is too long"},
		{MigrationObservation{State: MigrationPrepared, Machine: make([]byte, MaxMigrationMachine+1)}, "has 65537 bytes, the limit is 65536"},
	} {
		vm := VM{Name: "a", Node: "n1", State: Running, Generation: 4, Desired: Desired{On: true}}
		require.NoError(t, vm.BeginMigration("n2", 1000, 0))
		c.report.Attempt = vm.Migration.Attempt
		require.True(t, vm.ObserveMigration("n1", Observation{Generation: vm.Generation, Observed: ObservedRunning, Migration: &c.report}))
		require.Equal(t, MigrationAbort, vm.AdvanceMigration(0, 1))
		require.Equal(t, []any{Running, NodeID("n1")}, []any{vm.State, vm.Node})
		require.Contains(t, vm.LastMigration.Reason, c.why)
		require.Contains(t, vm.History[len(vm.History)-1].Error, c.why)
	}
}

// TestChoiceOfMigration checks that the reason for the VM's host is that of the migration exactly if the VM is on the
// target afterwards.
func TestChoiceOfMigration(t *testing.T) {
	for target, want := range map[MigrationState]string{MigrationRunning: "a call requested this host", MigrationFailed: "it was free"} {
		vm := VM{Name: "a", Node: "n1", State: Running, Generation: 4, Desired: Desired{On: true}, Choice: &Choice{Node: "n1", Reason: "it was free"}}
		require.NoError(t, vm.BeginMigration("n2", 1000, 0))
		vm.Migration.Choice = "a call requested this host"
		vm.setPhase(MigrationSwitchover, "n2", 1000)
		m := *vm.Migration
		m.TargetState, m.SourceState = target, MigrationCancelled
		if target == MigrationRunning {
			m.SourceState = MigrationHandedOver
		}
		vm.Migration = &m
		vm.AdvanceMigration(0, 1)
		require.Equal(t, []any{vm.Node, want}, []any{vm.Choice.Node, vm.Choice.Reason})
	}
}

// TestRolledBackAttempt rolls a migration back to a source that does not answer, and then begins and cancels another one.
// The host must still receive the first attempt, because it has not continued the guest.
func TestRolledBackAttempt(t *testing.T) {
	vm := VM{Name: "a", Node: "n1", State: Running, Generation: 4, Desired: Desired{On: true}}
	require.NoError(t, vm.BeginMigration("n2", 1000, 0))
	first := vm.Migration.Attempt
	vm.setPhase(MigrationRollback, "n1", 1000)
	require.Equal(t, MigrationLeave, vm.AdvanceMigration(0, 2000))
	require.Equal(t, first, vm.RolledBack)
	require.NoError(t, vm.BeginMigration("n2", 1000, 3000))
	require.True(t, vm.CancelMigration())
	require.Equal(t, MigrationAbort, vm.AdvanceMigration(0, 3000))
	require.Equal(t, first, vm.RolledBack)
}

// TestMigrationTimeout checks the default timeout and its limits.
func TestMigrationTimeout(t *testing.T) {
	vm := VM{Spec: Spec{Memory: &Memory{SizeMiB: 2048}, CPU: &CPU{VCPUs: 1}, Disks: []Disk{{ID: "a", SizeGiB: 8}}}}
	require.Equal(t, Time(1500_000), vm.MigrationTimeout(0))
	require.Equal(t, Time(20_000), vm.MigrationTimeout(20))
	vm.Spec.Disks = nil
	require.Equal(t, Time(300_000), vm.MigrationTimeout(0))
}

// TestNotMigratable checks which VMs cannot be migrated.
func TestNotMigratable(t *testing.T) {
	for _, c := range []struct {
		vm  VM
		why string
	}{
		{VM{}, ""},
		{VM{Spec: Spec{Disks: []Disk{{ID: "a", SizeGiB: 8}}}}, ""},
		{VM{Spec: Spec{Disks: []Disk{{ID: "a", Volume: "v"}}}}, ""},
		{VM{Spec: Spec{Disks: []Disk{{ID: "a", Volume: "v", Change: DeviceAttaching}}}}, "has the disk a"},
		{VM{Spec: Spec{Network: []NIC{{ID: "n", Change: DeviceDetaching}}}}, "has the NIC n"},
		{VM{Spec: Spec{Security: Security{SecureBoot: true, TPM: true}}}, ""},
		{VM{Metadata: map[string]string{FirmwareKey: "uefi", CDROMKey: "i", RescueKey: "j"}}, ""},
		{VM{Resize: &Resize{}}, "has a resize that takes effect at its next start"},
		{VM{Desired: Desired{Reboots: 1}}, "is being rebooted"},
	} {
		why := c.vm.NotMigratable()
		if c.why == "" {
			require.Empty(t, why)
		}
		require.Contains(t, why, c.why)
	}
}

// TestMigrationFeatures checks which features the hosts of a migration need because of the VM's machine.
func TestMigrationFeatures(t *testing.T) {
	require.Empty(t, (&VM{}).MigrationFeatures())
	for _, vm := range []VM{
		{Spec: Spec{Security: Security{TPM: true}}},
		{Spec: Spec{Security: Security{SecureBoot: true}}},
		{Metadata: map[string]string{FirmwareKey: "uefi"}},
		{Metadata: map[string]string{CDROMKey: "i"}},
		{Metadata: map[string]string{RescueKey: "i"}},
	} {
		require.Equal(t, []string{FeatureFirmwareMigration}, vm.MigrationFeatures())
	}
}

// TestMigratingVMIsNotRecovered checks that a VM is not moved to a third host while two hosts may have it, and that no
// recovery is tried in a state that does not allow it.
func TestMigratingVMIsNotRecovered(t *testing.T) {
	vm := VM{State: Running, Node: "n1", Desired: Desired{On: true}, Status: Status{StopsWithLease: true},
		Metadata: map[string]string{HighAvailability: "restart"}}
	require.Empty(t, vm.Recoverable(false))
	require.NoError(t, vm.BeginMigration("n2", 1000, 1))
	require.Equal(t, "is being migrated", vm.Recoverable(true))
	require.Error(t, vm.LoseHost(2))
	vm.State, vm.Migration = Failed, nil
	require.Equal(t, "is FAILED", vm.Recoverable(true), "no host can build the VM")
}
