// Package show prints what the command line has to say: tables for people, protojson for programs, names for shells.
//
// It knows columns, messages and streams; not what a VM is. Decisions:
//
//   - Nothing is coloured, so a table looks the same in a file. Only [Progress] moves the cursor, and it is for a
//     terminal alone.
//   - What a tenant wrote (labels, errors) may hold control characters; [Text] makes them visible instead of obeyed.
//   - JSON has the names of the protos, and zero values, so that a program finds each key and each list.
package show

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// Form is how objects are printed.
type Form string

const (
	Table Form = "table"
	JSON  Form = "json"
	Name  Form = "name"
)

// Forms lists every form.
func Forms() []string { return []string{string(Table), string(JSON), string(Name)} }

// Text is s on one line and without anything that a terminal would obey.
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

// Rows prints a table. Cells are made safe; an empty one is shown as a dash.
func Rows(w io.Writer, header []string, rows [][]string) error {
	return align(w, append([][]string{header}, rows...))
}

// Fields prints name and value pairs, one a line.
func Fields(w io.Writer, pairs [][2]string) error {
	rows := make([][]string, len(pairs))
	for i, p := range pairs {
		rows[i] = []string{p[0] + ":", p[1]}
	}
	return align(w, rows)
}

const gap = "  "

func align(w io.Writer, rows [][]string) error {
	var widths []int
	cells := make([][]string, len(rows))
	for i, row := range rows {
		cells[i] = make([]string, len(row))
		for j, c := range row {
			if c = Text(c); c == "" {
				c = "-"
			}
			cells[i][j] = c
			if j == len(widths) {
				widths = append(widths, 0)
			}
			widths[j] = max(widths[j], utf8.RuneCountInString(c))
		}
	}
	var b strings.Builder
	for _, row := range cells {
		for j, c := range row {
			b.WriteString(c)
			if j < len(row)-1 {
				b.WriteString(strings.Repeat(" ", widths[j]-utf8.RuneCountInString(c)) + gap)
			}
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

var marshal = protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}

// Object prints a message as indented JSON.
func Object(w io.Writer, m proto.Message) error {
	compact, err := compact(m)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := json.Indent(&b, compact, "", "  "); err != nil {
		return fmt.Errorf("print JSON: %w", err)
	}
	b.WriteByte('\n')
	_, err = w.Write(b.Bytes())
	return err
}

// Line prints a message as JSON on one line, for streams.
func Line(w io.Writer, m proto.Message) error {
	compact, err := compact(m)
	if err != nil {
		return err
	}
	_, err = w.Write(append(compact, '\n'))
	return err
}

// compact takes out the blanks that protojson puts in at random.
func compact(m proto.Message) ([]byte, error) {
	text, err := marshal.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("print JSON: %w", err)
	}
	var b bytes.Buffer
	if err := json.Compact(&b, text); err != nil {
		return nil, fmt.Errorf("print JSON: %w", err)
	}
	return b.Bytes(), nil
}

// Enum is the name of an enumeration's value without the enumeration's own: VM_STATE_RUNNING is RUNNING. The zero value
// is empty.
func Enum(prefix string, value fmt.Stringer) string {
	s := strings.TrimPrefix(value.String(), prefix+"_")
	if s == "UNSPECIFIED" {
		return ""
	}
	return s
}

// Age is how long before now a time (Unix milliseconds) was; empty for none.
func Age(now time.Time, ms int64) string {
	if ms == 0 {
		return ""
	}
	d := max(now.Sub(time.UnixMilli(ms)), 0)
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

// When is a time (Unix milliseconds) in full, in UTC; empty for none.
func When(ms int64) string {
	if ms == 0 {
		return ""
	}
	return time.UnixMilli(ms).UTC().Format("2006-01-02T15:04:05Z")
}

// Bytes is an amount in the largest binary unit that leaves at least one, to a tenth.
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

var units = []string{"KiB", "MiB", "GiB", "TiB", "PiB"}
