package cloud

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestSnapshotSchedule checks when a snapshot is due, and which snapshots are deleted.
func TestSnapshotSchedule(t *testing.T) {
	v := Volume{Metadata: map[string]string{SnapshotEvery: "1h"}}
	s, ok := v.Schedule()
	require.True(t, ok)
	require.Equal(t, SnapshotSchedule{time.Hour, 7}, s)
	v.Metadata[SnapshotKeep] = "2"
	s, _ = v.Schedule()
	hour := time.Hour.Milliseconds()
	now := 1000*hour + 5
	begin, due := s.Due(nil, now)
	require.Equal(t, []any{1000 * hour, true}, []any{begin, due})

	snapshot := func(id SnapshotID, at Time, status SnapshotStatus, scheduled bool) *Snapshot {
		return &Snapshot{ID: id, CreatedAt: at, Status: status, Scheduled: scheduled}
	}
	all := []*Snapshot{
		snapshot("own", 1000*hour, SnapshotAvailable, false),
		snapshot("a", 996*hour, SnapshotAvailable, true), snapshot("failed-long-ago", 997*hour, SnapshotError, true),
		snapshot("b", 998*hour, SnapshotAvailable, true), snapshot("c", 999*hour, SnapshotAvailable, true),
	}
	_, due = s.Due(all, now)
	require.True(t, due, "a snapshot of somebody else does not count")
	ids := func(all []*Snapshot) (out []SnapshotID) {
		for _, one := range all {
			out = append(out, one.ID)
		}
		return out
	}
	require.Equal(t, []SnapshotID{"failed-long-ago", "a"}, ids(s.Surplus(all)))
	failed := append(all, snapshot("f1", 1000*hour, SnapshotError, true))
	_, due = s.Due(failed, now)
	require.False(t, due, "a failed snapshot is not repeated before the next interval")
	failed = append(failed, snapshot("f2", 1001*hour, SnapshotError, true), snapshot("f3", 1002*hour, SnapshotError, true),
		snapshot("pending", 1003*hour, SnapshotPending, true))
	require.Equal(t, []SnapshotID{"f1", "failed-long-ago", "a"}, ids(s.Surplus(failed)), "failures do not displace snapshots")

	for _, bad := range []map[string]string{{SnapshotEvery: "1m"}, {SnapshotEvery: "daily"}, {SnapshotKeep: "0"}, {SnapshotKeep: "25"}} {
		require.Error(t, CheckVolumePairs(bad, nil), "%v", bad)
	}
	require.NoError(t, CheckVolumePairs(map[string]string{SnapshotEvery: "", SnapshotKeep: "24"}, nil))
	_, ok = (&Volume{}).Schedule()
	require.False(t, ok)
}
