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
	"cancelled": MigrationCancelled, "failed": MigrationFailed,
}

// TestMigration runs the scripts in testdata/migration. `begin` begins a migration of a running VM from host n1 to n2.
// `source` and `target` are reports of the hosts, after the given number of seconds. `cancel` is the call, `wait` lets
// time pass, and `facts` changes the facts that the control plane knows about the hosts. Each command prints the steps
// that follow, and the changed fields.
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
						"source-off": SourceOff}[a.Key]
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
	d.MaybeScanArgs(t, "gen", &o.Generation)
	r := MigrationObservation{}
	if vm.Migration != nil {
		r.Attempt = vm.Migration.Attempt
	}
	d.MaybeScanArgs(t, "attempt", &r.Attempt)
	d.MaybeScanArgs(t, "error", &r.Error)
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
	}
	return strings.Join(out, "\n")
}

// TestMigrationRulesNeverRunTwoGuests checks every combination of phase, states and facts: the source gets the guest
// back after the switchover only if the target has failed or is fenced, or if the source has cancelled the attempt.
func TestMigrationRulesNeverRunTwoGuests(t *testing.T) {
	for source := MigrationUnknown; source <= MigrationFailed; source++ {
		for target := MigrationUnknown; target <= MigrationFailed; target++ {
			for facts := range MigrationFacts(1 << 7) {
				m := Migration{Attempt: 5, Source: "n1", Target: "n2", Phase: MigrationSwitchover, Deadline: 10,
					SourceState: source, TargetState: target}
				switch do, _ := m.Step(facts, 20); do {
				case MigrationUndo:
					require.Equal(t, MigrationCancelled, source)
				case MigrationRollBack:
					require.True(t, target == MigrationFailed || facts&TargetFenced != 0, "%s %s %b", source, target, facts)
				case MigrationComplete:
					require.Equal(t, MigrationRunning, target)
				case MigrationLose:
					require.NotEqual(t, MigrationRunning, target)
					require.True(t, target == MigrationFailed || facts&TargetFenced != 0, "%s %s %b", source, target, facts)
				case MigrationWait, MigrationAskToGiveUp:
				default:
					t.Fatalf("%s after the switchover", do)
				}
			}
		}
	}
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
		{VM{Spec: Spec{Disks: []Disk{{ID: "a", Volume: "v"}}}}, "has the volume v as disk a"},
		{VM{Spec: Spec{Network: []NIC{{ID: "n", Change: DeviceDetaching}}}}, "has the NIC n"},
		{VM{Spec: Spec{Security: Security{TPM: true}}}, "has a TPM"},
		{VM{Metadata: map[string]string{FirmwareKey: "uefi"}}, "has UEFI firmware"},
		{VM{Metadata: map[string]string{CDROMKey: "i"}}, "has a CD-ROM"},
		{VM{Resize: &Resize{}}, "has a resize that takes effect at its next start"},
		{VM{Metadata: map[string]string{RescueKey: "i"}}, "is booted from a rescue image"},
		{VM{Desired: Desired{Reboots: 1}}, "is being rebooted"},
	} {
		why := c.vm.NotMigratable()
		if c.why == "" {
			require.Empty(t, why)
		}
		require.Contains(t, why, c.why)
	}
}

// TestMigratingVMIsNotRecovered checks that a VM is not moved to a third host while two hosts may have it.
func TestMigratingVMIsNotRecovered(t *testing.T) {
	vm := VM{State: Running, Node: "n1", Desired: Desired{On: true}, Status: Status{StopsWithLease: true},
		Metadata: map[string]string{HighAvailability: "restart"}}
	require.Empty(t, vm.Recoverable(false))
	require.NoError(t, vm.BeginMigration("n2", 1000, 1))
	require.Equal(t, "is being migrated", vm.Recoverable(true))
	require.Error(t, vm.LoseHost(2))
}
