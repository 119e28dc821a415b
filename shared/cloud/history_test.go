package cloud

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHistory checks that a VM keeps its last state changes with their causes, and that a copy of the VM keeps the
// history it had.
func TestHistory(t *testing.T) {
	vm := &VM{Name: "web", State: Creating, Node: "n1"}
	require.True(t, vm.Observe(Observation{Observed: ObservedBuilt}, 1))
	require.NoError(t, vm.Apply(StartRequested, 2))
	require.NoError(t, vm.Apply(StartRequested, 3), "a repeat changes nothing")
	require.Equal(t, []Transition{
		{At: 1, From: Creating, To: Stopped, Event: Built},
		{At: 2, From: Stopped, To: Starting, Event: StartRequested},
	}, vm.History)

	before := *vm
	require.True(t, vm.Observe(Observation{
		Generation: vm.Generation, Observed: ObservedEnded, Exit: ExitFailed, StartsDone: vm.Desired.Starts, LastError: strings.Repeat("é", 200),
	}, 4))
	last := vm.History[len(vm.History)-1]
	require.Equal(t, "its process could not be started", last.Cause())
	require.Equal(t, strings.Repeat("é", 100)+" …", last.Error)
	require.Len(t, before.History, 2)

	for i := range Time(30) {
		ev := StopRequested
		if vm.State == Error || vm.State == Stopped {
			ev = StartRequested
		}
		require.NoError(t, vm.Apply(ev, 10+i))
		vm.State = map[State]State{Starting: Running, Stopping: Stopped}[vm.State]
	}
	require.Len(t, vm.History, MaxHistory)
	require.EqualValues(t, 39, vm.History[MaxHistory-1].At)
	require.Empty(t, vm.History[MaxHistory-1].Error)
}

// TestCauses checks that each event has a text.
func TestCauses(t *testing.T) {
	for ev := StartRequested; ev <= MigrationEnded; ev++ {
		require.NotEmpty(t, causes[ev], ev.String())
	}
}
