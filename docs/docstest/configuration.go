// Package docstest checks pages of docs/ against the code that they describe. Its functions are Configuration, for
// docs/configuration.md, Metrics, for docs/metrics.md, and Reference, for docs/cli and docs/daemons. Tests of the programs
// call them, because the types of the programs are not importable from here.
//
// It does not depend on the programs.
package docstest

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Flag is a command-line flag of a program whose configuration is a C. Set parses text and stores the value in c.
type Flag[C any] struct {
	Name string
	Set  func(c *C, text string) error
}

// Configuration fails t unless the table below the heading "## program" of the Markdown file page has exactly one row for
// each key of the configuration type C, with the key's flag, environment variable and default. defaults returns the default
// configuration. flags lists all flags that set a field of C.
//
// The keys are the yaml tags of C: a key in a struct is written outer.inner, a key in a list of structs outer[].inner.
// Each row of the table begins with the four cells that the type row describes.
func Configuration[C any](t *testing.T, page, program string, defaults func() C, flags []Flag[C]) {
	t.Helper()
	want := map[string]row{}
	c := defaults()
	addKeys(want, "", reflect.ValueOf(c))
	for _, f := range flags {
		key := keyOf(t, defaults, f)
		r, ok := want[key]
		require.True(t, ok, "--%s sets %s, which is no key", f.Name, key)
		require.Empty(t, r.flag, "%s has two flags", key)
		r.flag = "`--" + f.Name + "`"
		r.env = "`TRIVET_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_")) + "`"
		want[key] = r
	}
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	_, section, ok := strings.Cut(string(text), "\n## "+program+"\n")
	require.True(t, ok, "%s has no heading ## %s", page, program)
	section, _, _ = strings.Cut(section, "\n## ")
	seen := map[string]bool{}
	for _, line := range strings.Split(section, "\n") {
		m := rowOf.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		key := m[1]
		r, ok := want[key]
		switch {
		case !ok:
			t.Errorf("%s: %s has no key %s", page, program, key)
		case seen[key]:
			t.Errorf("%s: %s: %s has two rows", page, program, key)
		case !strings.HasPrefix(line, r.String()):
			t.Errorf("%s: %s: the row of %s must begin with\n\t%s\nand is\n\t%s", page, program, key, r, line)
		}
		seen[key] = true
	}
	for _, key := range slices.Sorted(keysOf(want)) {
		if !seen[key] {
			t.Errorf("%s: %s lacks a row:\n\t%s", page, program, want[key])
		}
	}
}

// rowOf matches a row of a Markdown table whose first cell is a key in backquotes.
var rowOf = regexp.MustCompile("^\\| `([a-z0-9_.\\[\\]]+)` \\|")

// row holds the first four cells of the row of a key: the key, its flag, its environment variable and its default.
type row struct{ key, flag, env, byDefault string }

// String returns the row's first four cells in Markdown. A cell without a value is written as a dash.
func (r row) String() string {
	dash := func(s string) string {
		if s == "" {
			return "–"
		}
		return s
	}
	return fmt.Sprintf("| `%s` | %s | %s | %s |", r.key, dash(r.flag), dash(r.env), dash(r.byDefault))
}

func keysOf(rows map[string]row) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for key := range rows {
			if !yield(key) {
				return
			}
		}
	}
}

// addKeys adds a row to rows for each key of the struct v, with the default in v. prefix is the key of v with a dot at
// its end, or empty.
func addKeys(rows map[string]row, prefix string, v reflect.Value) {
	for i := range v.NumField() {
		name, options, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ",")
		field, key := v.Field(i), prefix+name
		switch {
		case options == "inline":
			addKeys(rows, prefix, field)
		case field.Kind() == reflect.Struct:
			addKeys(rows, key+".", field)
		case field.Kind() == reflect.Slice && field.Type().Elem().Kind() == reflect.Struct:
			rows[key] = row{key: key}
			addElementKeys(rows, key+"[].", field.Type().Elem())
		default:
			rows[key] = row{key: key, byDefault: text(field)}
		}
	}
}

// addElementKeys adds a row to rows for each key of element, the struct type of a list's elements. The rows have no
// defaults.
func addElementKeys(rows map[string]row, prefix string, element reflect.Type) {
	for i := range element.NumField() {
		name, _, _ := strings.Cut(element.Field(i).Tag.Get("yaml"), ",")
		rows[prefix+name] = row{key: prefix + name}
	}
}

// text returns the default v as Markdown: in backquotes, or "" for an empty string, list or map.
func text(v reflect.Value) string {
	var s string
	switch v.Kind() {
	case reflect.Slice, reflect.Map:
		if v.Len() > 0 {
			s = fmt.Sprint(v.Interface())
		}
	default:
		s = fmt.Sprint(v.Interface())
	}
	if d, ok := v.Interface().(time.Duration); ok {
		// 10m0s is shortened to 10m.
		s = d.String()
		if short, ok := strings.CutSuffix(s, "m0s"); ok {
			s = short + "m"
		}
	}
	if s == "" {
		return ""
	}
	return "`" + s + "`"
}

// probes are values for flags. Every flag must accept at least one of them that is not its default.
var probes = []string{"7", "7s", "true", "false", "7=10.0.0.7", "a=b", "a=b:10.0.0.7/24"}

// keyOf returns the key that the flag f sets. It finds the key by setting f to one of probes and comparing the
// configuration with the defaults.
func keyOf[C any](t *testing.T, defaults func() C, f Flag[C]) string {
	t.Helper()
	for _, probe := range probes {
		c, before := defaults(), defaults()
		if f.Set(&c, probe) != nil {
			continue
		}
		if changed := difference("", reflect.ValueOf(before), reflect.ValueOf(c)); len(changed) > 0 {
			require.Len(t, changed, 1, "--%s sets several keys", f.Name)
			return changed[0]
		}
	}
	require.Fail(t, "no probe changes a key", "--%s", f.Name)
	return ""
}

// difference returns the keys whose values differ between the structs a and b, which have the same type. prefix
// precedes each key.
func difference(prefix string, a, b reflect.Value) (keys []string) {
	for i := range a.NumField() {
		name, options, _ := strings.Cut(a.Type().Field(i).Tag.Get("yaml"), ",")
		x, y := a.Field(i), b.Field(i)
		switch {
		case options == "inline":
			keys = append(keys, difference(prefix, x, y)...)
		case x.Kind() == reflect.Struct:
			keys = append(keys, difference(prefix+name+".", x, y)...)
		case !reflect.DeepEqual(x.Interface(), y.Interface()):
			keys = append(keys, prefix+name)
		}
	}
	return keys
}
