package volume

import (
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const (
	poolX = "0190a000-0000-4000-8000-0000000000aa"
	poolY = "0190a000-0000-4000-8000-0000000000bb"
)

// sharedHost adds a host whose pool local has 10 GiB and the given ID.
func (w *world) sharedHost(name, id string, shared bool) cloud.NodeID {
	return w.AddHost(name, cloud.Capacity{VCPUs: 8, MemoryMiB: 8192, StorageGiB: 100}, func(n *cloud.Node) {
		n.StoragePools = []cloud.StoragePool{{Name: "local", AllocatableGiB: 10, Encryption: true, ID: id, Shared: shared}}
	})
}

// flush reports the last attachment of a volume as flushed, as the host of the volume.
func (w *world) flush(id cloud.VolumeID) {
	w.t.Helper()
	v := w.get(id)
	w.report(v.Node, cloud.VolumeObservation{
		Volume: id, Generation: v.Generation, Present: true, SizeBytes: v.SizeBytes(), FlushedGeneration: v.AttachmentGeneration,
	})
	require.True(w.t, w.get(id).Flushed())
}

// pool returns the room in GiB that is allocated in the shared pool poolX.
func (w *world) pool() (gib uint64) {
	w.t.Helper()
	require.NoError(w.t, w.Store.Local(func(r *store.View) error {
		p, err := sharedPools.Get(r, poolX)
		if p != nil {
			gib = p.AllocatedGiB
		}
		return err
	}))
	return gib
}

// TestSharedVolumeFollowsVMs attaches a volume of a shared pool to VMs on two hosts, one after the other. Hosts with
// another directory, or with a pool of their own, must not get the volume. The room of the pool must be counted once for
// all hosts. When the host of the deleted volume is lost, the other host must delete the file.
func TestSharedVolumeFollowsVMs(t *testing.T) {
	w := newWorld(t)
	a, b := w.sharedHost("a", poolX, true), w.sharedHost("b", poolX, true)
	other, single := w.sharedHost("other", poolY, true), w.sharedHost("single", poolX, false)
	v, full := w.create("data", 3), w.create("full", 8)
	require.NoError(t, w.attach(v.ID, vmA, a))
	require.ErrorContains(t, w.attach(v.ID, vmB, b), "attached to VM "+string(vmA))
	w.release(v.ID, vmA)
	err := w.attach(v.ID, vmB, b)
	require.ErrorContains(t, err, "has not flushed volume data since it was detached: try again later. If the host is lost, an operator must evict it")
	w.place(b)
	require.Equal(t, a, w.get(v.ID).Node, "a volume that is not flushed keeps its host")
	w.flush(v.ID)

	for host, why := range map[cloud.NodeID]string{other: "has another directory as the storage pool local", single: "does not have `shared: true`"} {
		err := w.attach(v.ID, vmB, host)
		require.True(t, fault.Is(err, fault.FailedPrecondition), "the host does not have the directory")
		require.ErrorContains(t, err, why)
	}
	require.ErrorContains(t, w.attach(full.ID, vmA, b), "has 7 GiB free in the storage pool local, 8 needed", "the room of a shared pool is counted for all hosts together")
	require.ErrorContains(t, w.attach(full.ID, vmA, single), "has 7 GiB free in the storage pool local, 8 needed", "a host that no longer shares the directory has no more room")
	require.NoError(t, w.Store.Local(func(r *store.View) error {
		p, err := PlacementOf(r, acme, []cloud.VolumeID{v.ID, full.ID})
		require.NoError(t, err)
		require.Contains(t, p.Shortage(w.Node(a)), "7 GiB free", "the room of a shared pool is counted for all hosts together")
		require.Contains(t, p.Shortage(w.Node(other)), "another directory")
		p, err = PlacementOf(r, acme, []cloud.VolumeID{full.ID})
		require.NoError(t, err)
		require.Contains(t, p.Shortage(w.Node(single)), "7 GiB free", "a host that no longer shares the directory has no more room")
		p, err = PlacementOf(r, acme, []cloud.VolumeID{v.ID})
		require.NoError(t, err)
		require.Equal(t, []string{"", ""}, []string{p.Shortage(w.Node(a)), p.Shortage(w.Node(b))})
		require.Contains(t, p.Shortage(w.Node(single)), "shared: true")
		return nil
	}))
	require.NoError(t, w.attach(v.ID, vmB, b))
	on, sent := w.only(a, b, other, single)
	require.Equal(t, b, on, "the volume follows its VM")
	require.Equal(t, []any{"local", true, uint64(2)}, []any{sent[0].GetPool(), sent[0].GetMustExist(), sent[0].GetAttachmentGeneration()})
	require.Zero(t, w.report(a, cloud.VolumeObservation{Volume: v.ID, Generation: 99, Present: true, FlushedGeneration: 2, Error: "late"}))
	require.Empty(t, w.Node(a).PoolAllocated)
	require.EqualValues(t, 3, w.pool())
	_, err = w.volumes.Resize(w.as(acme, ""), acme, v.ID, 11, [32]byte{})
	require.ErrorContains(t, err, "7 GiB free")
	_, err = w.volumes.Resize(w.as(acme, ""), acme, v.ID, 4, [32]byte{})
	require.NoError(t, err)
	require.EqualValues(t, 4, w.pool())

	w.release(v.ID, vmB)
	w.flush(v.ID)
	w.place(a, other)
	require.Equal(t, a, w.get(v.ID).Node, "a detached volume leaves a host that is not READY")
	_, err = w.volumes.Delete(w.as(acme, ""), acme, v.ID, [32]byte{})
	require.NoError(t, err)
	w.place(b, other, single)
	on, sent = w.only(a, b, other, single)
	require.Equal(t, []any{b, true}, []any{on, sent[0].GetDeleted()})
	require.Equal(t, 1, w.report(b, cloud.VolumeObservation{Volume: v.ID, Generation: sent[0].GetGeneration()}))
	require.Zero(t, w.pool())
}

// TestSharedVolumeAttachedTwice lets VMs on two hosts attach the same volume at the same time. One must get the volume,
// and the error of the other one must name the VM that has it.
func TestSharedVolumeAttachedTwice(t *testing.T) {
	w := newWorld(t)
	hosts := []cloud.NodeID{w.sharedHost("a", poolX, true), w.sharedHost("b", poolX, true)}
	vms := []cloud.VMID{vmA, vmB}
	v := w.create("data", 1)
	for round := range 100 {
		var errs [2]error
		var calls sync.WaitGroup
		for i := range hosts {
			calls.Go(func() { errs[i] = w.attach(v.ID, vms[i], hosts[i]) })
		}
		calls.Wait()
		winner := 0
		if errs[0] != nil {
			winner = 1
		}
		require.NoError(t, errs[winner])
		require.ErrorContains(t, errs[1-winner], "is attached to VM "+string(vms[winner]), "a second VM got the volume")
		now := w.get(v.ID)
		require.Equal(t, []any{hosts[winner], vms[winner], uint64(round + 1)}, []any{now.Node, now.VM, now.AttachmentGeneration})
		w.only(hosts...)
		w.release(v.ID, vms[winner])
		w.flush(v.ID)
	}
	require.EqualValues(t, 1, w.pool())
}

// TestSharedVolumesOfRemovedHost evicts a lost host that has a volume of a shared pool attached. Eviction needs no force
// because of such volumes. Another host must be told to end the attachment, and the volume must not be attached before
// this host has done so.
func TestSharedVolumesOfRemovedHost(t *testing.T) {
	w := newWorld(t)
	lost, left := w.sharedHost("lost", poolX, true), w.sharedHost("left", poolX, true)
	open, idle, gone := w.create("open", 1), w.create("idle", 1), w.create("gone", 1)
	for _, v := range []*cloud.Volume{open, idle, gone} {
		require.NoError(t, w.attach(v.ID, vmA, lost))
		if v != open {
			w.release(v.ID, vmA)
			w.flush(v.ID)
		}
	}
	_, err := w.volumes.Delete(w.as(acme, ""), acme, gone.ID, [32]byte{})
	require.NoError(t, err)
	w.place(left)
	require.Equal(t, []cloud.NodeID{lost, left}, []cloud.NodeID{w.get(open.ID).Node, w.get(idle.ID).Node}, "a lost host keeps what it may have open")
	w.Update(func(tx *store.Tx) error {
		node.PlacedVMs.Put(tx, &node.Placed{Project: acme.Project, Gone: true, Volumes: []cloud.VolumeID{open.ID}}, string(lost), string(vmA))
		return nil
	})
	_, err = w.Nodes.Evict(w.asAdmin(), lost, false)
	require.NoError(t, err)
	require.Equal(t, cloud.VolumeInUse, w.get(open.ID).Status())
	require.ErrorContains(t, w.attach(open.ID, vmB, left), "was removed from the cluster before it flushed volume open", "two hosts may write the volume")
	w.place(left)
	v := w.get(open.ID)
	require.Equal(t, []any{left, false}, []any{v.Node, v.HostRemoved})
	require.ErrorContains(t, w.attach(open.ID, vmB, left), "has not flushed", "two hosts may write the volume")
	for _, sent := range w.assigned(left) {
		if sent.GetVolumeId() == string(open.ID) {
			require.Equal(t, []any{"", uint64(1)}, []any{sent.GetVmId(), sent.GetAttachmentGeneration()}, "the host must end the attachment")
		}
	}
	require.Len(t, w.assigned(left), 3)
	w.flush(open.ID)
	require.Equal(t, []any{cloud.VolumeAvailable, ""}, []any{w.get(open.ID).Status(), w.get(open.ID).LastError})
	require.NoError(t, w.attach(open.ID, vmB, left))
	require.EqualValues(t, 2, w.get(open.ID).AttachmentGeneration)
	require.EqualValues(t, 3, w.pool(), "the pool still has the files")
}

// snapshot adds a snapshot of a volume.
func (w *world) snapshot(v cloud.VolumeID, name string) cloud.SnapshotID {
	w.t.Helper()
	id, err := uuid.NewV7()
	require.NoError(w.t, err)
	w.Update(func(tx *store.Tx) error {
		return AddSnapshot(tx, acme, &cloud.Snapshot{ID: cloud.SnapshotID(id.String()), Name: name, Volume: v})
	})
	return cloud.SnapshotID(id.String())
}

// addSnapshot returns the error of a new snapshot of a volume.
func (w *world) addSnapshot(v cloud.VolumeID, name string) error {
	_, err := w.Store.Update(w.t.Context(), func(tx *store.Tx) error {
		return AddSnapshot(tx, acme, &cloud.Snapshot{ID: cloud.SnapshotID(uuid.NewString()), Name: name, Volume: v})
	})
	return err
}

// TestSnapshotsInSharedPool makes a snapshot on one host of a shared pool. While the host may be copying, the volume must
// stay there. Then the volume moves, and the other host makes a volume from the snapshot and deletes the snapshot.
func TestSnapshotsInSharedPool(t *testing.T) {
	w := newWorld(t)
	a, b := w.sharedHost("a", poolX, true), w.sharedHost("b", poolX, true)
	v := w.create("data", 2)
	require.NoError(t, w.attach(v.ID, vmA, a))
	w.release(v.ID, vmA)
	w.flush(v.ID)
	s := w.snapshot(v.ID, "one")
	require.ErrorContains(t, w.attach(v.ID, vmB, b), "snapshot one of volume data is PENDING", "the host is copying the volume")
	require.NoError(t, w.Store.Local(func(r *store.View) error {
		p, err := PlacementOf(r, acme, []cloud.VolumeID{v.ID})
		require.NoError(t, err)
		require.Equal(t, []string{"", "does not have the VM's volumes"}, []string{p.Shortage(w.Node(a)), p.Shortage(w.Node(b))})
		return nil
	}))
	report := func(on cloud.NodeID, state cloud.SnapshotState) {
		now := w.get(v.ID)
		w.report(on, cloud.VolumeObservation{
			Volume: v.ID, Generation: now.Generation, Present: true, FlushedGeneration: now.FlushedGeneration,
			Snapshots: []cloud.SnapshotObservation{{Snapshot: s, State: state, TakenAt: 7, Format: cloud.VolumeRaw}},
		})
	}
	report(a, cloud.SnapshotComplete)
	require.NoError(t, w.attach(v.ID, vmB, b))
	require.EqualValues(t, 4, w.pool())
	copied := cloud.Volume{ID: cloud.VolumeID(vmA), Name: "copy"}
	w.Update(func(tx *store.Tx) error { return w.volumes.CreateFrom(tx, acme, &copied, s) })
	require.Equal(t, []any{b, poolX}, []any{w.get(copied.ID).Node, w.get(copied.ID).PoolID})
	w.place(a)
	require.Equal(t, a, w.get(copied.ID).Node, "another host makes the volume if the first one is lost")
	w.report(a, cloud.VolumeObservation{Volume: copied.ID, Generation: w.get(copied.ID).Generation, Present: true})
	w.Update(func(tx *store.Tx) error { _, err := DropSnapshot(tx, acme, s); return err })
	report(b, cloud.SnapshotAbsent)
	require.EqualValues(t, 4, w.pool(), "the room of the snapshot is free again")
	require.Empty(t, w.Node(a).PoolAllocated)
}

// TestAdoptSharedPool adds `shared: true` to the configuration of hosts that have volumes already. The volumes, which an
// earlier version bound to one host, must become usable on the other host, and be counted in the shared pool.
func TestAdoptSharedPool(t *testing.T) {
	w := newWorld(t)
	a, b := w.sharedHost("a", poolX, false), w.sharedHost("b", poolX, false)
	v, gone := w.create("data", 2), w.create("gone", 1)
	for _, id := range []cloud.VolumeID{v.ID, gone.ID} {
		require.NoError(t, w.attach(id, vmA, a))
		w.release(id, vmA)
		w.flush(id)
	}
	s := w.snapshot(v.ID, "one")
	_, err := w.volumes.Delete(w.as(acme, ""), acme, gone.ID, [32]byte{})
	require.NoError(t, err)
	w.place(a, b)
	require.Equal(t, map[string]uint64{"local": 5}, w.Node(a).PoolAllocated)
	require.ErrorContains(t, w.attach(v.ID, vmB, b), "is on host")
	w.Update(func(tx *store.Tx) error {
		for _, id := range []cloud.NodeID{a, b} {
			n, err := node.Nodes.Get(tx, string(id))
			require.NoError(t, err)
			n.StoragePools[0].Shared = true
			node.Nodes.Put(tx, n, string(id))
		}
		return nil
	})
	for range 2 {
		w.place(a, b)
		require.Empty(t, w.Node(a).PoolAllocated)
		require.EqualValues(t, 5, w.pool())
	}
	sent := w.assigned(a)
	require.Len(t, sent, 2)
	for _, one := range sent {
		if one.GetDeleted() {
			w.report(a, cloud.VolumeObservation{Volume: gone.ID, Generation: one.GetGeneration()})
		}
	}
	w.report(a, cloud.VolumeObservation{Volume: v.ID, Generation: w.get(v.ID).Generation, Present: true, FlushedGeneration: 1,
		Snapshots: []cloud.SnapshotObservation{{Snapshot: s, State: cloud.SnapshotComplete, TakenAt: 7, Format: cloud.VolumeRaw}}})
	require.EqualValues(t, 4, w.pool())
	require.NoError(t, w.attach(v.ID, vmB, b))
}
