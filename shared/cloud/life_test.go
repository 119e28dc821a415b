package cloud

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
)

// TestLife runs the scripts in testdata/life. Each command is an API call (such as `stop`), a report of the host
// (`report`) or the passing of time (`wait`), and prints the state and the changed fields of the VM. Time advances only
// by `wait`.
func TestLife(t *testing.T) {
	datadriven.Walk(t, "testdata/life", func(t *testing.T, path string) {
		var vm VM
		var now Time
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			before := vm
			var err error
			switch d.Cmd {
			case "create":
				now = 0
				vm = VM{Name: "a", Node: "n1", State: Creating, Generation: 1, Deadline: CreatingTime}
				if d.HasArg("restart") {
					vm.Metadata = map[string]string{RestartPolicy: "on-failure"}
				}
			case "start":
				err = vm.Apply(StartRequested, now)
			case "stop":
				grace := uint64(DefaultStop)
				if d.HasArg("force") {
					grace = 0
				}
				err = vm.Stop(grace, now)
			case "delete":
				err = vm.Apply(map[bool]Event{false: DeleteRequested, true: ForceDeleteRequested}[d.HasArg("force")], now)
			case "reboot":
				err = vm.Reboot()
			case "reset":
				err = vm.Reset()
			case "report":
				vm.Observe(observation(t, d, &vm), now)
			case "wait":
				var seconds int64
				d.ScanArgs(t, "s", &seconds)
				now += seconds * 1000
				vm.TimeOut(now)
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			if err != nil {
				require.Equal(t, before, vm, "a refused call changed something")
				return "refused: " + err.Error()
			}
			return change(before, vm)
		})
	})
}

func observation(t *testing.T, d *datadriven.TestData, vm *VM) Observation {
	levels := map[string]Observed{"building": ObservedBuilding, "built": ObservedBuilt, "launching": ObservedLaunching,
		"up": ObservedRunning, "stopping": ObservedStopping, "build-failed": ObservedBuildFailed, "ended": ObservedEnded}
	exits := map[string]Exit{"guest": ExitGuest, "requested": ExitRequested, "failed": ExitFailed}
	o := Observation{Generation: vm.Generation, StartsDone: vm.Desired.Starts}
	var level, exit string
	d.ScanArgs(t, "observed", &level)
	d.MaybeScanArgs(t, "exit", &exit)
	d.MaybeScanArgs(t, "gen", &o.Generation)
	d.MaybeScanArgs(t, "starts", &o.StartsDone)
	d.MaybeScanArgs(t, "error", &o.LastError)
	o.Observed, o.Exit = levels[level], exits[exit]
	require.NotZero(t, o.Observed, "unknown level %q", level)
	return o
}

func change(a, b VM) string {
	var out []string
	if a.State != b.State {
		out = append(out, fmt.Sprintf("%s -> %s", a.State, b.State))
	} else {
		out = append(out, b.State.String())
	}
	if a.Generation != b.Generation {
		out = append(out, fmt.Sprintf("gen %d", b.Generation))
	}
	if w := b.Desired; w != a.Desired {
		power := "off"
		if w.On {
			power = "on"
		}
		out = append(out, fmt.Sprintf("desired %s starts=%d reboots=%d resets=%d grace=%dms start-after-stop=%v",
			power, w.Starts, w.Reboots, w.Resets, w.GraceMS, w.StartAfterStop))
	}
	if b.Status.LastError != a.Status.LastError {
		out = append(out, fmt.Sprintf("last_error=%q", b.Status.LastError))
	}
	return strings.Join(out, "  ")
}

// TestEveryTransientStateTimesOut checks that every transient state has a transition for TimedOut, so that no VM stays
// in one until an operator acts.
func TestEveryTransientStateTimesOut(t *testing.T) {
	for _, s := range []State{Creating, Starting, Stopping} {
		require.Contains(t, next[s], TimedOut, "%s", s)
	}
}

// TestForcedDeleteAlwaysWorks checks that a forced delete is allowed in every state, and that no event changes a
// DELETED VM.
func TestForcedDeleteAlwaysWorks(t *testing.T) {
	for s := Pending; s < Deleted; s++ {
		require.Equal(t, Deleted, next[s][ForceDeleteRequested], "%s", s)
	}
	require.Empty(t, next[Deleted])
}
