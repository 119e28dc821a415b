package volume

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// watchBound begins to watch the Bound records of a host. The returned function returns the IDs of the volumes whose
// records were written since, and ends the watch.
func (w *world) watchBound(host cloud.NodeID) func() []string {
	const end = "end"
	records := node.BoundVolumes.WatchPaths(w.Store, w.Store.Revision()+1, string(host))
	return func() (ids []string) {
		defer records.Close()
		w.Update(func(tx *store.Tx) error { node.BoundVolumes.Put(tx, &node.Bound{}, string(host), end); return nil })
		for !slices.Contains(ids, end) {
			changes, _, err := records.Next(w.t.Context())
			require.NoError(w.t, err)
			for _, c := range changes {
				ids = append(ids, c.Path[1])
			}
		}
		return ids[:len(ids)-1]
	}
}

// TestClassChangeReachesVolumes changes the limits and then the key of a storage class with attached, detached and
// deleted volumes. The volumes of another class must not change.
func TestClassChangeReachesVolumes(t *testing.T) {
	w := newWorld(t)
	w.rbdClass()
	host := w.rbdHost("a", "")
	local := w.host("local", 10)
	create := func(name string) cloud.VolumeID {
		out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: name, SizeGiB: 1, Class: "ceph"}, "", [32]byte{})
		require.NoError(t, err)
		return out.Volume.ID
	}
	attached, detached, deleted := create("attached"), create("detached"), create("deleted")
	file := w.create("file", 1).ID
	require.NoError(t, w.attach(file, vmB, local))
	w.place(host)
	require.NoError(t, w.attach(attached, vmA, host))
	_, err := w.volumes.Delete(w.as(acme, ""), acme, deleted, [32]byte{})
	require.NoError(t, err)
	unplaced := create("unplaced")
	before := w.get(file).Generation
	apply := func(u cloud.ClassUpdate, key string) {
		t.Helper()
		_, err := w.classes.Update(w.asAdmin(), "ceph", u, key, [32]byte{})
		require.NoError(t, err)
		require.NoError(t, w.volumes.ApplyClasses(t.Context()))
	}
	generation := w.get(attached).Generation
	iops := uint64(700)
	apply(cloud.ClassUpdate{IOPS: &iops}, "")
	for _, id := range []cloud.VolumeID{attached, detached, unplaced} {
		require.EqualValues(t, 700, w.get(id).Limits().IOPS)
	}
	require.Equal(t, generation+1, w.get(attached).Generation, "the host must take the new limit")

	watch := w.watchBound(host)
	const newKey = "AQCq3rNlAAAAABAAq1mYc2o0J7l5h3gv7k8q5Y=="
	apply(cloud.ClassUpdate{User: "other", Monitors: []string{"192.0.2.2"}}, newKey)
	require.ElementsMatch(t, []string{string(attached), string(detached), string(deleted)}, watch(), "the host was not sent the new key of each volume")
	require.Equal(t, generation+1, w.get(attached).Generation)
	for _, one := range w.assigned(host) {
		require.Equal(t, []any{newKey, "other", []string{"192.0.2.2:3300"}}, []any{one.GetRbd().GetKey(), one.GetRbd().GetUser(), one.GetRbd().GetMonitors()})
	}
	require.Equal(t, before, w.get(file).Generation)
	revision := w.Store.Revision()
	require.NoError(t, w.volumes.ApplyClasses(t.Context()))
	require.Equal(t, revision, w.Store.Revision(), "an applied change must not be applied again")
	c, err := w.classes.Get(t.Context(), "ceph")
	require.NoError(t, err)
	require.Equal(t, []uint64{2, 2}, []uint64{c.Changes, c.Applied})
	require.NoError(t, w.Store.Local(func(r *store.View) error {
		changes, err := storageclass.Unapplied(r)
		require.Empty(t, changes)
		return err
	}))
}
