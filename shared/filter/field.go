package filter

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	expr "google.golang.org/genproto/googleapis/api/expr/v1alpha1"
)

// Field is a field of records of type T that a filter can compare. The constructors below say which operators each kind
// of field has.
type Field[T any] struct {
	// kind describes the values and operators, for errors.
	kind    string
	pairs   func(T) map[string]string
	compile func(op operator, value string) (Match[T], bool)
}

// Text returns a field with text. The operators = and != accept an asterisk at the beginning and at the end of the value,
// which stands for any text; <, <=, > and >= compare bytes; name:value means that the text contains the value, and name:*
// that it is not empty.
func Text[T any](of func(T) string) Field[T] {
	return Field[T]{kind: "text, with =, !=, <, <=, >, >= or :", compile: func(op operator, value string) (Match[T], bool) {
		switch op {
		case equal:
			match := pattern(value)
			return func(r T) bool { return match(of(r)) }, true
		case notEqual:
			match := pattern(value)
			return func(r T) bool { return !match(of(r)) }, true
		case has:
			if value == "*" {
				return func(r T) bool { return of(r) != "" }, true
			}
			return func(r T) bool { return strings.Contains(of(r), value) }, true
		}
		return func(r T) bool { return op.holds(cmp.Compare(of(r), value)) }, true
	}}
}

// Texts returns a field with several texts. Both = and : mean that one of them is the value, and != that none is. As in
// Text, the value can begin and end with an asterisk.
func Texts[T any](of func(T) []string) Field[T] {
	return Field[T]{kind: "a list of texts, with =, != or :", compile: func(op operator, value string) (Match[T], bool) {
		if op != equal && op != notEqual && op != has {
			return nil, false
		}
		match := pattern(value)
		return func(r T) bool { return slices.ContainsFunc(of(r), match) == (op != notEqual) }, true
	}}
}

// Name returns a field whose values are names that valid knows, such as methods. of returns all names of a record, such as a
// short one and a long one. The operators = and != accept only names that valid knows, or values with an asterisk, so that
// a typing error is not a filter that matches nothing. name:value means that a name contains the value. example is
// a valid name, for errors.
func Name[T any](example string, valid func(string) bool, of func(T) []string) Field[T] {
	kind := "a name such as " + example + ", with = or !=, or a part of one, with :"
	return Field[T]{kind: kind, compile: func(op operator, value string) (Match[T], bool) {
		match := pattern(value)
		switch {
		case op == has:
			match = func(name string) bool { return strings.Contains(name, value) }
		case op != equal && op != notEqual || !strings.Contains(value, "*") && !valid(value):
			return nil, false
		}
		return func(r T) bool { return slices.ContainsFunc(of(r), match) == (op != notEqual) }, true
	}}
}

// Word returns a field with one of the words in all, with the operators =, != and :, which is the same as =. Filters may
// write a word in lower case, and with the prefix.
func Word[T any](prefix string, all []string, of func(T) string) Field[T] {
	return Field[T]{kind: "one of " + strings.Join(all, ", ") + ", with = or !=", compile: func(op operator, value string) (Match[T], bool) {
		value = strings.TrimPrefix(strings.ToUpper(value), prefix)
		if !slices.Contains(all, value) || op != equal && op != notEqual && op != has {
			return nil, false
		}
		return func(r T) bool { return (of(r) == value) == (op != notEqual) }, true
	}}
}

// Number returns a field with a number, with the operators =, !=, <, <=, > and >=. units are the suffixes that a value
// may have in quotes, such as "4GiB", each with its number of units of the field.
func Number[T any](units map[string]float64, of func(T) float64) Field[T] {
	kind := "a number, with =, !=, <, <=, > or >="
	if len(units) > 0 {
		kind = "a number or a text such as \"4GiB\", with =, !=, <, <=, > or >="
	}
	return Field[T]{kind: kind, compile: func(op operator, value string) (Match[T], bool) {
		factor := 1.0
		for suffix, f := range units {
			if text, ok := strings.CutSuffix(value, suffix); ok {
				value, factor = strings.TrimSpace(text), f
				break
			}
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil || math.IsNaN(n) || op == has {
			return nil, false
		}
		n *= factor
		return func(r T) bool { return op.holds(cmp.Compare(of(r), n)) }, true
	}}
}

// Time returns a field with a time in Unix milliseconds, with the operators =, !=, <, <=, > and >=. Its values are a time
// of RFC 3339 or a date in UTC, in quotes. The time of a record is 0 if it is unset. An unset time is neither before nor
// after a value, so it fulfils only !=. Otherwise, a filter for what expires before a date would match what never expires.
func Time[T any](of func(T) int64) Field[T] {
	return Field[T]{kind: `a time such as "2026-03-01T12:00:00Z" or "2026-03-01", with =, !=, <, <=, > or >=`,
		compile: func(op operator, value string) (Match[T], bool) {
			at, err := time.Parse(time.RFC3339, value)
			if err != nil {
				at, err = time.Parse(time.DateOnly, value)
			}
			if err != nil || op == has {
				return nil, false
			}
			return func(r T) bool {
				t := of(r)
				if t == 0 {
					return op == notEqual
				}
				return op.holds(cmp.Compare(t, at.UnixMilli()))
			}, true
		}}
}

// Pairs returns a field with pairs of key and value, such as labels. In labels.key each value is text, which is empty if
// the key does not exist, and labels.key:* means that the key exists. labels:key means that too. The filter quotes a key
// that is not a plain word: labels."a/b".
func Pairs[T any](of func(T) map[string]string) Field[T] { return Field[T]{pairs: of} }

func (f Field[T]) compare(path []string, op operator, value string) (Match[T], error) {
	name := strings.Join(path, ".")
	if f.pairs == nil {
		m, ok := f.compile(op, value)
		if !ok {
			return nil, invalid("%s %s %s: %s is %s", name, op, value, name, f.kind)
		}
		return m, nil
	}
	key := strings.Join(path[1:], ".")
	switch {
	case key == "" && op == has:
		return func(r T) bool { _, exists := f.pairs(r)[value]; return exists }, nil
	case key == "":
		return nil, invalid("name the key: %s.<key>", name)
	case op == has && value == "*":
		return func(r T) bool { _, exists := f.pairs(r)[key]; return exists }, nil
	}
	return Text(func(r T) string { return f.pairs(r)[key] }).compare(path, op, value)
}

// pattern returns a function that compares a text with value, which can begin and end with an asterisk.
func pattern(value string) func(string) bool {
	middle, begins := strings.CutSuffix(value, "*")
	middle, ends := strings.CutPrefix(middle, "*")
	switch {
	case begins && ends:
		return func(text string) bool { return strings.Contains(text, middle) }
	case begins:
		return func(text string) bool { return strings.HasPrefix(text, middle) }
	case ends:
		return func(text string) bool { return strings.HasSuffix(text, middle) }
	}
	return func(text string) bool { return text == value }
}

// literal returns the text of a string, a number or an unquoted word. It returns false for any other expression.
func literal(e *expr.Expr) (string, bool) {
	if c := e.GetConstExpr(); c != nil {
		switch k := c.GetConstantKind().(type) {
		case *expr.Constant_StringValue:
			return k.StringValue, true
		case *expr.Constant_Int64Value:
			return strconv.FormatInt(k.Int64Value, 10), true
		case *expr.Constant_DoubleValue:
			return strconv.FormatFloat(k.DoubleValue, 'g', -1, 64), true
		}
		return "", false
	}
	path, ok := fieldPath(e)
	return strings.Join(path, "."), ok
}
