package vm

import (
	"strings"

	"go.einride.tech/aip/filtering"
	expr "google.golang.org/genproto/googleapis/api/expr/v1alpha1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// matcher reports whether a VM matches a filter.
type matcher func(*cloud.VM) bool

// parseFilter compiles an AIP-160 filter. The fields name, id, state, node_id, org_id, project_id and labels.<key> can
// be compared by = and !=, labels also by : (exists). Comparisons can be combined by AND, OR, NOT and parentheses. A
// label key that is not a plain word must be quoted: labels."a/b". An empty filter accepts every VM.
func parseFilter(text string) (matcher, error) {
	if len(text) > cloud.MaxFilter {
		return nil, fault.Invalid("filter", "at most %d bytes, got %d", cloud.MaxFilter, len(text))
	}
	if strings.TrimSpace(text) == "" {
		return func(*cloud.VM) bool { return true }, nil
	}
	if strings.Count(text, "(") > 64 {
		return nil, fault.Invalid("filter", "at most 64 parentheses")
	}
	var p filtering.Parser
	p.Init(text)
	parsed, err := p.Parse()
	if err != nil {
		return nil, fault.Invalid("filter", "cannot be parsed; an example: state = RUNNING AND labels.env = \"prod\"").Because(err)
	}
	return compile(parsed.GetExpr())
}

func compile(e *expr.Expr) (matcher, error) {
	call := e.GetCallExpr()
	if call == nil {
		return nil, fault.Invalid("filter", "want comparisons such as name = \"web\"")
	}
	args := call.GetArgs()
	switch f := call.GetFunction(); f {
	case filtering.FunctionAnd, filtering.FunctionFuzzyAnd, filtering.FunctionOr, filtering.FunctionNot:
		parts := make([]matcher, len(args))
		for i, a := range args {
			m, err := compile(a)
			if err != nil {
				return nil, err
			}
			parts[i] = m
		}
		return join(f, parts), nil
	case filtering.FunctionEquals, filtering.FunctionNotEquals, filtering.FunctionHas:
		if len(args) != 2 {
			return nil, fault.Invalid("filter", "%s needs two operands", f)
		}
		return compare(f, args[0], args[1])
	default:
		return nil, fault.Invalid("filter", "%s is not supported; use =, !=, : and AND, OR, NOT", f)
	}
}

func join(f string, parts []matcher) matcher {
	switch f {
	case filtering.FunctionNot:
		return func(vm *cloud.VM) bool { return !parts[0](vm) }
	case filtering.FunctionOr:
		return func(vm *cloud.VM) bool {
			for _, m := range parts {
				if m(vm) {
					return true
				}
			}
			return false
		}
	}
	return func(vm *cloud.VM) bool {
		for _, m := range parts {
			if !m(vm) {
				return false
			}
		}
		return true
	}
}

// compare compiles one comparison of a filter. f is the operator, left the field and right the value.
func compare(f string, left, right *expr.Expr) (matcher, error) {
	path, ok := fieldPath(left)
	if !ok {
		return nil, fault.Invalid("filter", "the left side of %s must be a field", f)
	}
	if path[0] == "labels" {
		return compareLabel(f, path[1:], right)
	}
	value, ok := literal(right)
	if !ok || f == filtering.FunctionHas || len(path) != 1 {
		return nil, fault.Invalid("filter", "%s is compared by = or != with a word or a string", strings.Join(path, "."))
	}
	var field func(*cloud.VM) string
	switch path[0] {
	case "name":
		field = func(vm *cloud.VM) string { return vm.Name }
	case "id":
		field = func(vm *cloud.VM) string { return string(vm.ID) }
	case "org_id":
		field = func(vm *cloud.VM) string { return string(vm.Org) }
	case "project_id":
		field = func(vm *cloud.VM) string { return string(vm.Project) }
	case "node_id":
		field = func(vm *cloud.VM) string { return string(vm.Node) }
	case "state":
		value = strings.TrimPrefix(strings.ToUpper(value), "VM_STATE_")
		if !isState(value) {
			return nil, fault.Invalid("filter", "there is no state %s", value)
		}
		field = func(vm *cloud.VM) string { return vm.State.String() }
	default:
		return nil, fault.Invalid("filter", "unknown field %s; one of name, id, state, node_id, org_id, project_id, labels.<key>", path[0])
	}
	want := f == filtering.FunctionEquals
	return func(vm *cloud.VM) bool { return (field(vm) == value) == want }, nil
}

func compareLabel(f string, key []string, right *expr.Expr) (matcher, error) {
	value, ok := literal(right)
	if !ok {
		return nil, fault.Invalid("filter", "a label is compared with a word or a string")
	}
	if f == filtering.FunctionHas {
		switch {
		case len(key) == 0: // labels:env
			return func(vm *cloud.VM) bool { _, has := vm.Labels[value]; return has }, nil
		case value == "*": // labels.env:*
			return func(vm *cloud.VM) bool { _, has := vm.Labels[strings.Join(key, ".")]; return has }, nil
		}
		f = filtering.FunctionEquals
	}
	if len(key) == 0 {
		return nil, fault.Invalid("filter", "name the label: labels.<key>")
	}
	name, want := strings.Join(key, "."), f == filtering.FunctionEquals
	return func(vm *cloud.VM) bool { return (vm.Labels[name] == value) == want }, nil
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

// literal returns the text of a string or of an unquoted word. It returns false for any other expression.
func literal(e *expr.Expr) (string, bool) {
	if c := e.GetConstExpr(); c != nil {
		if s, ok := c.GetConstantKind().(*expr.Constant_StringValue); ok {
			return s.StringValue, true
		}
		return "", false
	}
	path, ok := fieldPath(e)
	return strings.Join(path, "."), ok
}

func isState(name string) bool {
	for s := cloud.Unspecified; s <= cloud.Deleted; s++ {
		if s.String() == name {
			return true
		}
	}
	return false
}
