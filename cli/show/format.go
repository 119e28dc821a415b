package show

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/template"

	"go.yaml.in/yaml/v3"
	"k8s.io/client-go/util/jsonpath"
)

// Form is the kind of an output format.
type Form string

const (
	Table    Form = "table"
	Wide     Form = "wide"
	JSON     Form = "json"
	YAML     Form = "yaml"
	CSV      Form = "csv"
	Name     Form = "name"
	JSONPath Form = "jsonpath"
	Template Form = "template"
)

// Forms returns the values of the flag --output, for the help and for shell completion.
func Forms() []string {
	return []string{"table", "wide", "json", "yaml", "csv", "name", "jsonpath=", "template="}
}

// ForPeople reports whether the output is text for people: a table, or lines of names and values.
func (f Form) ForPeople() bool { return f == Table || f == Wide }

// Format is an output format with its expression.
type Format struct {
	Form Form
	expr string
}

// ParseFormat parses a value of --output. It returns an error for an unknown format or a syntax error in an expression.
func ParseFormat(text string) (Format, error) {
	name, expr, has := strings.Cut(text, "=")
	f := Format{Form: Form(name), expr: expr}
	switch f.Form {
	case Table, Wide, JSON, YAML, CSV, Name:
		if !has {
			return f, nil
		}
		return f, fmt.Errorf("%s has no expression", name)
	case JSONPath:
		if expr == "" {
			return f, fmt.Errorf("want jsonpath=EXPRESSION, such as jsonpath='{.items[*].name}'")
		}
		if !strings.Contains(expr, "{") {
			f.expr = "{." + strings.TrimPrefix(expr, ".") + "}"
		}
		return f, jsonpath.New("output").Parse(f.expr)
	case Template:
		if expr == "" {
			return f, fmt.Errorf("want template=TEXT, such as template='{{range .items}}{{.name}} {{end}}'")
		}
		_, err := parseTemplate(expr)
		return f, err
	}
	return f, fmt.Errorf("want one of %s", strings.Join(Forms(), ", "))
}

// parseTemplate parses a template. A key that does not exist is an error when it is executed.
func parseTemplate(text string) (*template.Template, error) {
	return template.New("output").Option("missingkey=error").Parse(text)
}

// Print prints a document: indented JSON, YAML, CSV, or the text that an expression selects. The CSV of a document has a
// line KEY,VALUE for each scalar. Text for people and names are printed by other functions.
func (f Format) Print(w io.Writer, doc any) error {
	switch f.Form {
	case JSON:
		text, err := Compact(doc)
		if err != nil {
			return err
		}
		var b bytes.Buffer
		if err := json.Indent(&b, text, "", "  "); err != nil {
			return fmt.Errorf("print JSON: %w", err)
		}
		b.WriteByte('\n')
		_, err = w.Write(b.Bytes())
		return err
	case YAML:
		return printYAML(w, doc)
	case CSV:
		return PrintCSV(w, flatten([][]string{{"key", "value"}}, "", doc))
	}
	var b strings.Builder
	if err := f.evaluate(&b, plain(doc)); err != nil {
		return err
	}
	if text := b.String(); text != "" && !strings.HasSuffix(text, "\n") {
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// PrintItem prints one document of a stream. JSON is on one line, and YAML begins with "---".
func (f Format) PrintItem(w io.Writer, doc any) error {
	switch f.Form {
	case JSON:
		text, err := Compact(doc)
		if err != nil {
			return err
		}
		_, err = w.Write(append(text, '\n'))
		return err
	case YAML:
		if _, err := io.WriteString(w, "---\n"); err != nil {
			return err
		}
	}
	return f.Print(w, doc)
}

// evaluate executes the expression of the format.
func (f Format) evaluate(w io.Writer, data any) error {
	if f.Form == Template {
		t, err := parseTemplate(f.expr)
		if err != nil {
			return err
		}
		if err := t.Execute(w, data); err != nil {
			return fmt.Errorf("--output: %w", err)
		}
		return nil
	}
	// As in kubectl, a key that does not exist selects nothing. Parse again, because an evaluation changes the parsed
	// expression.
	path := jsonpath.New("output").AllowMissingKeys(true)
	if err := path.Parse(f.expr); err != nil {
		return err
	}
	if err := path.Execute(w, data); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	return nil
}

// Compact returns a document as JSON without white space.
func Compact(doc any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(doc); err != nil {
		return nil, fmt.Errorf("print JSON: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// MarshalJSON returns the object with its keys in their order.
func (o Object) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, m := range o {
		if i > 0 {
			b = append(b, ',')
		}
		for j, part := range []any{m.Key, m.Value} {
			text, err := Compact(part)
			if err != nil {
				return nil, err
			}
			if b = append(b, text...); j == 0 {
				b = append(b, ':')
			}
		}
	}
	return append(b, '}'), nil
}

// plain returns a document with maps instead of objects, for expressions. Integers are int64 where they fit, because
// jsonpath compares only numbers of the same kind.
func plain(doc any) any {
	switch v := doc.(type) {
	case Object:
		out := make(map[string]any, len(v))
		for _, m := range v {
			out[m.Key] = plain(m.Value)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			out[i] = plain(e)
		}
		return out
	case uint64:
		if v <= math.MaxInt64 {
			return int64(v)
		}
	}
	return doc
}

func printYAML(w io.Writer, doc any) error {
	node, err := yamlNode(doc)
	if err != nil {
		return err
	}
	e := yaml.NewEncoder(w)
	e.SetIndent(2)
	if err := e.Encode(node); err != nil {
		return fmt.Errorf("print YAML: %w", err)
	}
	return e.Close()
}

func yamlNode(doc any) (*yaml.Node, error) {
	node := &yaml.Node{}
	switch v := doc.(type) {
	case Object:
		node.Kind = yaml.MappingNode
		for _, m := range v {
			for _, part := range []any{m.Key, m.Value} {
				n, err := yamlNode(part)
				if err != nil {
					return nil, err
				}
				node.Content = append(node.Content, n)
			}
		}
		if len(v) == 0 {
			node.Style = yaml.FlowStyle
		}
	case []any:
		node.Kind = yaml.SequenceNode
		for _, e := range v {
			n, err := yamlNode(e)
			if err != nil {
				return nil, err
			}
			node.Content = append(node.Content, n)
		}
		if len(v) == 0 {
			node.Style = yaml.FlowStyle
		}
	default:
		if err := node.Encode(doc); err != nil {
			return nil, fmt.Errorf("print YAML: %w", err)
		}
	}
	return node, nil
}

// PrintCSV prints rows in the form of RFC 4180, with unprintable characters escaped as Text does.
func PrintCSV(w io.Writer, rows [][]string) error {
	out := csv.NewWriter(w)
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, c := range row {
			cells[i] = Text(c)
		}
		if err := out.Write(cells); err != nil {
			return fmt.Errorf("print CSV: %w", err)
		}
	}
	out.Flush()
	return out.Error()
}

// flatten appends a row with the path and the text of each scalar in a document. A path is like spec.disks[0].size_gib.
func flatten(rows [][]string, path string, doc any) [][]string {
	switch v := doc.(type) {
	case Object:
		for _, m := range v {
			at := m.Key
			if path != "" {
				at = path + "." + m.Key
			}
			rows = flatten(rows, at, m.Value)
		}
		return rows
	case []any:
		for i, e := range v {
			rows = flatten(rows, path+"["+strconv.Itoa(i)+"]", e)
		}
		return rows
	case nil:
		return append(rows, []string{path, ""})
	}
	return append(rows, []string{path, fmt.Sprint(doc)})
}
