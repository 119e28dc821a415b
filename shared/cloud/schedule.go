package cloud

import (
	"slices"
	"strconv"
	"time"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of a SnapshotSchedule.
const (
	minSnapshotEvery    = 15 * time.Minute
	maxSnapshotEvery    = 366 * 24 * time.Hour
	maxSnapshotKeep     = 24 // below MaxSnapshots, so that callers can also create snapshots
	defaultSnapshotKeep = 7
)

// SnapshotSchedule makes the control plane create a snapshot of a volume in each interval of length Every, and keep the
// newest Keep of these snapshots.
type SnapshotSchedule struct {
	Every time.Duration
	Keep  int
}

// Schedule returns the snapshot schedule in the metadata of the volume. It returns false if the metadata has none.
func (v *Volume) Schedule() (SnapshotSchedule, bool) {
	every, err := time.ParseDuration(v.Metadata[SnapshotEvery])
	if err != nil || every < minSnapshotEvery || every > maxSnapshotEvery {
		return SnapshotSchedule{}, false
	}
	keep, err := strconv.Atoi(v.Metadata[SnapshotKeep])
	if err != nil || keep < 1 || keep > maxSnapshotKeep {
		keep = defaultSnapshotKeep
	}
	return SnapshotSchedule{every, keep}, true
}

// checkSchedule returns an InvalidArgument fault if metadata has an invalid schedule. An empty value removes its key.
func checkSchedule(metadata map[string]string) error {
	if text := metadata[SnapshotEvery]; text != "" {
		if d, err := time.ParseDuration(text); err != nil || d < minSnapshotEvery || d > maxSnapshotEvery {
			return fault.Invalid("metadata", "%s must be a duration from 15m to 8784h, such as 24h", SnapshotEvery)
		}
	}
	if text := metadata[SnapshotKeep]; text != "" {
		if n, err := strconv.Atoi(text); err != nil || n < 1 || n > maxSnapshotKeep {
			return fault.Invalid("metadata", "%s must be a number from 1 to %d", SnapshotKeep, maxSnapshotKeep)
		}
	}
	return nil
}

// Due returns the beginning of the interval that contains now, and true if the schedule has not created a snapshot in
// this interval yet. Intervals begin at multiples of Every since 1970-01-01 in UTC. The parameter all has all snapshots
// of the volume. If a snapshot fails, the schedule creates no other one in the same interval. The schedule creates no
// snapshots for past intervals.
func (s SnapshotSchedule) Due(all []*Snapshot, now Time) (begin Time, due bool) {
	begin = now - now%s.Every.Milliseconds()
	return begin, !slices.ContainsFunc(all, func(one *Snapshot) bool { return one.Scheduled && one.CreatedAt >= begin })
}

// Surplus returns the snapshots that the schedule must delete. The schedule keeps the newest Keep AVAILABLE snapshots.
// It also keeps the newest Keep failed snapshots, except those that are older than the newest Keep AVAILABLE snapshots.
// Surplus never returns PENDING snapshots, or snapshots that were not created by the schedule.
func (s SnapshotSchedule) Surplus(all []*Snapshot) (out []*Snapshot) {
	newest := slices.SortedFunc(slices.Values(all), func(a, b *Snapshot) int { return int(b.CreatedAt - a.CreatedAt) })
	available, failed := 0, 0
	for _, one := range newest {
		switch {
		case !one.Scheduled || one.Deleted || one.Status == SnapshotPending:
		case one.Status == SnapshotAvailable && available < s.Keep:
			available++
		case one.Status == SnapshotError && available < s.Keep && failed < s.Keep:
			failed++
		default:
			out = append(out, one)
		}
	}
	return out
}
