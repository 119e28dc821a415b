package vm

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/metricstest"
)

// volumeHost adds a host whose agent can migrate VMs with volumes. The host shares the storage pool local with other
// hosts, unless change removes the pool.
func (w *world) volumeHost(name string, change ...func(*cloud.Node)) cloud.NodeID {
	return w.migrationHost(name, append([]func(*cloud.Node){func(n *cloud.Node) {
		n.Features = map[string]string{cloud.FeatureVolumeMigration: ""}
		n.StoragePools = []cloud.StoragePool{{Name: "local", AllocatableGiB: 100, ID: "00000000-0000-7000-b000-000000000001", Shared: true}}
	}}, change...)...)
}

// volumeOn returns the desired state of a volume on a host, or nil if the host does not have it.
func (w *world) volumeOn(on cloud.NodeID, id cloud.VolumeID) (out *agentv1.AssignedVolume) {
	w.t.Helper()
	require.NoError(w.t, w.store.Local(func(v *store.View) error {
		all, err := w.volumes.AssignedVolumes(v, on, id)
		if len(all) > 0 {
			out = all[0]
		}
		return err
	}))
	return out
}

// rootOf returns the volume in the desired state of the VM's disk on a host.
func (w *world) rootOf(on cloud.NodeID, id cloud.VMID) *agentv1.AssignedVolume {
	for _, d := range w.assignedTo(on, id).GetDisks() {
		if d.GetVolume() != nil {
			return d.GetVolume()
		}
	}
	return nil
}

// TestMigrationOfVolume migrates a VM with a volume in a shared pool. The target must have the volume in standby before
// the switchover, and the source after it. The volume cannot be changed meanwhile.
func TestMigrationOfVolume(t *testing.T) {
	w := newWorld(t)
	source := w.volumeHost("n1")
	vm := w.running("web")
	id := vm.Spec.Volumes()[0]
	target := w.volumeHost("n2")
	vm = w.migrate(vm.ID, target)
	for on, want := range map[cloud.NodeID]*agentv1.AssignedVolume{
		source: {AttachmentGeneration: 1}, target: {AttachmentGeneration: 2, Standby: true},
	} {
		for _, have := range []*agentv1.AssignedVolume{w.volumeOn(on, id), w.rootOf(on, vm.ID)} {
			require.Equal(t, []any{want.Standby, want.AttachmentGeneration, false}, []any{have.GetStandby(), have.GetAttachmentGeneration(), have.GetMigrated()})
			require.Equal(t, []string{string(vm.ID), "v0"}, []string{have.GetVmId(), have.GetDiskId()})
		}
	}
	before := w.getVolume(id)
	_, resize := w.volumes.Resize(w.as(acme, ""), acme, id, 2, [32]byte{})
	var snapshot error
	_, err := w.store.Update(t.Context(), func(tx *store.Tx) error {
		snapshot = volume.AddSnapshot(tx, acme, &cloud.Snapshot{ID: "00000000-0000-7000-c000-000000000001", Name: "s", Volume: id})
		return snapshot
	})
	require.Equal(t, snapshot, err)
	_, attach := w.attachDisk(vm.ID, "more", w.volume("more"))
	for name, err := range map[string]error{"resize": resize, "snapshot": snapshot, "attach": attach, "detach": w.detachNow(vm.ID, "v0")} {
		require.True(t, fault.Is(err, fault.FailedPrecondition), "%s: the volume was changed during the migration: %v", name, err)
	}
	require.Equal(t, before, w.getVolume(id))

	w.tell(vm, target, cloud.MigrationPrepared)
	w.tell(vm, source, cloud.MigrationPrepared)
	vm = w.tell(vm, source, cloud.MigrationAtSwitchover)
	require.Equal(t, []any{target, uint64(2)}, []any{w.getVolume(id).Node, w.getVolume(id).AttachmentGeneration})
	have := w.rootOf(target, vm.ID)
	require.Equal(t, []any{false, true, uint64(2)}, []any{have.GetStandby(), have.GetMigrated(), have.GetAttachmentGeneration()})
	require.True(t, w.rootOf(source, vm.ID).GetStandby(), "the source must not open the volume")
	_, err = w.volumes.ObservedVolumes(t.Context(), source, []cloud.VolumeObservation{{Volume: id, Generation: 100, FlushedGeneration: 2, Error: "x"}})
	require.NoError(t, err)
	require.Empty(t, w.getVolume(id).LastError, "a report of the host that does not have the volume")
	require.False(t, w.getVolume(id).Flushed())

	vm = w.tell(vm, target, cloud.MigrationRunning)
	require.Equal(t, cloud.Running, vm.State)
	require.Nil(t, w.volumeOn(source, id))
	require.NoError(t, w.store.Local(func(v *store.View) error {
		keeps, err := node.BoundVolumes.Has(v, string(source), string(id))
		require.False(t, keeps, "the source keeps the volume")
		return err
	}))
	require.Equal(t, target, w.getVolume(id).Node)
	w.reportAbsent(source, vm.ID, vm.Generation)
	require.Equal(t, vm.ID, w.getVolume(id).VM, "the volume was detached from the VM")
}

// TestMigrationBesideOldAgent checks that a VM with a volume in a shared pool is not migrated while a host that shares the
// pool, though not one of the two hosts of the migration, has an agent that locks volumes otherwise.
func TestMigrationBesideOldAgent(t *testing.T) {
	w := newWorld(t)
	w.volumeHost("n1")
	vm := w.running("web")
	target := w.volumeHost("n2")
	old := w.volumeHost("n3", func(n *cloud.Node) { n.Features = nil })
	_, err := w.vms.Migrate(w.as(acme, ""), acme, vm.ID, target, 0, false, [32]byte{})
	require.Error(t, err, "an old agent could open the volume")
	require.Equal(t, ReasonNotMigratable, reasonOf(err))
	require.ErrorContains(t, err, "the host n3")
	require.Equal(t, cloud.Running, w.get(vm.ID).State)
	_, err = w.store.Update(t.Context(), func(tx *store.Tx) error {
		n, err := node.Nodes.Get(tx, string(old))
		n.StoragePools[0].ID = "00000000-0000-7000-b000-000000000002"
		node.Nodes.Put(tx, n, string(old))
		return err
	})
	require.NoError(t, err)
	w.migrate(vm.ID, target) // the pool of the old host is another directory now
}

// TestSwitchoverBesideOldAgent adds a host with an old agent to a shared pool during the migration of a VM that has a
// volume in this pool. The switchover must not be committed, and the VM must remain on the source.
func TestSwitchoverBesideOldAgent(t *testing.T) {
	w := newWorld(t)
	source := w.volumeHost("n1")
	vm := w.running("web")
	target := w.volumeHost("n2")
	vm = w.migrate(vm.ID, target)
	w.tell(vm, target, cloud.MigrationPrepared)
	w.tell(vm, source, cloud.MigrationPrepared)
	w.volumeHost("n3", func(n *cloud.Node) { n.Features = nil })
	vm = w.tell(vm, source, cloud.MigrationAtSwitchover)
	require.Equal(t, source, vm.Node, "the switchover is committed although an old agent shares the pool")
	require.Equal(t, cloud.Running, vm.State)
	require.Contains(t, vm.LastMigration.Reason, "too old")
	require.Nil(t, w.volumeOn(target, vm.Spec.Volumes()[0]))
}

// TestOldAgentIsAnObstacle checks that a drain and the preview of a rebalance report that a VM cannot be migrated
// because a third host has an old agent. A drain must not count this as a failed attempt.
func TestOldAgentIsAnObstacle(t *testing.T) {
	w := newWorld(t)
	source := w.volumeHost("n1")
	vm := w.running("web")
	w.volumeHost("n2")
	w.volumeHost("n3", func(n *cloud.Node) { n.Features = nil })
	const why = "has the volume web in the storage pool local, and the agent of the host n3, which shares this pool, is too " +
		"old: upgrade this agent, or evict the host"
	require.NoError(t, w.store.View(t.Context(), func(v *store.View) error {
		snap, err := w.vms.snapshot(v, (*snapshot).migration)
		require.NoError(t, err)
		require.Equal(t, why, snap.VMs[0].Immovable)
		return nil
	}))
	w.drain(source, false, 600)
	w.stepDrains()
	w.stepDrains()
	require.Equal(t, []string{"web CANNOT_MOVE: " + why}, w.progress(source))
	w.update(func(tx *store.Tx) {
		e, err := node.DrainedVMs.Get(tx, string(source), string(vm.ID))
		require.NoError(t, err)
		require.True(t, e == nil || e.Tries == 0, "the drain has counted a failed try")
	})
}

// TestForcedDrainBesideOldAgent checks that a drain with force does not shut a VM down only because a third host has an
// old agent, and moves the VM after this host was evicted.
func TestForcedDrainBesideOldAgent(t *testing.T) {
	w := newWorld(t)
	source := w.volumeHost("n1")
	vm := w.running("web")
	target := w.volumeHost("n2")
	old := w.volumeHost("n3", func(n *cloud.Node) { n.Features = nil })
	w.drain(source, true, 3600)
	for range 3 {
		w.advance(15*time.Minute, source, target, old)
		w.stepDrains()
	}
	require.True(t, w.get(vm.ID).Desired.On, "a forced drain has stopped the VM")
	require.Contains(t, w.progress(source)[0], "web CANNOT_MOVE: has the volume web in the storage pool local, and the agent of the host n3")
	_, err := w.nodes.Evict(w.as(acme, ""), old, false)
	require.NoError(t, err)
	require.NoError(t, w.vms.StepDrains(t.Context()))
	require.Equal(t, target, w.get(vm.ID).Migration.Target)
}

// TestPlacementAvoidsOldAgent checks that a VM with a volume in a shared pool is placed on a host with an old agent only
// if no other host fits.
func TestPlacementAvoidsOldAgent(t *testing.T) {
	w := newWorld(t)
	old := w.volumeHost("old", func(n *cloud.Node) { n.Features = nil })
	able := w.volumeHost("able", func(n *cloud.Node) { n.Allocatable.MemoryMiB = 2048 })
	w.AwaitFleet()
	for _, name := range []string{"a", "b", "c", "d"} {
		require.Equal(t, able, w.create(name, withoutDisks, withVolumes(w.volume(name))).Node, "the VM is placed on a host that cannot migrate it")
	}
	require.Equal(t, old, w.create("e", withoutDisks, withVolumes(w.volume("e"))).Node)
	values := metricstest.Values(t, NewInventoryCollector(w.vms))
	require.Equal(t, []float64{5, 0}, []float64{values["trivet_placements_total placed"], values["trivet_placements_total no_host"]})
}

// TestMigrationOfVolumeIsUndone ends migrations of a VM with a volume, before and after the switchover. The source has the
// volume afterwards, after the switchover with a new generation, and the target does not have it.
func TestMigrationOfVolumeIsUndone(t *testing.T) {
	for _, c := range []struct {
		name       string
		end        func(w *world, vm *cloud.VM, source, target cloud.NodeID)
		generation uint64
	}{
		{"cancelled", func(w *world, vm *cloud.VM, _, to cloud.NodeID) {
			w.migrate(vm.ID, to)
			_, err := w.vms.CancelMigration(w.as(acme, ""), acme, vm.ID)
			require.NoError(w.t, err)
		}, 1},
		{"the source cancels after the switchover", func(w *world, vm *cloud.VM, source, to cloud.NodeID) {
			w.tell(w.toSwitchover(vm.ID, to), source, cloud.MigrationCancelled)
		}, 3},
		{"the target fails after the switchover", func(w *world, vm *cloud.VM, source, to cloud.NodeID) {
			began := w.toSwitchover(vm.ID, to)
			w.tell(began, source, cloud.MigrationHandedOver)
			w.tell(began, to, cloud.MigrationFailed)
			require.Nil(w.t, w.volumeOn(to, vm.Spec.Volumes()[0]))
			w.tell(began, source, cloud.MigrationRunning)
		}, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			source := w.volumeHost("n1")
			vm := w.running("web")
			id := vm.Spec.Volumes()[0]
			target := w.volumeHost("n2")
			c.end(w, vm, source, target)
			require.Equal(t, cloud.Running, w.get(vm.ID).State)
			v, have := w.getVolume(id), w.volumeOn(source, id)
			require.Equal(t, []any{source, cloud.NodeID(""), c.generation}, []any{v.Node, v.Other, v.AttachmentGeneration})
			require.Equal(t, []any{false, c.generation > 1}, []any{have.GetStandby(), have.GetMigrated()})
			require.Nil(t, w.volumeOn(target, id))
		})
	}
}

// TestDeleteDuringMigrationOfVolume deletes a VM with a volume by force during its migration. The volume is detached when
// the VM's host has destroyed the VM.
func TestDeleteDuringMigrationOfVolume(t *testing.T) {
	w := newWorld(t)
	source := w.volumeHost("n1")
	vm := w.running("web")
	id := vm.Spec.Volumes()[0]
	target := w.volumeHost("n2")
	vm = w.migrate(vm.ID, target)
	_, err := w.vms.deleteOnLeader(w.as(acme, ""), deleteRequest{Tenant: acme, VM: vm.ID, Force: true})
	require.NoError(t, err)
	require.Nil(t, w.volumeOn(target, id))
	w.reportAbsent(target, vm.ID, vm.Generation+100)
	require.Equal(t, vm.ID, w.getVolume(id).VM, "the source may still have the volume open")
	w.reportAbsent(source, vm.ID, vm.Generation+100)
	v := w.getVolume(id)
	require.Equal(t, []any{cloud.VMID(""), cloud.NodeID("")}, []any{v.VM, v.Other})
}

// TestDeleteAfterSwitchoverOfRBDVolume deletes a VM with an RBD volume by force after the switchover of its migration. The
// source does not answer, and may run the guest. The volume must not be free before it was fenced.
func TestDeleteAfterSwitchoverOfRBDVolume(t *testing.T) {
	w := newWorld(t)
	w.volumeHost("n1")
	vm := w.running("web")
	id := vm.Spec.Volumes()[0]
	target := w.volumeHost("n2")
	vm = w.toSwitchover(vm.ID, target)
	w.update(func(tx *store.Tx) {
		v, err := volume.Lookup(tx, acme, id)
		require.NoError(t, err)
		v.Driver = cloud.DriverRBD
		volume.Volumes.Put(tx, v, string(acme.Project), string(id))
	})
	_, err := w.vms.deleteOnLeader(w.as(acme, ""), deleteRequest{Tenant: acme, VM: vm.ID, Force: true})
	require.NoError(t, err)
	w.reportAbsent(target, vm.ID, vm.Generation+100)
	v := w.getVolume(id)
	require.Equal(t, []any{cloud.VMID(""), target, false}, []any{v.VM, v.Node, v.Flushed()})
	require.True(t, v.Fence, "the source may still write to the volume")
	w.flush(id)
	require.Equal(t, []bool{true, false}, []bool{w.getVolume(id).Flushed(), w.getVolume(id).Fence})
}

// TestMigrationOfVolumeIsRefused checks the volumes and the hosts with which no migration begins.
func TestMigrationOfVolumeIsRefused(t *testing.T) {
	w := newWorld(t)
	old := func(n *cloud.Node) { n.Features = nil }
	w.volumeHost("n1")
	vm := w.running("web")
	id := vm.Spec.Volumes()[0]
	refused := func(to cloud.NodeID, text string) (mayRetry bool) {
		t.Helper()
		_, err := w.vms.Migrate(w.as(acme, ""), acme, vm.ID, to, 0, false, [32]byte{})
		require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
		require.ErrorContains(t, err, text)
		f, _ := fault.From(err)
		return f.Retry
	}
	require.False(t, refused(w.volumeHost("elsewhere", func(n *cloud.Node) {
		n.StoragePools = []cloud.StoragePool{{Name: "local", AllocatableGiB: 100, ID: "00000000-0000-7000-b000-000000000002", Shared: true}}
	}), "pool"))
	aged := w.volumeHost("old", old)
	refused(aged, "the agent of the host old, which shares this pool, is too old")
	w.update(func(tx *store.Tx) {
		n, err := node.Nodes.Get(tx, string(aged))
		require.NoError(t, err)
		n.Features = map[string]string{cloud.FeatureVolumeMigration: ""}
		node.Nodes.Put(tx, n, string(aged))
	})
	good := w.volumeHost("good")
	w.update(func(tx *store.Tx) {
		require.NoError(t, volume.AddSnapshot(tx, acme, &cloud.Snapshot{ID: "00000000-0000-7000-c000-000000000001", Name: "s", Volume: id}))
	})
	require.True(t, refused(good, "of which a snapshot is PENDING"), "the obstacle ends by itself")
	w.drain(vm.Node, false, 600)
	w.stepDrains()
	w.stepDrains()
	require.Equal(t, []string{"web WAITING: has the volume web, of which a snapshot is PENDING"}, w.progress(vm.Node))
	w.update(func(tx *store.Tx) {
		e, err := node.DrainedVMs.Get(tx, string(vm.Node), string(vm.ID))
		require.NoError(t, err)
		require.True(t, e == nil || e.Tries == 0, "the drain has counted a failed try")
	})
	require.Empty(t, w.getVolume(id).Other)
}
