package cloud

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
)

// scenario is the state of one scenario of TestScenarios.
type scenario struct {
	vm    VM
	now   Time
	facts MigrationFacts
	// promises is true if the host of the VM reports that it stops the VM at the end of its lease.
	promises bool
}

// TestScenarios runs the scenarios in testdata/scenarios. The arguments of `scenario` are its name. Each line of its
// input is a step, and the output has the changes of each step. The first line may be `vm` with `ha`, `restart`,
// `promised` or `off`: the VM's policies, the promise of its host to stop it with the lease, and that it is stopped. The
// host of the VM is n1 at first. The other steps are:
//
//   - `begin HOST` begins a migration; `cancel` cancels it.
//   - `source STATE` and `target STATE` are reports of the hosts of the migration; `attempt=N` changes the attempt, and
//     `error=TEXT` adds an error. The states `ended` and `absent` are of the VM, without a migration.
//   - `source-silent`, `source-off`, `target-fenced` and `answer` change what the leader knows about the hosts.
//   - `wait SECONDS`, and the calls `start`, `stop`, `force-stop`, `delete` and `force-delete`.
//   - `report STATE` is a report of the VM's host about the VM: built, launching, running, ended or failed.
//   - `lost` and `off` are the loss of the VM's host, by its lease and as confirmed by a caller. `place HOST` gives the
//     VM another host.
//   - `end STATE HOST TEXT`, the last line: the state and the host that are expected, and a part of the error or of the
//     reason why the migration failed. Without a text, there must be neither an error nor a reason.
//
// A step that is refused must not change the VM. No two scenarios have the same steps.
func TestScenarios(t *testing.T) {
	names, steps := map[string]bool{}, map[string]string{}
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			require.Equal(t, "scenario", d.Cmd, d.Pos)
			var words []string
			for _, a := range d.CmdArgs {
				words = append(words, a.Key)
			}
			name := strings.Join(words, " ")
			require.False(t, names[name], "%s: the name %q is used twice", d.Pos, name)
			names[name] = true
			input, _, _ := strings.Cut(d.Input, "end ")
			require.Empty(t, steps[input], "%s: %q has the same steps", d.Pos, name)
			steps[input] = name
			return runScenario(t, d)
		})
	})
	require.GreaterOrEqual(t, len(names), 200)
}

func runScenario(t *testing.T, d *datadriven.TestData) string {
	s := &scenario{vm: VM{Name: "a", Node: "n1", State: Running, Generation: 4, Desired: Desired{On: true, Starts: 1}}}
	s.vm.Status.StartsDone = 1
	var out []string
	ended := false
	for line := range strings.Lines(d.Input) {
		line = strings.TrimSpace(line)
		words := strings.Fields(line)
		require.False(t, ended, "%s: a step after the end", d.Pos)
		if words[0] == "end" {
			ended = true
			s.expect(t, d, words[1:])
			continue
		}
		before := s.vm
		problem := s.step(t, d, words)
		change := s.advance(t, d, before)
		if problem != "" {
			require.Equal(t, before, s.vm, "%s: %s has changed the VM, and was %s", d.Pos, line, problem)
			change = problem
		}
		if change != "" {
			out = append(out, line+": "+change)
		}
	}
	require.True(t, ended, "%s: the scenario has no end", d.Pos)
	if r := s.vm.LastMigration; r != nil {
		out = append(out, fmt.Sprintf("last migration from %s to %s: moved=%v %s", r.Source, r.Target, r.Moved, r.Reason))
	}
	if s.vm.Status.LastError != "" {
		out = append(out, "error: "+s.vm.Status.LastError)
	}
	return strings.Join(out, "\n")
}

// expect checks the end of a scenario. An expected host "-" means that the VM has no host.
func (s *scenario) expect(t *testing.T, d *datadriven.TestData, words []string) {
	require.Equal(t, words[0]+" "+words[1], s.vm.State.String()+" "+string(orDash(s.vm.Node)), d.Pos)
	text := s.vm.Status.LastError
	if r := s.vm.LastMigration; r != nil && r.Reason != "" {
		text += " | " + r.Reason
	}
	want := strings.Join(words[2:], " ")
	if want == "" {
		require.Empty(t, text, "%s: the end names no error and no reason", d.Pos)
	}
	require.Contains(t, text, want, d.Pos)
}

func orDash(n NodeID) NodeID {
	if n == "" {
		return "-"
	}
	return n
}

// advance makes the steps of the migration that are due, checks the record, and returns what has changed since before.
func (s *scenario) advance(t *testing.T, d *datadriven.TestData, before VM) string {
	var steps []string
	for do := s.vm.AdvanceMigration(s.facts, s.now); do != MigrationWait; do = s.vm.AdvanceMigration(s.facts, s.now) {
		steps = append(steps, do.String())
	}
	vm := &s.vm
	require.Equal(t, vm.State == Migrating, vm.Migration != nil, "%s: the state is %s", d.Pos, vm.State)
	if !slices.Equal(before.Hosts(), vm.Hosts()) && vm.State != Deleted { // package vm gives a deletion its generation
		require.Greater(t, vm.Generation, before.Generation, "%s: the hosts have changed without a new generation", d.Pos)
	}
	require.GreaterOrEqual(t, vm.Generation, before.Generation, d.Pos)
	out := strings.Join(steps, " and ")
	if before.State != vm.State || before.Node != vm.Node || phaseOf(&before) != phaseOf(vm) {
		out = strings.TrimSpace(out + " -> " + vm.State.String() + phaseOf(vm) + " on " + string(orDash(vm.Node)))
	}
	return out
}

func phaseOf(vm *VM) string {
	if vm.Migration == nil {
		return ""
	}
	return " " + vm.Migration.Phase.String()
}

// step makes one step of a scenario, and returns the text of the error if it was refused.
func (s *scenario) step(t *testing.T, d *datadriven.TestData, words []string) string {
	vm := &s.vm
	var err error
	switch words[0] {
	case "vm":
		s.options(words[1:])
	case "begin":
		err = vm.BeginMigration(NodeID(words[1]), 300_000, s.now)
	case "cancel":
		if !vm.CancelMigration() {
			return "refused: the migration cannot be cancelled"
		}
	case "source", "target":
		s.reportMigration(t, d, words)
	case "source-silent":
		s.facts |= SourceSilent
	case "source-off":
		s.facts |= SourceSilent | SourceOff
	case "target-fenced":
		s.facts |= TargetFenced
	case "answer":
		s.facts = 0
	case "wait":
		seconds, parse := strconv.ParseInt(words[1], 10, 64)
		require.NoError(t, parse, d.Pos)
		s.now += seconds * 1000
		vm.TimeOut(s.now)
	case "start":
		err = vm.Apply(StartRequested, s.now)
	case "stop":
		err = vm.Stop(DefaultStop, s.now)
	case "force-stop": // as package vm does it: the migration is cancelled first
		if vm.Migration != nil && !vm.CancelMigration() {
			return "refused: the migration cannot be cancelled"
		}
		vm.AdvanceMigration(s.facts, s.now)
		err = vm.Stop(0, s.now)
	case "delete":
		err = vm.Apply(DeleteRequested, s.now)
	case "force-delete":
		err = vm.Apply(ForceDeleteRequested, s.now)
		vm.Migration = nil
	case "report":
		s.reportVM(t, d, words)
	case "lost", "off":
		why := vm.Recoverable(words[0] == "off")
		if why != "" {
			return "stays: it " + why
		}
		err = vm.LoseHost(s.now)
	case "place":
		err = vm.PlaceOn(NodeID(words[1]), s.now)
	default:
		d.Fatalf(t, "unknown step %s", words[0])
	}
	if err != nil {
		return "refused: " + err.Error()
	}
	return ""
}

func (s *scenario) options(words []string) {
	s.vm.Metadata = map[string]string{}
	for _, w := range words {
		switch w {
		case "ha":
			s.vm.Metadata[HighAvailability] = "restart"
		case "restart":
			s.vm.Metadata[RestartPolicy] = "on-failure"
		case "promised":
			s.promises, s.vm.Status.StopsWithLease = true, true
		case "off":
			s.vm.State, s.vm.Desired.On = Stopped, false
		}
	}
}

// reportMigration is a report of a host of the migration, or of the last one.
func (s *scenario) reportMigration(t *testing.T, d *datadriven.TestData, words []string) {
	source, target, attempt := s.vm.Node, NodeID("n2"), s.vm.Generation
	if m := s.vm.Migration; m != nil {
		source, target, attempt = m.Source, m.Target, m.Attempt
	} else if r := s.vm.LastMigration; r != nil {
		source, target, attempt = r.Source, r.Target, r.Attempt
	}
	host := source
	if words[0] == "target" {
		host = target
	}
	o := Observation{Generation: s.vm.Generation, Observed: ObservedRunning, StartsDone: s.vm.Desired.Starts, StopsWithLease: s.promises}
	switch words[1] {
	case "ended":
		o.Observed, o.Exit = ObservedEnded, ExitFailed
	case "absent":
		o.Observed = ObservedAbsent
	default:
		state, ok := migrationStates[words[1]]
		require.True(t, ok, "%s: unknown state %s", d.Pos, words[1])
		o.Migration = &MigrationObservation{Attempt: attempt, State: state}
		if state == MigrationPrepared {
			o.Migration.Machine, o.Migration.Address = []byte("q35"), "198.51.100.2:7000"
		}
	}
	for i, w := range words[2:] {
		if n, ok := strings.CutPrefix(w, "attempt="); ok {
			number, err := strconv.ParseUint(n, 10, 64)
			require.NoError(t, err, d.Pos)
			o.Migration.Attempt = number
		}
		if text, ok := strings.CutPrefix(w, "error="); ok {
			o.Migration.Error = strings.TrimSpace(text + " " + strings.Join(words[3+i:], " "))
			break
		}
	}
	s.vm.ObserveMigration(host, o)
	if s.vm.Node == host && s.vm.Migration != nil {
		s.vm.Observe(o, s.now)
	}
}

// reportVM is a report of the VM's host, which has executed all requests.
func (s *scenario) reportVM(t *testing.T, d *datadriven.TestData, words []string) {
	observed, ok := map[string]Observed{"built": ObservedBuilt, "launching": ObservedLaunching, "running": ObservedRunning,
		"ended": ObservedEnded, "failed": ObservedBuildFailed}[words[1]]
	require.True(t, ok, "%s: unknown state %s", d.Pos, words[1])
	o := Observation{Generation: s.vm.Generation, Observed: observed, StartsDone: s.vm.Desired.Starts, StopsWithLease: s.promises}
	if observed == ObservedEnded {
		o.Exit = ExitFailed
	}
	if observed == ObservedBuilt && s.vm.State == Creating {
		o.StartsDone = 0
	}
	s.vm.Observe(o, s.now)
}
