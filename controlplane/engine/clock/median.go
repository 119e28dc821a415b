package clock

import (
	"slices"
	"time"
)

// offset computes how far the clock own is ahead of the median of the clocks own and others. With an even number of
// clocks, the median is the middle between the two middle clocks. If these two differ by more than Bound, one of them
// is wrong, but it is unknown which: then known is false, and apart is their difference. known is also false if others
// is empty, or if own and others are not a majority of the members.
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
