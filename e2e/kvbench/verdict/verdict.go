// Package verdict compares the figures of our store and of a peer, round by round: medians, spread, ratio, and whether
// the target is met. It does not depend on how or on what was measured.
//
// A target has two bounds: one that must be reached and one that is aimed at. A missed target is reported, not an
// error.
package verdict

import (
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
)

// Target holds the bounds for a figure. The zero value means that there is no target.
type Target struct {
	Must, Aim float64
	// Least makes the bounds lower bounds: more is better.
	Least bool
	// Absolute applies the bounds to our median, in the row's unit, instead of its ratio to the peer's.
	Absolute bool
}

// AtLeast returns lower bounds on the ratio.
func AtLeast(must, aim float64) Target { return Target{Must: must, Aim: aim, Least: true} }

// AtMost returns upper bounds on the ratio.
func AtMost(must, aim float64) Target { return Target{Must: must, Aim: aim} }

// Within returns upper bounds on our own median.
func Within(must, aim float64) Target { return Target{Must: must, Aim: aim, Absolute: true} }

func (t Target) reached(value, bound float64) bool {
	if t.Least {
		return value >= bound
	}
	return value <= bound
}

func (t Target) String() string {
	if t == (Target{}) {
		return ""
	}
	sign := "≤"
	if t.Least {
		sign = "≥"
	}
	if t.Must == t.Aim {
		return fmt.Sprintf("%s %g", sign, t.Must)
	}
	return fmt.Sprintf("%s %g / %g", sign, t.Must, t.Aim)
}

// Row holds one figure of both systems.
type Row struct {
	What string
	// Unit of the figures: "/s", "µs", "ms", "s", "B", "MB", or empty for a count.
	Unit string
	// Ours and Peer hold one figure per round. If the systems alternate, equal indexes belong to the same round.
	Ours, Peer []float64
	Target     Target
	// Note is printed in the last column, after the spread.
	Note string
}

// Ratio returns our median divided by the peer's. It reports false if either is missing or the peer's is 0.
func (r Row) Ratio() (float64, bool) {
	if len(r.Ours) == 0 || len(r.Peer) == 0 || figure.Median(r.Peer) == 0 {
		return 0, false
	}
	return figure.Median(r.Ours) / figure.Median(r.Peer), true
}

// Verdict returns "aim met", "met", "**missed**", "not measured", or "" for a row without target.
func (r Row) Verdict() string {
	if r.Target == (Target{}) {
		return ""
	}
	value, ok := r.Ratio()
	if r.Target.Absolute {
		value, ok = figure.Median(r.Ours), len(r.Ours) > 0
	}
	switch {
	case !ok:
		return "not measured"
	case r.Target.reached(value, r.Target.Aim):
		return "aim met"
	case r.Target.reached(value, r.Target.Must):
		return "met"
	}
	return "**missed**"
}

func (r Row) cells(peer string) []string {
	ratio := ""
	if value, ok := r.Ratio(); ok {
		ratio = fmt.Sprintf("%.2f ×", value)
	}
	target := r.Target.String()
	switch {
	case target == "":
	case r.Target.Absolute:
		target = strings.TrimSpace(target + " " + r.Unit)
	default:
		target += " ×"
	}
	var notes []string
	if n := max(len(r.Ours), len(r.Peer)); n > 1 {
		notes = append(notes, fmt.Sprintf("%d rounds: %s", n, strings.Join(slices.DeleteFunc([]string{
			spread("ours", r.Ours), spread(peer, r.Peer), r.pairs()}, func(s string) bool { return s == "" }), ", ")))
	}
	if r.Note != "" {
		notes = append(notes, r.Note)
	}
	return []string{r.What, r.middle(r.Ours), r.middle(r.Peer), ratio, target, r.Verdict(), strings.Join(notes, "; ")}
}

func (r Row) middle(series []float64) string {
	if len(series) == 0 {
		return ""
	}
	return strings.TrimSpace(Number(figure.Median(series)) + " " + r.Unit)
}

func spread(whose string, series []float64) string {
	if len(series) == 0 {
		return ""
	}
	return fmt.Sprintf("%s %s to %s", whose, Number(slices.Min(series)), Number(slices.Max(series)))
}

// pairs returns the spread of the per-round ratios, which shows how much conditions varied between rounds.
func (r Row) pairs() string {
	if len(r.Ours) != len(r.Peer) || len(r.Ours) == 0 || slices.Min(r.Peer) == 0 {
		return ""
	}
	ratios := make([]float64, len(r.Ours))
	for i := range ratios {
		ratios[i] = r.Ours[i] / r.Peer[i]
	}
	return fmt.Sprintf("ratio %.2f to %.2f", slices.Min(ratios), slices.Max(ratios))
}

// Number formats v with three significant digits, or with all digits before the decimal point if there are more.
func Number(v float64) string {
	switch {
	case v >= 100 || v <= -100 || v == 0:
		return fmt.Sprintf("%.0f", v)
	case v >= 10 || v <= -10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// WithoutTargets returns the rows without their targets, so that a table of them has no verdicts.
func WithoutTargets(rows []Row) []Row {
	rows = slices.Clone(rows)
	for i := range rows {
		rows[i].Target = Target{}
	}
	return rows
}

// Markdown returns a table of the rows, with the peer's name as the heading of its column.
func Markdown(peer string, rows []Row) string {
	heads := []string{"what", "ours", peer, "ratio", "must / aim", "", "note"}
	var b strings.Builder
	line := func(cells []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	line(heads)
	line(slices.Repeat([]string{"---"}, len(heads)))
	for _, r := range rows {
		line(r.cells(peer))
	}
	return b.String()
}

// Summary returns one line that counts the verdicts and names the missed targets.
func Summary(rows []Row) string {
	count := map[string]int{}
	var missed []string
	for _, r := range rows {
		v := r.Verdict()
		count[v]++
		if v == "**missed**" {
			missed = append(missed, r.What)
		}
	}
	text := fmt.Sprintf("Targets: %d aims met, %d met, %d missed, %d not measured.", count["aim met"], count["met"], len(missed), count["not measured"])
	if len(missed) > 0 {
		text += " Missed: " + strings.Join(missed, "; ") + "."
	}
	return text
}
