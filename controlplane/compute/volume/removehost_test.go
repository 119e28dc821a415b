package volume

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestHostRemovedWithVolumes evicts a host that is lost with volumes of each kind: attached to a VM that was deleted by
// force, detached, and deleted. Each volume must be detached, so that it can be deleted and its storage class too. RBD
// volumes must move to another host, deleted ones too. A volume that the lost host may still write can be attached again
// only after the other host has fenced it.
func TestHostRemovedWithVolumes(t *testing.T) {
	w := newWorld(t)
	w.rbdClass()
	both := func(n *cloud.Node) {
		n.StoragePools, n.RBD = []cloud.StoragePool{{Name: "local", AllocatableGiB: 10}}, true
	}
	size := cloud.Capacity{VCPUs: 8, MemoryMiB: 8192, StorageGiB: 100}
	lost, other := w.AddHost("lost", size, both), w.AddHost("other", size, both)
	volumes := map[string]cloud.VolumeID{}
	for _, name := range []string{"file-open", "file-idle", "file-gone", "rbd-open", "rbd-idle", "rbd-gone"} {
		class := map[byte]string{'f': "local", 'r': "ceph"}[name[0]]
		out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: name, SizeGiB: 1, Class: class}, "", [32]byte{})
		require.NoError(t, err)
		id := out.Volume.ID
		volumes[name] = id
		require.NoError(t, w.attach(id, vmA, lost))
		// The VM was stopped once, so the attachment generation counts as flushed, and was started again.
		w.report(lost, cloud.VolumeObservation{Volume: id, Generation: w.get(id).Generation, Present: true, FlushedGeneration: 1})
		if !strings.HasSuffix(name, "-open") {
			w.release(id, vmA)
		}
	}
	remove := func(name string) error {
		_, err := w.volumes.Delete(w.as(acme, ""), acme, volumes[name], [32]byte{})
		return err
	}
	require.NoError(t, remove("file-gone"))
	require.NoError(t, remove("rbd-gone"))
	require.ErrorContains(t, remove("rbd-open"), "attached to VM")
	w.Update(func(tx *store.Tx) error {
		node.PlacedVMs.Put(tx, &node.Placed{
			Project: acme.Project, Gone: true, Volumes: []cloud.VolumeID{volumes["file-open"], volumes["rbd-open"]},
		}, string(lost), string(vmA))
		return nil
	})
	_, err := w.Nodes.Evict(w.asAdmin(), lost, true)
	require.NoError(t, err)

	require.Error(t, w.attach(volumes["rbd-open"], vmB, other), "two hosts may write the volume")
	w.place(other)
	moved := map[string]bool{}
	for _, sent := range w.assigned(other) {
		moved[sent.VolumeId] = sent.Deleted
	}
	require.Equal(t, map[string]bool{
		string(volumes["rbd-open"]): false, string(volumes["rbd-idle"]): false, string(volumes["rbd-gone"]): true,
	}, moved)
	for _, sent := range w.assigned(other) {
		require.Equal(t, sent.VolumeId == string(volumes["rbd-open"]), sent.Fence)
	}
	require.ErrorContains(t, w.attach(volumes["file-idle"], vmB, other), "is on host")
	require.Equal(t, cloud.VolumeError, w.get(volumes["file-idle"]).Status())
	open := w.get(volumes["rbd-open"])
	require.Contains(t, open.LastError, "the host lost, which had the volume, was removed")
	require.ErrorContains(t, w.attach(open.ID, vmB, other), "has not flushed", "the other host has not fenced the volume")
	fenced := cloud.VolumeObservation{Volume: open.ID, Generation: open.Generation, Present: true, FlushedGeneration: 2}
	require.Zero(t, w.report(lost, fenced), "the removed host cannot report the volume as flushed")
	require.Equal(t, 1, w.report(other, fenced))
	require.Equal(t, cloud.VolumeAvailable, w.get(open.ID).Status())
	require.NoError(t, w.attach(open.ID, vmB, other))
	require.Equal(t, []any{false, uint64(3)}, []any{w.get(open.ID).Fence, w.get(open.ID).AttachmentGeneration})
	w.release(open.ID, vmB)
	for _, name := range []string{"file-open", "file-idle", "rbd-open", "rbd-idle"} {
		require.NoError(t, remove(name))
	}
	w.place(other)
	require.Len(t, w.assigned(other), 3, "another host deletes the RBD images")
	for _, sent := range w.assigned(other) {
		w.report(other, cloud.VolumeObservation{Volume: cloud.VolumeID(sent.VolumeId), Generation: sent.Generation})
	}
	require.NoError(t, w.deleteClass())
	require.NoError(t, w.Store.Local(func(r *store.View) error {
		left, _, err := node.BoundVolumes.List(r, 0)
		require.Empty(t, left)
		return err
	}))
}
