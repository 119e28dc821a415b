package snapshot

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestSchedule lets a volume with a schedule get snapshots over several hours. Snapshots of the schedule are deleted
// when newer ones are AVAILABLE; one that a caller has made is kept.
func TestSchedule(t *testing.T) {
	w := newWorld(t)
	data := w.volume("data", 1)
	run := func() { require.NoError(t, w.snapshots.RunSchedules(t.Context())) }
	list := func() (out []*cloud.Snapshot) {
		out, _, err := w.snapshots.List(t.Context(), acme, 0, "", Filter{Volume: data})
		require.NoError(t, err)
		return out
	}
	run()
	require.Empty(t, list())
	_, err := w.volumes.Update(w.as(acme, ""), acme, data, "", map[string]string{cloud.SnapshotEvery: "1h", cloud.SnapshotKeep: "2"}, nil, [32]byte{})
	require.NoError(t, err)
	fresh, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{
		Name: "fresh", SizeGiB: 1, Metadata: map[string]string{cloud.SnapshotEvery: "15m"},
	}, "", [32]byte{})
	require.NoError(t, err)
	own, err := w.create(data, "own")
	require.NoError(t, err)
	run()
	require.Len(t, list(), 1, "nothing is created while a snapshot is PENDING")
	require.Equal(t, 1, w.report(own, complete))
	for range 4 {
		before := len(list())
		for range 2 {
			run()
		}
		all := list()
		require.Len(t, all, before+1, "each interval gets one snapshot")
		newest := *all[before]
		require.Equal(t, []any{true, "schedule"}, []any{newest.Scheduled, newest.CreatedBy})
		require.Regexp(t, `^scheduled-[0-9]{8}-[0-9]{2}00-[0-9a-f]{12}$`, newest.Name)
		require.Equal(t, 1, w.report(newest, complete))
		w.Clock.Advance(time.Hour)
		require.NoError(t, w.snapshots.forScheduled(t.Context(), prune))
	}
	all := list()
	require.Len(t, all, 3, "two snapshots of the schedule are kept, and the one that a caller has made")
	require.Equal(t, own.ID, all[0].ID)

	run()
	all = list()
	newest := *all[len(all)-1]
	require.Equal(t, 1, w.report(newest, complete))
	_, err = w.snapshots.Delete(w.as(acme, ""), acme, newest.ID, [32]byte{})
	require.NoError(t, err)
	require.Equal(t, 1, w.report(newest, cloud.SnapshotObservation{State: cloud.SnapshotAbsent}))
	run()
	require.Len(t, list(), len(all)-1, "a snapshot that was deleted is created again in the same interval")

	_, err = w.volumes.Update(w.as(acme, ""), acme, data, "", map[string]string{cloud.SnapshotEvery: ""}, nil, [32]byte{})
	require.NoError(t, err)
	_, err = w.volumes.Delete(w.as(acme, ""), acme, fresh.Volume.ID, [32]byte{})
	require.NoError(t, err)
	run()
	require.Len(t, list(), 3)
	require.NoError(t, w.Store.Local(func(r *store.View) error {
		left, _, err := volume.Scheduled.List(r, 0)
		require.Empty(t, left)
		return err
	}))
}
