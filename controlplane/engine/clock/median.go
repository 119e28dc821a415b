package clock

import (
	"slices"
	"time"
)

// offset is how far the own clock is ahead of the median of all clocks that are known, its own among them, and whether
// that says anything: a majority of the members is among them, and more than one. With an even number the median is
// between two; when those differ by more than Bound, one of them is wrong and nobody knows which: apart is by how much.
func offset(own time.Duration, others []time.Duration, members int) (ahead time.Duration, known bool, apart time.Duration) {
	all := append(slices.Clone(others), own)
	if len(all) < 2 || len(all) <= members/2 {
		return 0, false, 0
	}
	slices.Sort(all)
	low, high := all[(len(all)-1)/2], all[len(all)/2]
	if high-low > Bound {
		return 0, false, high - low
	}
	return own - (low + (high-low)/2), true, 0
}
