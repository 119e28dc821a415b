// Package table holds the lines of a benchmark's tables and the figures of its rounds, and formats both as text. The
// main types are Table, a list of lines with one peer, and Figures.
//
// The lines are listed before the run. A line with a target that was not measured is therefore shown as such.
package table

import (
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
)

// Line is a line of a printed table. If the field What begins with "… ", its rest is printed after the description of
// the nearest line above that does not.
type Line struct {
	// Part is the part of the run that measures the line. ID identifies the line within all tables.
	Part, ID   string
	What, Unit string
	Target     verdict.Target
}

// NewLine returns a Line.
func NewLine(part, id, what, unit string, target verdict.Target) Line {
	return Line{Part: part, ID: id, What: what, Unit: unit, Target: target}
}

// Table holds the lines of one printed table. It has one column for the figures of Trivet and one for those of the
// peer. The field Peer is the heading of the second one.
type Table struct {
	Peer  string
	Lines []Line
}

// Within returns a target with an upper bound on our figure, in the row's unit, regardless of the peer.
func Within(v float64) verdict.Target { return verdict.Within(v, v) }

// AtMost returns a target with an upper bound on the ratio of our figure to the peer's.
func AtMost(v float64) verdict.Target { return verdict.AtMost(v, v) }

// Series holds the figures of a line, one per round.
type Series struct {
	Ours, Peer []float64
	note       string
}

// Figures maps the IDs of lines to their figures.
type Figures map[string]*Series

// Of returns the figures of a line, which the caller may change.
func (f Figures) Of(id string) *Series {
	if f[id] == nil {
		f[id] = &Series{}
	}
	return f[id]
}

// Ours adds our figure of a round.
func (f Figures) Ours(id string, v float64) { s := f.Of(id); s.Ours = append(s.Ours, v) }

// Peer adds the peer's figure of a round.
func (f Figures) Peer(id string, v float64) { s := f.Of(id); s.Peer = append(s.Peer, v) }

// Add adds a figure, of the peer if isPeer is true.
func (f Figures) Add(id string, isPeer bool, v float64) {
	if isPeer {
		f.Peer(id, v)
	} else {
		f.Ours(id, v)
	}
}

// Note sets the text of a line's last column.
func (f Figures) Note(id, text string) { f.Of(id).note = text }

// rows returns the lines of a table that belong to the given parts. It omits lines that were not measured and have no
// target.
func (f Figures) rows(t Table, parts []string) (rows []verdict.Row) {
	subject := ""
	for _, l := range t.Lines {
		what, more := strings.CutPrefix(l.What, "… ")
		if more {
			what = subject + ": " + what
		} else {
			subject = strings.TrimSuffix(what, ": p50")
		}
		if !slices.Contains(parts, l.Part) {
			continue
		}
		s := f.Of(l.ID)
		if len(s.Ours) > 0 || len(s.Peer) > 0 || l.Target != (verdict.Target{}) {
			rows = append(rows, verdict.Row{What: what, Unit: l.Unit, Target: l.Target, Ours: s.Ours, Peer: s.Peer, Note: s.note})
		}
	}
	return rows
}

// Text returns the tables with the lines of the given parts, and a summary of the verdicts. If unusable is not "", the
// figures must not be used for this reason, and the text has no verdicts.
func (f Figures) Text(tables []Table, parts []string, unusable string) string {
	var all []verdict.Row
	text := ""
	for _, t := range tables {
		rows := f.rows(t, parts)
		if len(rows) == 0 {
			continue
		}
		if unusable != "" {
			rows = verdict.WithoutTargets(rows)
		}
		text += "\n" + verdict.Markdown(t.Peer, rows)
		all = append(all, rows...)
	}
	if unusable == "" {
		text += "\n" + verdict.Summary(all) + "\n"
	}
	return text
}
