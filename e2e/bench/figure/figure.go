// Package figure computes quantiles of samples and formats figures as a Markdown table. Each row shows what was
// measured, the results of Trivet and of a peer in the same run, a value, and the target for that value.
//
// Quantiles are nearest-rank: always one of the samples, never an interpolated value.
package figure

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Quantile returns the smallest sample such that a fraction of at least q (0 to 1) of all samples do not exceed it. It
// returns the zero value if there are no samples.
func Quantile[T cmp.Ordered](samples []T, q float64) T {
	var none T
	if len(samples) == 0 {
		return none
	}
	sorted := slices.Sorted(slices.Values(samples))
	rank := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}

// Median returns Quantile(samples, 0.5).
func Median[T cmp.Ordered](samples []T) T { return Quantile(samples, 0.5) }

// Row is one line of a table. The field What describes the measurement. Ours and Peer are the formatted results of
// Trivet and of the system that it is compared with.
type Row struct {
	What, Ours, Peer string
	// Value is the figure that is compared with the target. AtMost is the target, an upper bound; 0 means no target.
	Value, AtMost float64
	// Unit is the unit of Value and AtMost, such as "×", "ms", "MB".
	Unit string
	// Note is text for the last column, such as the number of rounds and the spread of the results.
	Note string
}

// Met reports whether Value is at most AtMost. It reports true for a row without a target.
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

// WithoutTargets returns a copy of the rows without their targets, so that Markdown prints no verdicts for them.
func WithoutTargets(rows []Row) []Row {
	rows = slices.Clone(rows)
	for i := range rows {
		rows[i].AtMost = 0
	}
	return rows
}

// Markdown returns the rows as a Markdown table with a heading.
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
