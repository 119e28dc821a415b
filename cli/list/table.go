package list

import (
	"cmp"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/cli/show"
)

// Table is a table with the chosen columns and order, in an output format.
type Table[T any] struct {
	form      show.Form
	columns   []Column[T]
	order     func(a, b T) int
	noHeaders bool
	// chosen is true if the user has chosen the columns. Their cells are not cut.
	chosen bool
}

// table returns the table that the flags select from all columns. It returns a *session.Usage error for an unknown
// column.
func table[T any](f *Flags, form show.Form, all []Column[T]) (*Table[T], error) {
	t := &Table[T]{form: form, noHeaders: f.noHeaders, chosen: len(f.columns) > 0}
	for _, name := range f.columns {
		c, err := find("columns", name, all)
		if err != nil {
			return nil, err
		}
		t.columns = append(t.columns, c)
	}
	if len(t.columns) == 0 {
		t.columns = slices.DeleteFunc(slices.Clone(all), func(c Column[T]) bool { return !c.shownIn(form) })
	}
	if f.sort == "" {
		return t, nil
	}
	name, descending := strings.CutPrefix(f.sort, "-")
	c, err := find("sort", name, all)
	if err != nil {
		return nil, err
	}
	t.order = c.Order
	if t.order == nil {
		t.order = func(a, b T) int { return compareCells(c.Text(a), c.Text(b)) }
	}
	if ascending := t.order; descending {
		t.order = func(a, b T) int { return ascending(b, a) }
	}
	return t, nil
}

// compareCells compares numbers by value, and other texts by bytes.
func compareCells(a, b string) int {
	m, errA := strconv.ParseInt(a, 10, 64)
	n, errB := strconv.ParseInt(b, 10, 64)
	if errA == nil && errB == nil {
		return cmp.Compare(m, n)
	}
	return cmp.Compare(a, b)
}

// sort sorts objects by the column of --sort. Objects that are equal in this column keep their order. Without --sort, it
// changes nothing.
func (t *Table[T]) sort(objects []T) {
	if t.order != nil {
		slices.SortStableFunc(objects, t.order)
	}
}

// header returns the header, or nil with --no-headers.
func (t *Table[T]) header() (out []string) {
	if t.noHeaders {
		return nil
	}
	for i := range t.columns {
		if t.form == show.CSV {
			out = append(out, t.columns[i].flagName())
		} else {
			out = append(out, t.columns[i].Name)
		}
	}
	return out
}

func (t *Table[T]) row(o T) []string {
	row := make([]string, len(t.columns))
	for i := range t.columns {
		row[i] = t.columns[i].cell(o, t.form)
		if t.form == show.Table && !t.chosen {
			row[i] = show.Shorten(row[i], t.columns[i].Max)
		}
	}
	return row
}

// print prints objects as a table or as CSV.
func (t *Table[T]) print(w io.Writer, objects ...T) error {
	rows := make([][]string, len(objects))
	for i, o := range objects {
		rows[i] = t.row(o)
	}
	header := t.header()
	if t.form != show.CSV {
		return show.Rows(w, header, rows)
	}
	if header != nil {
		rows = append([][]string{header}, rows...)
	}
	return show.PrintCSV(w, rows)
}

// Print prints objects as a table with the columns that are shown by default, as a part of other output.
func Print[T any](w io.Writer, columns []Column[T], objects ...T) error {
	t, err := table(&Flags{}, show.Table, columns)
	if err != nil {
		return err
	}
	return t.print(w, objects...)
}
