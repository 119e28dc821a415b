// Package columns prints lists of objects as tables whose columns and order the user chooses with the flags --columns
// and --sort, and follows the changes of such a list. A command defines the [Column]s of its objects, calls [Add] to
// register its [Flags], and calls [Choose] for the [Table]. [Watch] implements the flag --watch.
package columns

import (
	"cmp"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// Column is one column of a table of objects of type T.
type Column[T any] struct {
	// Name is the header, in upper case. The flags accept it in lower case too.
	Name string
	// Text returns the cell of an object.
	Text func(T) string
	// Order compares two objects for --sort. If it is nil, their cells are compared.
	Order func(a, b T) int
	// Optional columns are shown only if --columns names them.
	Optional bool
}

// By returns a function for Column.Order that compares objects by a value, such as a number.
func By[T any, V cmp.Ordered](value func(T) V) func(a, b T) int {
	return func(a, b T) int { return cmp.Compare(value(a), value(b)) }
}

// Flags holds the values of the flags --columns and --sort.
type Flags struct {
	columns []string
	sort    string
}

// Add adds the flags to a command. The names of the columns are their shell completions.
func Add[T any](c *cobra.Command, f *Flags, all []Column[T]) {
	c.Flags().StringSliceVar(&f.columns, "columns", nil, "columns to show, in this order: "+strings.ToLower(strings.Join(names(all), ",")))
	c.Flags().StringVar(&f.sort, "sort", "", "column to sort by; with a minus sign before it, in descending order")
	complete := cobra.FixedCompletions(lower(names(all)), cobra.ShellCompDirectiveNoFileComp)
	_ = c.RegisterFlagCompletionFunc("columns", complete) // its only error is for an unknown flag
	_ = c.RegisterFlagCompletionFunc("sort", complete)
}

func names[T any](all []Column[T]) (names []string) {
	for _, c := range all {
		names = append(names, c.Name)
	}
	return names
}

func lower(words []string) (out []string) {
	for _, w := range words {
		out = append(out, strings.ToLower(w))
	}
	return out
}

// Table is a table with the chosen columns and order.
type Table[T any] struct {
	columns []Column[T]
	order   func(a, b T) int
}

// Choose returns the table that the flags select from all columns. Without --columns, the table has the columns that
// are not optional. Choose returns a *session.Usage error for an unknown column.
func Choose[T any](f *Flags, all []Column[T]) (*Table[T], error) {
	t := &Table[T]{}
	for _, name := range f.columns {
		c, err := find("columns", name, all)
		if err != nil {
			return nil, err
		}
		t.columns = append(t.columns, *c)
	}
	if len(t.columns) == 0 {
		t.columns = slices.DeleteFunc(slices.Clone(all), func(c Column[T]) bool { return c.Optional })
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
		t.order = By(c.Text)
	}
	if ascending := t.order; descending {
		t.order = func(a, b T) int { return ascending(b, a) }
	}
	return t, nil
}

func find[T any](flag, name string, all []Column[T]) (*Column[T], error) {
	for i := range all {
		if strings.EqualFold(all[i].Name, name) {
			return &all[i], nil
		}
	}
	return nil, session.Usagef("--%s: there is no column %q: want %s", flag, name, strings.ToLower(strings.Join(names(all), ", ")))
}

// Sort sorts objects by the column of --sort. Objects that are equal in this column keep their order. Without --sort,
// Sort changes nothing.
func (t *Table[T]) Sort(objects []T) {
	if t.order != nil {
		slices.SortStableFunc(objects, t.order)
	}
}

// Sorted reports whether the user has chosen an order.
func (t *Table[T]) Sorted() bool { return t.order != nil }

// Print prints objects as a table.
func (t *Table[T]) Print(w io.Writer, objects ...T) error {
	rows := make([][]string, len(objects))
	for i, o := range objects {
		rows[i] = t.row(o)
	}
	return show.Rows(w, names(t.columns), rows)
}

func (t *Table[T]) row(o T) []string {
	row := make([]string, len(t.columns))
	for i, c := range t.columns {
		row[i] = c.Text(o)
	}
	return row
}
