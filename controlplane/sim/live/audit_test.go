package live

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/sim"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// newTestWitness returns a witness of a simulation with two hosts, in which the VM "vm" of generation 1 is on the node
// "n1".
func newTestWitness() (*witness, *cloud.VM, [2]*host) {
	f := &fleet{trace: sim.NewTrace(func() string { return "" }), counts: map[string]int{}, byNode: map[cloud.NodeID]*host{}}
	a := newAudit(f)
	f.audit = a
	var hosts [2]*host
	for i, name := range []endpoint{"h1", "h2"} {
		hosts[i] = &host{f: f, name: name, guests: map[cloud.VMID]*guest{}, volumes: map[cloud.VolumeID]*storedVolume{}}
	}
	f.byNode["n1"] = hosts[0]
	vm := &cloud.VM{ID: "vm", Name: "vm", Node: "n1", Generation: 1, Spec: cloud.Spec{
		CPU: &cloud.CPU{VCPUs: 2}, Memory: &cloud.Memory{SizeMiB: 512},
	}}
	a.vms["vm"], a.names["vm"] = vm, "vm"
	a.placed["n1"] = map[cloud.VMID]*node.Placed{"vm": {Generation: 1}}
	a.nodes["n1"] = &cloud.Node{ID: "n1", Allocatable: cloud.Capacity{VCPUs: 8, MemoryMiB: 8192, StorageGiB: 10}, Allocated: vm.Reserved()}
	return a, vm, hosts
}

// TestRunnerWithoutLease checks that the witness notices a VM that runs on after the lease of its host has ended.
func TestRunnerWithoutLease(t *testing.T) {
	for _, leased := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			a, _, hosts := newTestWitness()
			g := &guest{proc: &proc{}}
			g.stopsWithLease = leased
			hosts[0].guests["vm"], hosts[0].lease = g, time.Now().Add(time.Second)
			require.NoError(t, a.checkLeases(), "the lease is valid")
			time.Sleep(2 * time.Second)
			require.NoError(t, a.checkLeases(), "the guard process has not killed the VM yet")
			time.Sleep(leaseGrace + time.Second)
			err := a.checkLeases()
			if !leased {
				require.NoError(t, err, "the VM needs no lease")
				return
			}
			require.ErrorContains(t, err, "VM vm has run on h1 for")
			g.proc = nil
			require.NoError(t, a.checkLeases(), "the VM does not run")
			require.Empty(t, a.unleased)
		})
	}
}

// TestTwoRunners checks that the witness notices a VM with processes on two hosts.
func TestTwoRunners(t *testing.T) {
	a, _, hosts := newTestWitness()
	a.launched(hosts[0], "vm", 1, false)
	a.stopped(hosts[0], "vm")
	a.launched(hosts[1], "vm", 2, false)
	require.Empty(t, a.f.broken)
	a.launched(hosts[0], "vm", 3, false)
	require.Equal(t, "two hosts run VM vm: h2 and h1", a.f.broken)
}

// TestCapacityThatDoesNotAddUp checks that the witness notices a host whose allocated capacity differs from the sum of
// its VMs.
func TestCapacityThatDoesNotAddUp(t *testing.T) {
	a, vm, _ := newTestWitness()
	require.NoError(t, a.balance())
	a.nodes["n1"].Allocated.VCPUs++
	require.ErrorContains(t, a.balance(), "its VMs add up to")
	a.nodes["n1"].Allocated = vm.Reserved()
	vm.Spec.Memory.SizeMiB++
	require.ErrorContains(t, a.balance(), "its VMs add up to")
}

// TestOperationThatDoesNotEnd checks that the witness notices a VM that stays in a transient state after its deadline.
func TestOperationThatDoesNotEnd(t *testing.T) {
	a, vm, _ := newTestWitness()
	require.Empty(t, a.overdue(100))
	vm.State, vm.Deadline = cloud.Starting, 50
	require.Empty(t, a.overdue(50))
	require.Equal(t, "VM vm is STARTING past its deadline", a.overdue(51))
	require.Equal(t, "VM vm is STARTING", a.transient())
}

// TestVMThatLeavesHostWithLease checks that the witness notices a VM that leaves a host whose lease is valid, or on
// which it runs.
func TestVMThatLeavesHostWithLease(t *testing.T) {
	a, vm, hosts := newTestWitness()
	vm.State = cloud.Running
	left := *vm
	left.Node, left.State, left.Generation = "", cloud.Pending, 2
	require.NoError(t, a.step(2, vm, &left))
	hosts[0].lease = time.Now().Add(time.Hour)
	require.ErrorContains(t, a.step(2, vm, &left), "whose lease is valid")
	hosts[0].guests["vm"] = &guest{proc: &proc{pid: 7}}
	require.ErrorContains(t, a.step(2, vm, &left), "on which pid 7 of start 0 runs")
}
