package cloud

import (
	"slices"
	"strconv"
	"time"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of the schedule of a volume's snapshots.
const (
	minSnapshotEvery    = 15 * time.Minute
	maxSnapshotEvery    = 366 * 24 * time.Hour
	maxSnapshotKeep     = 24 // below MaxSnapshots, so that other snapshots are possible
	defaultSnapshotKeep = 7
)

// SnapshotSchedule is the schedule of a volume's snapshots.
type SnapshotSchedule struct {
	Every time.Duration
	Keep  int
}

// Schedule returns the schedule in the metadata of the volume. It returns false if there is none.
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
			return fault.Invalid("metadata", "%s must be a time from 15m to 8784h, such as 24h", SnapshotEvery)
		}
	}
	if text := metadata[SnapshotKeep]; text != "" {
		if n, err := strconv.Atoi(text); err != nil || n < 1 || n > maxSnapshotKeep {
			return fault.Invalid("metadata", "%s must be a number from 1 to %d", SnapshotKeep, maxSnapshotKeep)
		}
	}
	return nil
}

// Due returns the beginning of the interval that contains now, and whether a snapshot of the schedule is missing there.
// Intervals begin at multiples of Every since 1970. The parameter all has all snapshots of the volume. A snapshot that
// failed is not repeated within its interval, and intervals that have passed without a snapshot are not made up for.
func (s SnapshotSchedule) Due(all []*Snapshot, now Time) (begin Time, due bool) {
	begin = now - now%s.Every.Milliseconds()
	return begin, !slices.ContainsFunc(all, func(one *Snapshot) bool { return one.Scheduled && one.CreatedAt >= begin })
}

// Surplus returns the snapshots of the schedule that are to be deleted. The newest Keep snapshots that are AVAILABLE
// are kept, and as many that failed since. Snapshots that the schedule did not make are never returned.
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
