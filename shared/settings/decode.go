package settings

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

// decodeDocument stores the settings of a YAML document in a struct, to which into is a pointer. It returns all errors
// that it found.
func decodeDocument(document *yaml.Node, into any) []error {
	var d decoder
	for _, n := range document.Content {
		d.value("", n, reflect.ValueOf(into).Elem())
	}
	return d.errs
}

// decoder decodes a YAML document. It collects all errors instead of ending at the first one.
type decoder struct{ errs []error }

func (d *decoder) fail(n *yaml.Node, path, format string, args ...any) {
	if path != "" {
		format, args = "%s: "+format, append([]any{path}, args...)
	}
	d.errs = append(d.errs, fmt.Errorf("line %d: "+format, append([]any{n.Line}, args...)...))
}

// value stores the YAML node n in v. The parameter path is the path of n in the document, and is used in errors.
func (d *decoder) value(path string, n *yaml.Node, v reflect.Value) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	structs := v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Struct
	switch {
	case v.Kind() == reflect.Struct && n.Kind == yaml.MappingNode:
		d.mapping(path, n, v)
	case v.Kind() == reflect.Struct && n.ShortTag() == "!!null":
		// A key without a value leaves the struct unchanged.
	case v.Kind() == reflect.Struct:
		d.fail(n, path, "want keys with values")
	case structs && n.Kind != yaml.SequenceNode && n.ShortTag() != "!!null":
		d.fail(n, path, "want a list")
	case structs && n.Kind == yaml.SequenceNode:
		list := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
		for i, entry := range n.Content {
			d.value(fmt.Sprintf("%s[%d]", path, i), entry, list.Index(i))
		}
		v.Set(list)
	default:
		d.scalar(path, n, v)
	}
}

// mapping stores the values of the YAML mapping n in the fields of the struct v.
func (d *decoder) mapping(path string, n *yaml.Node, v reflect.Value) {
	fields := map[string]reflect.Value{}
	addFields(fields, v)
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name := n.Content[i]
		key := strings.TrimPrefix(path+"."+name.Value, ".")
		field, known := fields[name.Value]
		switch {
		case !known:
			d.fail(name, key, "unknown key")
		case seen[name.Value]:
			d.fail(name, key, "occurs twice")
		default:
			d.value(key, n.Content[i+1], field)
		}
		seen[name.Value] = true
	}
}

// addFields adds the fields of the struct v to the map fields. The keys are the names in the fields' yaml tags. A field
// without a name in its tag is not a setting and is skipped.
func addFields(fields map[string]reflect.Value, v reflect.Value) {
	for i := range v.NumField() {
		name, options, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ",")
		switch {
		case options == "inline":
			addFields(fields, v.Field(i))
		case name != "" && name != "-":
			fields[name] = v.Field(i)
		}
	}
}

// linePrefix matches the line number with which errors of package yaml begin.
var linePrefix = regexp.MustCompile(`^(yaml: )?line \d+: `)

func (d *decoder) scalar(path string, n *yaml.Node, v reflect.Value) {
	err := n.Decode(v.Addr().Interface())
	var several *yaml.TypeError
	switch {
	case errors.As(err, &several):
		for _, text := range several.Errors {
			d.fail(n, path, "%s", linePrefix.ReplaceAllString(text, ""))
		}
	case err != nil:
		d.fail(n, path, "%s", linePrefix.ReplaceAllString(err.Error(), ""))
	}
}
