package session

import (
	"strconv"
	"strings"
)

// Units of amounts, in MiB.
const (
	MiB uint64 = 1
	GiB uint64 = 1 << 10
	TiB uint64 = 1 << 20
)

var suffixes = []struct {
	text string
	unit uint64
}{{"MiB", MiB}, {"M", MiB}, {"GiB", GiB}, {"G", GiB}, {"TiB", TiB}, {"T", TiB}}

// Amount reads a number that counts units, or carries a unit of its own that gives a whole number of them.
func Amount(text string, unit uint64) (uint64, bool) {
	own := unit
	for _, s := range suffixes {
		if digits, ok := strings.CutSuffix(text, s.text); ok {
			text, own = digits, s.unit
			break
		}
	}
	// 2^40 of anything is far beyond every limit, and small enough to be multiplied.
	n, err := strconv.ParseUint(text, 10, 40)
	if err != nil || n*own%unit != 0 {
		return 0, false
	}
	return n * own / unit, true
}
