package vm

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/metricstest"
)

// movable changes a request to that of a VM without disks, which can be on any host.
func movable(q *CreateRequest) {
	q.Spec.Disks = nil
	q.Metadata = map[string]string{cloud.HighAvailability: "restart"}
}

// TestCapacityOfHosts checks what Capacity and the metrics report for a cloud in which VMs of one host find no other
// host. A VM with a disk on its host and a VM that should not run are not started elsewhere.
func TestCapacityOfHosts(t *testing.T) {
	w := newWorld(t)
	first := w.AddHost("h1", cloud.Capacity{VCPUs: 6, MemoryMiB: 4096, StorageGiB: 100})
	var vms []*cloud.VM
	for i := range 2 {
		vms = append(vms, w.create(fmt.Sprint("vm-", i), movable))
	}
	w.create("local")
	w.AwaitFleet()
	w.AddHost("h2", cloud.Capacity{VCPUs: 2, MemoryMiB: 4096, StorageGiB: 100}, func(n *cloud.Node) { n.HugepagesMiB = 128 })
	w.AwaitFleet()

	all, err := w.vms.Capacity(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Equal(t, HostCapacity{
		ID: first, Name: "h1", State: cloud.NodeReady, Capacity: w.Node(first).Capacity, Allocatable: w.Node(first).Allocatable,
		Allocated: w.allocated(first), Loss: all[0].Loss,
	}, all[0])
	require.Equal(t, 3, all[0].Loss.VMs)
	require.Zero(t, all[0].Loss.Recovered+all[0].Loss.Waiting, "VMs that should not run are not started elsewhere")

	w.update(func(tx *store.Tx) {
		for _, one := range vms {
			vm, err := VMs.Get(tx, string(acme.Project), string(one.ID))
			require.NoError(t, err)
			vm.Desired.On = true
			VMs.Put(tx, vm, string(acme.Project), string(one.ID))
		}
	})
	all, err = w.vms.Capacity(t.Context())
	require.NoError(t, err)
	require.Equal(t, []int{3, 1, 1}, []int{all[0].Loss.VMs, all[0].Loss.Recovered, all[0].Loss.Waiting})
	require.Equal(t, "vm-1", all[0].Loss.First)
	require.Equal(t, "h2 has 0 vCPUs free, 2 needed", all[0].Loss.Reason)
	require.Zero(t, all[1].Loss.Waiting)

	values := metricstest.Values(t, NewCapacityCollector(w.vms))
	const mib, gib = 1 << 20, 1 << 30
	require.Equal(t, map[string]float64{
		"trivet_any_host_can_be_lost": 0, "trivet_hosts_that_cannot_be_lost": 1,
		"trivet_hosts_capacity vcpus": 8, "trivet_hosts_capacity memory_bytes": 8192 * mib, "trivet_hosts_capacity storage_bytes": 200 * gib,
		"trivet_hosts_allocatable vcpus": 8, "trivet_hosts_allocatable memory_bytes": 8192 * mib, "trivet_hosts_allocatable storage_bytes": 200 * gib,
		"trivet_hosts_allocated vcpus": 6, "trivet_hosts_allocated memory_bytes": 1536 * mib, "trivet_hosts_allocated storage_bytes": 5 * gib,
		"trivet_hosts_capacity hugepages_bytes": 128 * mib, "trivet_hosts_allocatable hugepages_bytes": 128 * mib, "trivet_hosts_allocated hugepages_bytes": 0,
		"trivet_hosts_capacity dedicated_vcpus": 0, "trivet_hosts_allocatable dedicated_vcpus": 0, "trivet_hosts_allocated dedicated_vcpus": 0,
	}, values)
}

// TestInventoryMetrics checks the metrics of hosts, VMs and placements.
func TestInventoryMetrics(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", cloud.Capacity{VCPUs: 6, MemoryMiB: 4096, StorageGiB: 100})
	one := w.create("web")
	w.AwaitFleet()
	tooLarge := func(q *CreateRequest) { q.Spec.CPU = &cloud.CPU{VCPUs: 65} }
	_, err := w.vms.Create(w.as(acme, "key"), acme, small("huge", tooLarge), [32]byte{})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)

	values := metricstest.Values(t, NewInventoryCollector(w.vms))
	for name, want := range map[string]float64{
		"trivet_hosts READY": 1, "trivet_hosts NOT_READY": 0, "trivet_hosts MAINTENANCE": 0,
		"trivet_host_state " + string(host) + " READY":                 1,
		"trivet_host_last_heartbeat_timestamp_seconds " + string(host): float64(w.Clock.Now().Unix()),
		"trivet_host_allocated " + string(host) + " vcpus":             float64(w.allocated(host).VCPUs),
		"trivet_vms acme web CREATING":                                 1,
		fmt.Sprintf("trivet_vm_info %s web acme web %s", host, one.ID): 1, // the labels sorted by name
		"trivet_placements_total placed":                               1,
		"trivet_placements_total no_host":                              1,
		"trivet_placement_refused_hosts_total vcpus":                   1,
	} {
		require.Contains(t, values, name)
		require.Equal(t, want, values[name], name)
	}
	require.Positive(t, values["trivet_host_allocated "+string(host)+" vcpus"])
}

// TestRefusalsAreCountedOnce checks that a placement that finds no host is counted once for a VM that waits, not for each
// retry: for a VM of a lost host, and for a VM of a drained host.
func TestRefusalsAreCountedOnce(t *testing.T) {
	t.Run("of a lost host", func(t *testing.T) {
		w := newWorld(t)
		w.sharedHost("h1", 4096)
		vm := w.running("web")
		small := w.sharedHost("h2", 100)
		w.lose(small)
		w.recover()
		w.flush(vm.Spec.Volumes()[0])
		w.recover()
		w.recover()
		require.Contains(t, w.get(vm.ID).Status.LastError, "waits for a host: no host fits")
		values := metricstest.Values(t, NewInventoryCollector(w.vms))
		require.EqualValues(t, 1, values["trivet_placements_total no_host"])
		require.EqualValues(t, 1, values["trivet_placement_refused_hosts_total memory"])
	})
	t.Run("of a drained host", func(t *testing.T) {
		w := newWorld(t)
		source := w.migrationHost("h1")
		w.runs("web")
		small := w.migrationHost("h2", func(n *cloud.Node) { n.Allocatable.MemoryMiB = 100 })
		w.drain(source, false, 3600)
		for range 4 {
			w.stepDrains()
			w.advance(time.Minute, source, small)
		}
		require.Contains(t, w.progress(source)[0], "failed attempts")
		require.EqualValues(t, 1, metricstest.Values(t, NewInventoryCollector(w.vms))["trivet_placements_total no_host"])
	})
}

// fakeMover records moves. It fails if fail is set.
type fakeMover struct {
	moves []string
	fail  error
}

func (m *fakeMover) MoveVM(_ context.Context, t cloud.Tenant, id cloud.VMID, to cloud.NodeID) error {
	m.moves = append(m.moves, fmt.Sprint(t.Project, " ", id, " to ", to))
	return m.fail
}

// TestRebalance fills one host, adds an empty one, and checks the proposed moves and that the Mover makes them.
func TestRebalance(t *testing.T) {
	w := newWorld(t)
	able := func(n *cloud.Node) { n.LiveMigration = true }
	w.AddHost("h1", cloud.Capacity{VCPUs: 10, MemoryMiB: 8192, StorageGiB: 100}, able)
	for i := range 4 {
		vm := w.create(fmt.Sprint("vm-", i), movable)
		w.update(func(tx *store.Tx) {
			r, err := VMs.Get(tx, string(acme.Project), string(vm.ID))
			require.NoError(t, err)
			r.State, r.Desired.On = cloud.Running, true
			VMs.Put(tx, r, string(acme.Project), string(vm.ID))
		})
	}
	w.create("stopped", movable)                                                  // is not moved
	w.AddHost("old", cloud.Capacity{VCPUs: 10, MemoryMiB: 8192, StorageGiB: 100}) // its agent cannot migrate VMs
	empty := w.AddHost("h2", cloud.Capacity{VCPUs: 10, MemoryMiB: 8192, StorageGiB: 100}, able)

	out, err := w.vms.Rebalance(t.Context(), RebalanceRequest{DryRun: true})
	require.NoError(t, err)
	require.Len(t, out.Moves, 2)
	require.Equal(t, []float64{1, 0, 0.6, 0}, []float64{out.Before.Highest, out.Before.Lowest, out.After.Highest, out.After.Lowest})
	require.Equal(t, "h2", out.Hosts[out.Moves[0].To])
	require.Equal(t, acme, out.Tenants[out.Moves[0].VM])

	_, err = w.vms.Rebalance(t.Context(), RebalanceRequest{DryRun: true, Most: MaxMoves + 1})
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)

	// Without another Mover, the VM is migrated. The simulated hosts do nothing, so the migration does not end.
	began, end := context.WithCancel(w.as(acme, "key"))
	done := make(chan error, 1)
	go func() {
		_, err := w.vms.Rebalance(began, RebalanceRequest{Most: 1})
		done <- err
	}()
	id := out.Moves[0].VM
	require.Eventually(t, func() bool {
		vm, err := w.vms.Get(t.Context(), acme, id)
		return err == nil && vm.State == cloud.Migrating && vm.Migration.Target == empty
	}, 10*time.Second, time.Millisecond)
	end()
	require.Error(t, <-done)
	_, err = w.vms.CancelMigration(w.as(acme, ""), acme, id)
	require.NoError(t, err)
	w.AwaitFleet()

	mover := &fakeMover{}
	w.vms.opts.Mover = mover
	_, err = w.vms.Rebalance(t.Context(), RebalanceRequest{DryRun: true})
	require.NoError(t, err)
	require.Empty(t, mover.moves, "a dry run moves nothing")
	out, err = w.vms.Rebalance(t.Context(), RebalanceRequest{Most: 1})
	require.NoError(t, err)
	require.Equal(t, []string{fmt.Sprint(acme.Project, " ", out.Moves[0].VM, " to ", empty)}, mover.moves)
	mover.fail = fault.New(fault.FailedPrecondition, "the guest is busy")
	_, err = w.vms.Rebalance(t.Context(), RebalanceRequest{})
	require.ErrorContains(t, err, "the guest is busy")
	require.Len(t, mover.moves, 2, "the first error must end the moves")

	// A cordoned host is neither the source nor the target of a move.
	w.update(func(tx *store.Tx) {
		n, err := node.Nodes.Get(tx, string(empty))
		require.NoError(t, err)
		n.Cordoned = true
		node.Nodes.Put(tx, n, string(empty))
	})
	out, err = w.vms.Rebalance(t.Context(), RebalanceRequest{DryRun: true})
	require.NoError(t, err)
	require.Empty(t, out.Moves)
}
