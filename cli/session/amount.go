package session

import (
	"strconv"
	"strings"
)

// Units of memory and storage, each as a number of MiB.
const (
	MiB uint64 = 1
	GiB uint64 = 1 << 10
	TiB uint64 = 1 << 20
)

var suffixes = []struct {
	text string
	unit uint64
}{{"MiB", MiB}, {"M", MiB}, {"GiB", GiB}, {"G", GiB}, {"TiB", TiB}, {"T", TiB}}

// Amount parses a number with an optional suffix, such as 16G, and returns it in the given unit; without a suffix, the
// number is in that unit already. It returns false if text is not such a number, or not a whole number of units.
func Amount(text string, unit uint64) (uint64, bool) {
	own := unit
	for _, s := range suffixes {
		if digits, ok := strings.CutSuffix(text, s.text); ok {
			text, own = digits, s.unit
			break
		}
	}
	// 40 bits suffice for every real amount, and the multiplication below cannot overflow.
	n, err := strconv.ParseUint(text, 10, 40)
	if err != nil || n*own%unit != 0 {
		return 0, false
	}
	return n * own / unit, true
}
