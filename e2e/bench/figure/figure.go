// Package figure turns samples into figures, and figures into rows of a table that people read: what was measured, for
// us and for a peer of the same run, their ratio, and the target. It knows no clock and no subject.
//
// Quantiles are nearest-rank: a value that was measured, never one between two.
package figure

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Quantile is the smallest sample that at least q (0 to 1) of all samples do not exceed; the zero value without samples.
func Quantile[T cmp.Ordered](samples []T, q float64) T {
	var none T
	if len(samples) == 0 {
		return none
	}
	sorted := slices.Sorted(slices.Values(samples))
	rank := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}

// Median is Quantile at one half.
func Median[T cmp.Ordered](samples []T) T { return Quantile(samples, 0.5) }

// Row is one line of a table. Ratio and target follow from each other: a target without one is only shown.
type Row struct {
	What, Ours, Peer string
	// Value is compared with AtMost; AtMost 0 is a row without target.
	Value, AtMost float64
	// Unit of both, such as "×", "ms", "MB".
	Unit string
	// Note says what the reader must know: spread, rounds.
	Note string
}

// Met reports whether the row's target is met; a row without one is.
func (r Row) Met() bool { return r.AtMost == 0 || r.Value <= r.AtMost }

func (r Row) cells() []string {
	value, target, verdict := "", "", ""
	if r.Value != 0 {
		value = fmt.Sprintf("%.2f %s", r.Value, r.Unit)
	}
	if r.AtMost != 0 {
		target, verdict = fmt.Sprintf("≤ %g %s", r.AtMost, r.Unit), "met"
		if !r.Met() {
			verdict = "**missed**"
		}
	}
	return []string{r.What, r.Ours, r.Peer, value, target, verdict, r.Note}
}

var heads = []string{"what", "ours", "peer", "figure", "target", "", "note"}

// Markdown is a table of the rows.
func Markdown(rows []Row) string {
	var b strings.Builder
	line := func(cells []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	line(heads)
	line(slices.Repeat([]string{"---"}, len(heads)))
	for _, r := range rows {
		line(r.cells())
	}
	return b.String()
}
