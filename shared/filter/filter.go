// Package filter compiles the filters of lists, which are written in the language of AIP-160
// (https://google.aip.dev/160), into functions. A service describes the fields of its records as a table of [Field]s. The
// name of a field may have dots.
// Decisions:
//
//   - Comparisons are joined by AND, OR, NOT, a minus sign and parentheses. As in AIP-160, OR binds more strongly than
//     AND.
//   - Functions and bare words, which search in all fields in AIP-160, are errors: a typing error must not select nothing.
//   - The length of a filter and the number of its parentheses are limited, and with them the work of compiling it and of
//     each evaluation.
//
// The package does not know records or protos.
package filter

import (
	"maps"
	"slices"
	"strings"

	"go.einride.tech/aip/filtering"
	expr "google.golang.org/genproto/googleapis/api/expr/v1alpha1"

	"github.com/trivet-cloud/trivet/shared/fault"
)

const (
	// maxLength is the maximum length of a filter in bytes.
	maxLength = 4 << 10
	// maxParentheses is the maximum number of opening parentheses in a filter.
	maxParentheses = 64
)

// Match reports whether a record matches a filter.
type Match[T any] func(T) bool

// Compile compiles a filter on records with the given fields. An empty filter matches every record. Compile returns an
// InvalidArgument fault for the field "filter" if the filter has a syntax error, compares a field that does not exist, or
// compares a field with a value or an operator that does not fit.
func Compile[T any](text string, fields map[string]Field[T]) (Match[T], error) {
	if len(text) > maxLength {
		return nil, invalid("at most %d bytes, got %d", maxLength, len(text))
	}
	if strings.TrimSpace(text) == "" {
		return func(T) bool { return true }, nil
	}
	if strings.Count(text, "(") > maxParentheses {
		return nil, invalid("at most %d parentheses", maxParentheses)
	}
	var p filtering.Parser
	p.Init(text)
	parsed, err := p.Parse()
	if err != nil {
		return nil, fault.Invalid("filter", "cannot be parsed; an example: state = RUNNING AND labels.env = \"prod\"").Because(err)
	}
	return compile(parsed.GetExpr(), fields)
}

func invalid(format string, args ...any) error { return fault.Invalid("filter", format, args...) }

func compile[T any](e *expr.Expr, fields map[string]Field[T]) (Match[T], error) {
	call := e.GetCallExpr()
	if call == nil {
		return nil, invalid("want comparisons such as name = \"web\"")
	}
	args := call.GetArgs()
	switch f := call.GetFunction(); f {
	case filtering.FunctionAnd, filtering.FunctionFuzzyAnd, filtering.FunctionOr, filtering.FunctionNot:
		parts := make([]Match[T], len(args))
		for i, a := range args {
			m, err := compile(a, fields)
			if err != nil {
				return nil, err
			}
			parts[i] = m
		}
		return join(f, parts), nil
	default:
		op, ok := operators[f]
		if !ok || len(args) != 2 {
			return nil, invalid("%s is not supported; use =, !=, <, <=, >, >=, : and AND, OR, NOT", f)
		}
		return compare(op, args[0], args[1], fields)
	}
}

func join[T any](f string, parts []Match[T]) Match[T] {
	switch f {
	case filtering.FunctionNot:
		return func(r T) bool { return !parts[0](r) }
	case filtering.FunctionOr:
		return func(r T) bool {
			return slices.ContainsFunc(parts, func(m Match[T]) bool { return m(r) })
		}
	}
	return func(r T) bool {
		return !slices.ContainsFunc(parts, func(m Match[T]) bool { return !m(r) })
	}
}

// operator is a comparison operator as it is written in a filter.
type operator string

const (
	equal    operator = "="
	notEqual operator = "!="
	has      operator = ":"
)

var operators = map[string]operator{
	filtering.FunctionEquals: equal, filtering.FunctionNotEquals: notEqual, filtering.FunctionHas: has,
	filtering.FunctionLessThan: "<", filtering.FunctionLessEquals: "<=",
	filtering.FunctionGreaterThan: ">", filtering.FunctionGreaterEquals: ">=",
}

// holds reports whether the operator holds for two values of which order is the comparison: negative, 0 or positive. It
// is not for the operator has.
func (op operator) holds(order int) bool {
	switch op {
	case equal:
		return order == 0
	case notEqual:
		return order != 0
	case "<":
		return order < 0
	case "<=":
		return order <= 0
	case ">":
		return order > 0
	}
	return order >= 0
}

// compare compiles one comparison of a field with a value.
func compare[T any](op operator, left, right *expr.Expr, fields map[string]Field[T]) (Match[T], error) {
	path, ok := fieldPath(left)
	if !ok {
		return nil, invalid("the left side of %s must be a field", op)
	}
	whole := strings.Join(path, ".")
	path, field, ok := longest(path, fields)
	switch {
	case !ok:
		return nil, invalid("unknown field %s; one of %s", whole, strings.Join(names(fields), ", "))
	case field.pairs == nil && len(path) > 1:
		return nil, invalid("unknown field %s: %s has no parts", whole, path[0])
	}
	value, ok := literal(right)
	if !ok {
		return nil, invalid("%s is compared with a word, a number or a string", whole)
	}
	return field.compare(path, op, value)
}

// longest finds the field whose name is the longest beginning of path, because names may have dots. It returns that name,
// followed by the rest of path.
func longest[T any](path []string, fields map[string]Field[T]) ([]string, Field[T], bool) {
	for n := len(path); n > 0; n-- {
		name := strings.Join(path[:n], ".")
		if field, ok := fields[name]; ok {
			return append([]string{name}, path[n:]...), field, true
		}
	}
	return path, Field[T]{}, false
}

// names returns the names of the fields as they are written in a filter.
func names[T any](fields map[string]Field[T]) (all []string) {
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if fields[name].pairs != nil {
			name += ".<key>"
		}
		all = append(all, name)
	}
	return all
}

// fieldPath splits the field expression a.b.c into a, b and c. It returns false for any other expression.
func fieldPath(e *expr.Expr) ([]string, bool) {
	if s := e.GetSelectExpr(); s != nil {
		below, ok := fieldPath(s.GetOperand())
		return append(below, s.GetField()), ok
	}
	if i := e.GetIdentExpr(); i != nil {
		return []string{i.GetName()}, true
	}
	return nil, false
}
