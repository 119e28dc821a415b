// Package figure computes quantiles of samples and prints a Markdown table of figures: what was measured, for Trivet
// and for a peer in the same run, a value, and its target. It does not depend on what is measured.
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

// Quantile returns the smallest sample that at least q (0 to 1) of all samples do not exceed; the zero value if there
// are no samples.
func Quantile[T cmp.Ordered](samples []T, q float64) T {
	var none T
	if len(samples) == 0 {
		return none
	}
	sorted := slices.Sorted(slices.Values(samples))
	rank := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}

// Median returns the Quantile at one half.
func Median[T cmp.Ordered](samples []T) T { return Quantile(samples, 0.5) }

// Row is one line of a table. It may have a target, which is an upper bound of Value.
type Row struct {
	What, Ours, Peer string
	// Value is compared with AtMost; an AtMost of 0 means that there is no target.
	Value, AtMost float64
	// Unit is the unit of Value and AtMost, such as "×", "ms", "MB".
	Unit string
	// Note holds remarks for the reader, such as spread and rounds.
	Note string
}

// Met reports whether the target is met; it is true for a row without target.
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

// WithoutTargets returns the rows without their targets, so that a table of them has no verdicts.
func WithoutTargets(rows []Row) []Row {
	rows = slices.Clone(rows)
	for i := range rows {
		rows[i].AtMost = 0
	}
	return rows
}

// Markdown returns a table of the rows.
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
