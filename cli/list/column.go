package list

import (
	"cmp"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// Column is one column of a table of objects of type T. Name and Text are required.
type Column[T any] struct {
	// Name is the header, in upper case. In --columns, --sort and CSV it is in lower case, with hyphens for spaces.
	Name string
	// Text returns the cell of an object.
	Text func(T) string
	// Table returns the cell in -o table, if it is shorter than Text.
	Table func(T) string
	// CSV returns the cell in CSV, if it is easier to parse than Text, such as a number without a unit.
	CSV func(T) string
	// Order compares two objects for --sort. If it is nil, their cells are compared, as numbers if they are numbers.
	Order func(a, b T) int
	// Max is the width to which cells are cut in -o table, unless --columns names the column. 0 is no limit.
	Max int
	// Words has the possible texts of the cells, if they are few, for --filter.
	Words []string
	// number and time return the value of a cell for --filter, if it is a number or a time in Unix milliseconds.
	number func(T) float64
	time   func(T) int64
	// units are the units of number, each with its factor.
	units map[string]float64
	// In says in which output formats the column is shown.
	In Place
}

// Place says in which output formats a column is shown if --columns is not given. Output in CSV has the columns of -o
// wide.
type Place uint8

const (
	Everywhere Place = iota
	// InTable columns are left out in -o wide, which has others that are more exact.
	InTable
	// InWide columns are shown only in -o wide.
	InWide
	// OnDemand columns are shown only if --columns names them.
	OnDemand
)

// Tenant returns a column with the org and project of an object. It is shown by default only if all is true, for lists
// over all projects.
func Tenant[T interface {
	GetOrgId() string
	GetProjectId() string
}](all bool) Column[T] {
	c := Column[T]{Name: "TENANT", Text: func(o T) string { return o.GetOrgId() + "/" + o.GetProjectId() }, In: OnDemand}
	if all {
		c.In, c.Max = Everywhere, maxTenant
	}
	return c
}

// maxTenant is the width to which -o table cuts the column Tenant.
const maxTenant = 18

// By returns a function for Column.Order that compares objects by a value, such as a number.
func By[T any, V cmp.Ordered](value func(T) V) func(a, b T) int {
	return func(a, b T) int { return cmp.Compare(value(a), value(b)) }
}

// Time returns a column with a time in Unix milliseconds, such as CREATED.
func Time[T any](name string, at func(T) int64, in Place) Column[T] {
	return Column[T]{Name: name, Text: func(o T) string { return show.When(at(o)) }, Order: By(at), In: in, time: at}
}

// Age returns a column with the time that has passed since a time in Unix milliseconds. It is not shown in -o wide,
// which should have a column Time. It is sorted from short to long.
func Age[T any](name string, now func() time.Time, at func(T) int64) Column[T] {
	return Column[T]{
		Name: name, Text: func(o T) string { return show.Age(now(), at(o)) }, In: InTable, time: at,
		Order: func(a, b T) int { return cmp.Compare(at(b), at(a)) },
	}
}

// Until returns a column with the duration until a time in Unix milliseconds, such as "in 3d". In -o wide it is the time.
func Until[T any](name string, now func() time.Time, at func(T) int64) Column[T] {
	c := Time(name, at, Everywhere) // a filter compares the time
	c.Table = func(o T) string { return show.In(now(), at(o)) }
	return c
}

// Size returns a column with a number of bytes. In CSV, it is a plain number.
func Size[T any](name string, bytes func(T) uint64) Column[T] {
	return Column[T]{
		Name: name, Text: func(o T) string { return show.Bytes(bytes(o)) }, Order: By(bytes),
		CSV: func(o T) string { return strconv.FormatUint(bytes(o), 10) }, number: func(o T) float64 { return float64(bytes(o)) }, units: byteUnits,
	}
}

// Number returns a column with a number.
func Number[T any, N ~int | ~int64 | ~uint32 | ~uint64](name string, value func(T) N) Column[T] {
	return Column[T]{Name: name, Text: func(o T) string { return strconv.FormatInt(int64(value(o)), 10) }, Order: By(value), number: func(o T) float64 { return float64(value(o)) }}
}

var byteUnits = map[string]float64{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

func (c *Column[T]) flagName() string { return strings.ReplaceAll(strings.ToLower(c.Name), " ", "-") }

// cell returns the cell of an object in an output format.
func (c *Column[T]) cell(o T, form show.Form) string {
	switch {
	case form == show.CSV && c.CSV != nil:
		return c.CSV(o)
	case form == show.Table && c.Table != nil:
		return c.Table(o)
	}
	return c.Text(o)
}

func (c *Column[T]) shownIn(form show.Form) bool {
	switch c.In {
	case OnDemand:
		return false
	case InTable:
		return form == show.Table
	case InWide:
		return form != show.Table
	}
	return true
}

func flagNames[T any](all []Column[T]) []string {
	out := make([]string, len(all))
	for i := range all {
		out[i] = all[i].flagName()
	}
	return out
}

// find returns the column with a name, or a *session.Usage error if there is none.
func find[T any](flag, name string, all []Column[T]) (Column[T], error) {
	for i := range all {
		if strings.EqualFold(all[i].flagName(), name) || strings.EqualFold(all[i].Name, name) {
			return all[i], nil
		}
	}
	return Column[T]{}, session.Usagef("--%s: there is no column %q: want %s", flag, name, strings.Join(flagNames(all), ", "))
}
