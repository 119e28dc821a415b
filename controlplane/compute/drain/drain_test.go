package drain

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestNext runs the scripts in testdata/next. A line of `next` is a VM: its ID, its activity, and the arguments
// `portable`, `nohost=`, `priority=`, `tries=`, `next=` (in seconds from now), `why=` and `error=`, with underscores for spaces. The arguments
// of `next` are `force`, `expired`, and `impatient` for a drain that began long ago. The result has the decision for each VM.
func TestNext(t *testing.T) {
	datadriven.Walk(t, "testdata/next", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			const now = 1_000_000
			request := &cloud.Drain{Phase: cloud.DrainMoving, Force: d.HasArg("force"), Began: now, Deadline: now + 1}
			if d.HasArg("impatient") {
				request.Began = now - changingPatience.Milliseconds()
			}
			if d.HasArg("expired") {
				request.Deadline = now
			}
			var vms []VM
			for line := range strings.Lines(d.Input) {
				vms = append(vms, parseVM(t, strings.Fields(line), now))
			}
			plan := Next(request, vms, now)
			var out strings.Builder
			for _, one := range plan.Decisions {
				fmt.Fprintf(&out, "%s: %s, %s", one.VM, one.Do, one.Status)
				if one.Reason != "" {
					fmt.Fprintf(&out, ": %s", one.Reason)
				}
				out.WriteString("\n")
			}
			fmt.Fprintf(&out, "empty=%t expired=%t\n", plan.Empty, plan.Expired)
			return out.String()
		})
	})
}

func parseVM(t *testing.T, words []string, now cloud.Time) VM {
	vm := VM{ID: cloud.VMID(words[0]), Priority: 50, Activity: Removing + 1}
	for a := Off; a <= Removing; a++ {
		if a.String() == words[1] {
			vm.Activity = a
		}
	}
	require.LessOrEqual(t, vm.Activity, Removing, "unknown activity %s", words[1])
	for _, word := range words[2:] {
		k, v, _ := strings.Cut(word, "=")
		n, _ := strconv.Atoi(v)
		switch text := strings.ReplaceAll(v, "_", " "); k {
		case "nohost":
			vm.NoHost = text
		case "portable":
			vm.Portable = true
		case "priority":
			vm.Priority = n
		case "tries":
			vm.Tries = n
		case "next":
			vm.Next = now + cloud.Time(n)*1000
		case "why":
			vm.Why = text
		case "error":
			vm.Error = text
		default:
			t.Fatalf("unknown argument %s", word)
		}
	}
	return vm
}

// TestActivityOf checks what a VM in each state does on the host "here".
func TestActivityOf(t *testing.T) {
	on := func(vm *cloud.VM) { vm.Desired.On = true }
	for _, c := range []struct {
		name      string
		state     cloud.State
		change    func(*cloud.VM)
		obstacle  string
		elsewhere string
		temporary string
		silent    bool
		want      Activity
		why       string
	}{
		{"running", cloud.Running, on, "", "", "", false, Running, ""},
		{"running, with an obstacle", cloud.Running, on, "has a TPM", "", "", false, Fixed, "has a TPM"},
		{"running, and a volume is being flattened", cloud.Running, on, "", "", "is flattening", false, Changing, "is flattening"},
		{"running, with an obstacle that stays", cloud.Running, on, "has a TPM", "", "is flattening", false, Fixed, "has a TPM"},
		{"running, with an old agent in its pool", cloud.Running, on, "", "has a volume", "", false, Obstructed, "has a volume"},
		{"running, with both obstacles", cloud.Running, on, "has a TPM", "has a volume", "", false, Fixed, "has a TPM"},
		{"running, with an old agent and a volume that is being flattened", cloud.Running, on, "", "has a volume", "is flattening", false, Obstructed, "has a volume"},
		{"running, on a silent host", cloud.Running, on, "has a TPM", "", "", true, Changing, "is on a host that does not answer"},
		{"to be stopped", cloud.Running, nil, "", "", "", false, Changing, "was requested to stop"},
		{"rebooting", cloud.Running, func(vm *cloud.VM) { on(vm); vm.Desired.Reboots = 1 }, "is being rebooted", "", "", false, Changing, "is being rebooted"},
		{"attaching a disk", cloud.Running, func(vm *cloud.VM) { on(vm); vm.Spec.Disks = []cloud.Disk{{Change: cloud.DeviceAttaching}} },
			"has a disk", "", "", false, Changing, "has a device that is being attached or detached"},
		{"starting", cloud.Starting, on, "", "", "", false, Changing, "is STARTING"},
		{"stopping", cloud.Stopping, nil, "", "", "", false, Changing, "is STOPPING"},
		{"stopped", cloud.Stopped, nil, "", "", "", false, Off, "is STOPPED and stays on this host"},
		{"stopped, on a silent host", cloud.Stopped, nil, "", "", "", true, Off, "is STOPPED and stays on this host"},
		{"built, and started then", cloud.Creating, on, "", "", "", false, Changing, "is CREATING"},
		{"being built", cloud.Creating, nil, "", "", "", false, Off, "is CREATING and stays on this host"},
		{"being built, started and stopped then", cloud.Creating, func(vm *cloud.VM) { vm.Desired.Starts = 1 }, "", "", "", false, Changing, "is CREATING"},
		{"failed to build", cloud.Failed, nil, "", "", "", false, Off, "is FAILED and stays on this host"},
		{"died", cloud.Error, func(vm *cloud.VM) { vm.Status.Actual = cloud.Error }, "", "", "", false, Off, "is in ERROR and does not run"},
		{"did not stop in time", cloud.Error, func(vm *cloud.VM) { vm.Status.Actual = cloud.Running }, "", "", "", false, Fixed, "is in ERROR and may still run"},
		{"did not start in time", cloud.Error, on, "", "", "", false, Fixed, "is in ERROR and may still run"},
		{"leaving", cloud.Migrating, func(vm *cloud.VM) { vm.Migration = &cloud.Migration{Source: "here", Target: "there"} }, "", "", "", false, Leaving, ""},
		{"leaving after the switchover", cloud.Migrating, func(vm *cloud.VM) {
			vm.Node, vm.Migration = "there", &cloud.Migration{Source: "here", Target: "there", Phase: cloud.MigrationSwitchover}
		}, "", "", "", false, Leaving, ""},
		{"arriving", cloud.Migrating, func(vm *cloud.VM) {
			vm.Node, vm.Migration = "there", &cloud.Migration{Source: "there", Target: "here"}
		}, "", "", "", false, Arriving, "is being migrated to this host"},
		{"left", cloud.Running, func(vm *cloud.VM) { on(vm); vm.Node = "there" }, "", "", "", false, Removing, "has moved; the host has not deleted its files yet"},
	} {
		t.Run(c.name, func(t *testing.T) {
			vm := &cloud.VM{State: c.state, Node: "here"}
			if c.change != nil {
				c.change(vm)
			}
			got, why := ActivityOf(vm, "here", c.obstacle, c.elsewhere, c.temporary, c.silent)
			require.Equal(t, []any{c.want, c.why}, []any{got, why})
		})
	}
}

// TestRetryAfter checks that the time between two tries grows and is bounded.
func TestRetryAfter(t *testing.T) {
	require.Equal(t, []time.Duration{10 * time.Second, 20 * time.Second, 160 * time.Second, 5 * time.Minute, 5 * time.Minute},
		[]time.Duration{RetryAfter(1), RetryAfter(2), RetryAfter(5), RetryAfter(6), RetryAfter(1000)})
}

// TestForceWaits checks that a forced drain shuts no VM down while another one moves or can be moved.
func TestForceWaits(t *testing.T) {
	for _, other := range []VM{{Activity: Running}, {Activity: Leaving}, {Activity: Changing}, {Activity: Arriving}} {
		p := Next(&cloud.Drain{Force: true, Deadline: 1}, []VM{{ID: "fixed", Activity: Fixed}, other}, 0)
		for _, one := range p.Decisions {
			require.NotEqual(t, ShutDown, one.Do, "shut down before the others have moved: %s", other.Activity)
		}
	}
}

// TestForceSparesObstructed checks that a forced drain does not shut down a VM that cannot be moved because of another
// host, however long the drain waits, and shuts down the others.
func TestForceSparesObstructed(t *testing.T) {
	d := &cloud.Drain{Force: true, Deadline: cloud.Time(24 * time.Hour / time.Millisecond)}
	p := Next(d, []VM{{ID: "a", Activity: Obstructed}, {ID: "b", Activity: Fixed}}, d.Deadline-1)
	require.Equal(t, []Decision{{VM: "a", Do: Wait, Status: CannotMove}, {VM: "b", Do: ShutDown, Status: ShuttingDown}}, p.Decisions,
		"only the VM that nothing helps may be shut down")
	require.False(t, p.Empty)
}

// TestEmpty checks that a host is empty only if all its VMs are off.
func TestEmpty(t *testing.T) {
	for a := Off; a <= Removing; a++ {
		require.Equal(t, a == Off, Next(&cloud.Drain{}, []VM{{Activity: a}}, 0).Empty, "a host with a VM that may run is not empty: %s", a)
	}
	require.True(t, Next(&cloud.Drain{}, nil, 0).Empty)
}
