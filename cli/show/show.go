// Package show formats output: tables for people, and documents for programs in several formats ([Format]). [Document]
// gives the output of all commands one shape, which docs/cli.md promises to keep. The columns of each kind of object are
// in the packages of the commands. Decisions:
//
//   - There are no colours, so that a table is the same in a file. Only [Progress] moves the cursor, and only on a
//     terminal.
//   - Text from tenants (labels, errors) may contain control characters. [Text] escapes them, so that a terminal does
//     not interpret them. JSON and YAML escape them in their own ways; jsonpath and template output is unchanged.
//   - Documents include fields that are not set, so that programs find every key.
package show

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Text returns s with all unprintable characters, among them newlines, escaped as in Go, such as \n.
func Text(s string) string {
	if !strings.ContainsFunc(s, hidden) && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if hidden(r) {
			q := strconv.QuoteRuneToASCII(r)
			b.WriteString(q[1 : len(q)-1])
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

func hidden(r rune) bool { return !unicode.IsPrint(r) }

// Rows prints a table with aligned columns, without a header if header is nil. It escapes cells with Text, and prints an
// empty cell as a dash.
func Rows(w io.Writer, header []string, rows [][]string) error {
	if header == nil {
		return align(w, rows)
	}
	return align(w, append([][]string{header}, rows...))
}

// MaxWidth is the maximum number of characters in a line of a table in -o table.
const MaxWidth = 80

// WrapRows is like Rows, and breaks the last cell of a row between words, so that no line is longer than MaxWidth. It
// breaks nothing in -o wide.
func WrapRows(w io.Writer, form Form, header []string, rows [][]string) error {
	last, start := len(header)-1, 0
	for i, name := range header[:last] {
		width := utf8.RuneCountInString(name)
		for _, row := range rows {
			width = max(width, utf8.RuneCountInString(Text(row[i])), 1)
		}
		start += width + len(gap)
	}
	if form == Wide || start > MaxWidth/2+MaxWidth/4 {
		return Rows(w, header, rows)
	}
	var b strings.Builder
	wrapped := make([][]string, len(rows))
	rest := make([][]string, len(rows))
	for i, row := range rows {
		all := wrap(row[last], MaxWidth-start)
		wrapped[i], rest[i] = append(slices.Clone(row[:last]), all[0]), all[1:]
	}
	if err := Rows(&b, header, wrapped); err != nil {
		return err
	}
	lines := strings.SplitAfter(b.String(), "\n")
	b.Reset()
	b.WriteString(lines[0])
	for i := range rows {
		b.WriteString(lines[i+1])
		for _, line := range rest[i] {
			b.WriteString(strings.Repeat(" ", start) + Text(line) + "\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// wrap breaks text between words into lines of at most width characters. A longer word is on a line of its own.
func wrap(text string, width int) []string {
	lines := []string{""}
	for _, word := range strings.Fields(text) {
		line := &lines[len(lines)-1]
		switch {
		case *line == "":
			*line = word
		case utf8.RuneCountInString(*line)+1+utf8.RuneCountInString(word) <= width:
			*line += " " + word
		default:
			lines = append(lines, word)
		}
	}
	return lines
}

// Fields prints pairs of a name and a value, one per line as "NAME: VALUE", with aligned and escaped values.
func Fields(w io.Writer, pairs [][2]string) error {
	rows := make([][]string, len(pairs))
	for i, p := range pairs {
		rows[i] = []string{p[0] + ":", p[1]}
	}
	return align(w, rows)
}

const gap = "  "

func align(w io.Writer, rows [][]string) error { return NewGrowing(w).Print(rows...) }

// Growing prints a table to which rows are added over time. A column becomes wider when a cell is longer than all
// earlier cells; rows that are printed already do not change.
type Growing struct {
	w      io.Writer
	widths []int
}

// NewGrowing returns a table that is printed to w.
func NewGrowing(w io.Writer) *Growing { return &Growing{w: w} }

// Print prints rows. It escapes cells with Text, and prints an empty cell as a dash.
func (g *Growing) Print(rows ...[]string) error {
	cells := make([][]string, len(rows))
	for i, row := range rows {
		cells[i] = make([]string, len(row))
		for j, c := range row {
			if c = Text(c); c == "" {
				c = "-"
			}
			cells[i][j] = c
			if j == len(g.widths) {
				g.widths = append(g.widths, 0)
			}
			g.widths[j] = max(g.widths[j], utf8.RuneCountInString(c))
		}
	}
	var b strings.Builder
	for _, row := range cells {
		for j, c := range row {
			b.WriteString(c)
			if j < len(row)-1 {
				b.WriteString(strings.Repeat(" ", g.widths[j]-utf8.RuneCountInString(c)) + gap)
			}
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(g.w, b.String())
	return err
}

// Shorten cuts text to at most max characters and marks the cut with an ellipsis. It cuts nothing if max is 0.
func Shorten(text string, max int) string {
	if max == 0 || utf8.RuneCountInString(text) <= max {
		return text
	}
	return string([]rune(text)[:max-1]) + "…"
}

// Enum returns the name of an enum value without a prefix and its underscore, such as RUNNING for VM_STATE_RUNNING. It
// returns "" for the value UNSPECIFIED.
func Enum(prefix string, value fmt.Stringer) string {
	s := strings.TrimPrefix(value.String(), prefix+"_")
	if s == "UNSPECIFIED" {
		return ""
	}
	return s
}

// Age formats the duration from ms (Unix milliseconds) to now in one unit, such as "90s" or "3d". It returns "" if ms
// is 0.
func Age(now time.Time, ms int64) string {
	if ms == 0 {
		return ""
	}
	return period(max(now.Sub(time.UnixMilli(ms)), 0))
}

// period formats d in one unit.
func period(d time.Duration) string {
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

// In formats the duration from now to ms (Unix milliseconds), such as "in 3d". It returns "expired" if ms is not after
// now, and "" if ms is 0.
func In(now time.Time, ms int64) string {
	switch left := time.UnixMilli(ms).Sub(now); {
	case ms == 0:
		return ""
	case left <= 0:
		return "expired"
	default:
		return "in " + period(left)
	}
}

// When formats ms (Unix milliseconds) as a time in UTC with seconds. It returns "" if ms is 0.
func When(ms int64) string {
	if ms == 0 {
		return ""
	}
	return time.UnixMilli(ms).UTC().Format("2006-01-02T15:04:05Z")
}

// Bytes formats a number of bytes in the largest binary unit that does not exceed it, with at most one decimal, such as
// "1.5 GiB".
func Bytes(n uint64) string {
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/(1<<10), 0
	for value >= 1024 && unit < len(units)-1 {
		value, unit = value/1024, unit+1
	}
	return strings.TrimSuffix(strconv.FormatFloat(value, 'f', 1, 64), ".0") + " " + units[unit]
}

// Used formats a number of bytes that are used of a total, such as "3 GiB/1.5 TiB". A unit that both have is written once:
// "1.5/64 GiB".
func Used(used, total uint64) string {
	u, t := Bytes(used), Bytes(total)
	number, unit, _ := strings.Cut(u, " ")
	if strings.HasSuffix(t, " "+unit) || used == 0 {
		return number + "/" + t
	}
	return u + "/" + t
}

var units = []string{"KiB", "MiB", "GiB", "TiB", "PiB"}

// Pairs formats a map, such as labels, as KEY=VALUE with commas between, in the order of the keys.
func Pairs(m map[string]string) string {
	out := make([]string, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, k+"="+m[k])
	}
	return strings.Join(out, ",")
}
