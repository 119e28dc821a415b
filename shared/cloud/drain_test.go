package cloud

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLeaveDrainedHost checks that only a VM that is certainly off and is not to run leaves a host that is drained.
func TestLeaveDrainedHost(t *testing.T) {
	for state := Pending; state <= Deleted; state++ {
		for _, on := range []bool{false, true} {
			vm := &VM{Name: "web", State: state, Node: "n1", Generation: 4, Desired: Desired{On: on}}
			err := vm.LeaveDrainedHost(5)
			if state != Stopped || on {
				require.Error(t, err, "%s on=%t", state, on)
				require.Equal(t, []any{state, NodeID("n1"), uint64(4)}, []any{vm.State, vm.Node, vm.Generation})
				continue
			}
			require.NoError(t, err)
			require.Equal(t, []any{Pending, NodeID(""), uint64(5), NodeID("n1")}, []any{vm.State, vm.Node, vm.Generation, vm.Recovery.From})
			require.Equal(t, "its host is drained", vm.History[0].Cause())
		}
	}
	vm := &VM{State: Stopped, Node: "n1", Desired: Desired{StartAfterStop: true}}
	require.Error(t, vm.LeaveDrainedHost(5))
}

// TestNodeState checks the state of a host by its heartbeats, what its agent declares, its cordon and its drain.
func TestNodeState(t *testing.T) {
	drain := func(p DrainPhase) *Drain { return &Drain{Phase: p} }
	for _, c := range []struct {
		name string
		n    Node
		now  Time
		want NodeState
	}{
		{"ready", Node{}, 1, NodeReady},
		{"silent", Node{}, HeartbeatTimeout + 2, NodeNotReady},
		{"cannot run guests", Node{Declared: NodeNotReady}, 1, NodeNotReady},
		{"cordoned", Node{Cordoned: true}, 1, NodeCordoned},
		{"drained", Node{Cordoned: true, Drain: drain(DrainMoving)}, 1, NodeDraining},
		{"drained, and cannot run guests", Node{Declared: NodeNotReady, Drain: drain(DrainMoving)}, 1, NodeDraining},
		{"drained, and silent", Node{Drain: drain(DrainMoving)}, HeartbeatTimeout + 2, NodeNotReady},
		{"in maintenance", Node{Cordoned: true, Drain: drain(DrainEmpty)}, 1, NodeMaintenance},
		{"in maintenance, and silent", Node{Cordoned: true, Drain: drain(DrainEmpty)}, HeartbeatTimeout + 2, NodeNotReady},
		{"not drained in time", Node{Cordoned: true, Drain: drain(DrainIncomplete)}, 1, NodeCordoned},
	} {
		require.Equal(t, c.want, c.n.State(c.now, 1), c.name)
	}
}
