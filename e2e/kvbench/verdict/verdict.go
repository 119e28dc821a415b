// Package verdict compares the figures of Trivet's store with those of a peer, such as etcd, each measured in several
// rounds. It formats medians, spread and ratio as a Markdown table, with a verdict that says whether a target is met.
//
// A target has two bounds: one that must be reached and one that is aimed at. A missed target appears in the table and
// is not an error.
package verdict

import (
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
)

// Target holds two bounds for a figure: Must has to be reached, and Aim is the stricter one that is aimed at. The zero
// value means that there is no target.
type Target struct {
	Must, Aim float64
	// Least makes both bounds lower bounds (more is better) instead of upper bounds.
	Least bool
	// If Absolute is true, the bounds apply to the median of Ours, in the row's unit. Otherwise they apply to the ratio
	// of the median of Ours to the median of Peer.
	Absolute bool
}

// AtLeast returns a target with lower bounds on the ratio of our median to the peer's.
func AtLeast(must, aim float64) Target { return Target{Must: must, Aim: aim, Least: true} }

// AtMost returns a target with upper bounds on the ratio of our median to the peer's.
func AtMost(must, aim float64) Target { return Target{Must: must, Aim: aim} }

// Within returns a target with upper bounds on our median, in the row's unit, regardless of the peer.
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

// Row is one line of the table: a figure of both systems in all rounds, and its target.
type Row struct {
	What string
	// Unit is the unit of the figures: "/s", "µs", "ms", "s", "B", "MB", or "" for a count.
	Unit string
	// Ours and Peer hold one figure per round. If both have the same length, figures with the same index are of the
	// same round.
	Ours, Peer []float64
	Target     Target
	// Note is text that is printed in the last column, after the spread.
	Note string
}

// Ratio returns the median of Ours divided by the median of Peer. It returns false if Ours or Peer is empty or the
// median of Peer is 0.
func (r Row) Ratio() (float64, bool) {
	if len(r.Ours) == 0 || len(r.Peer) == 0 || figure.Median(r.Peer) == 0 {
		return 0, false
	}
	return figure.Median(r.Ours) / figure.Median(r.Peer), true
}

// Verdict compares the row with its target. It returns "aim met", "met" if only the bound Must is reached,
// "**missed**", "not measured" if there is no figure to compare, or "" for a row without target.
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

// pairs returns the lowest and the highest of the rounds' ratios, formatted for the column of notes. It returns "" if
// Ours and Peer have different numbers of rounds.
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

// WithoutTargets returns a copy of the rows without their targets, so that Markdown prints no verdicts for them.
func WithoutTargets(rows []Row) []Row {
	rows = slices.Clone(rows)
	for i := range rows {
		rows[i].Target = Target{}
	}
	return rows
}

// Markdown returns the rows as a Markdown table. peer is the heading of the column with the peer's figures.
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
