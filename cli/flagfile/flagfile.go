// Package flagfile reads YAML files whose keys are the flags of a command, for `trivet vm create -f vm.yaml` and
// `trivet apply -f cloud.yaml`. [File.Apply] reads a file with one document. [Documents] and [File.Set] read a file
// with several documents, each of which can be for another command.
//
// The file is strict: an unknown key, a key that is given twice and a value of the wrong kind are errors that name the
// line. A flag on the command line overrides the value in the file; for a repeatable flag, it overrides the whole list.
// Decisions:
//
//   - A key sets the flag of this name. So a new flag needs no code here, and the file and the command line accept the
//     same values.
//   - The value of a flag with a special syntax, such as --disk 20,cache=none, can be a mapping in the file. [Shape]
//     says how the mapping is converted to text.
package flagfile

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// MaxBytes is the maximum size of a file, in bytes.
const MaxBytes = 1 << 20

// Shape describes how a mapping in the file is converted to the value of a flag: a first word, and then ,KEY=VALUE for
// each further key.
type Shape struct {
	// First maps the keys that give the first word to the prefix of the first word, such as port to "port:" for
	// --network port:NAME. A mapping must have exactly one of these keys.
	First map[string]string
	// Keys lists the other keys. The value of a repeatable key may be a list.
	Keys []string
	// Words lists those of Keys that take no value on the command line. In the file, their value is true or false.
	Words []string
}

// File describes the file of a command.
type File struct {
	// Argument is the key for the command's argument, such as name.
	Argument string
	// Shapes holds, by flag, the mappings that are allowed as values.
	Shapes map[string]Shape
	// Aliases holds other names of keys, such as disks for the flag disk.
	Aliases map[string]string
	// Pairs lists the flags with values of the form KEY=VALUE. In the file, they are one mapping.
	Pairs []string
}

// Document is a document of a file: a mapping of keys to values.
type Document struct{ mapping *yaml.Node }

// Apply reads a file with at most one document from r, and sets the flags of c as Set does. It returns "" for an empty
// file.
func (f *File) Apply(c *cobra.Command, r io.Reader) (argument string, err error) {
	mapping, err := readMapping(r)
	if err != nil || mapping == nil {
		return "", err
	}
	return f.Set(c, &Document{mapping})
}

// Set sets the flags of c that the document gives and the command line has not set. It returns the value of the key
// f.Argument, or "". The errors describe the problem and its line.
func (f *File) Set(c *cobra.Command, d *Document) (argument string, err error) {
	mapping := d.mapping
	seen := map[string]bool{}
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		name := key.Value
		if alias, ok := f.Aliases[name]; ok {
			name = alias
		}
		if seen[name] {
			return "", fail(key, "%s is given twice", key.Value)
		}
		seen[name] = true
		if name == f.Argument {
			if argument, err = scalar(value); err != nil {
				return "", err
			}
			continue
		}
		flag := c.LocalNonPersistentFlags().Lookup(name)
		if flag == nil || flag.Name == "help" || flag.Shorthand == "f" {
			return "", fail(key, "%s is not a known key: the keys are the flags of the command", key.Value)
		}
		texts, err := f.values(flag, value)
		if err != nil {
			return "", err
		}
		if flag.Changed {
			continue
		}
		// A flag becomes Changed by the first Set, and a list must have all values of the file.
		for _, text := range texts {
			if err := c.Flags().Set(name, text); err != nil {
				return "", fail(value, "%s: %q is not a valid value of the flag --%s", key.Value, text, name)
			}
		}
	}
	return argument, nil
}

// Documents returns the documents of a file, without empty ones. The lines in later errors are those of the file.
func Documents(r io.Reader) ([]*Document, error) {
	d, err := newDecoder(r)
	if err != nil {
		return nil, err
	}
	var all []*Document
	for {
		var node yaml.Node
		if err := d.Decode(&node); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		top := node.Content[0]
		switch {
		case top.Kind == yaml.ScalarNode && top.Tag == "!!null":
		case top.Kind != yaml.MappingNode:
			return nil, fail(top, "want a mapping of keys and values")
		default:
			all = append(all, &Document{top})
		}
	}
}

// Line returns the line of the file with the first key.
func (d *Document) Line() int { return d.mapping.Line }

// Take removes a key from the document, and returns its value and its line. It returns "" if the document does not have
// the key.
func (d *Document) Take(key string) (value string, line int, err error) {
	for i := 0; i+1 < len(d.mapping.Content); i += 2 {
		if n := d.mapping.Content[i]; n.Value == key {
			value, err = scalar(d.mapping.Content[i+1])
			d.mapping.Content = slices.Delete(d.mapping.Content, i, i+2)
			return value, n.Line, err
		}
	}
	return "", 0, nil
}

// newDecoder reads a file of at most MaxBytes.
func newDecoder(r io.Reader) (*yaml.Decoder, error) {
	text, err := io.ReadAll(io.LimitReader(r, MaxBytes+1))
	if err != nil {
		return nil, err
	}
	if len(text) > MaxBytes {
		return nil, fmt.Errorf("the file is larger than %d bytes", MaxBytes)
	}
	return yaml.NewDecoder(strings.NewReader(string(text))), nil
}

// readMapping returns the only document of a file, which must be a mapping, or nil for an empty file.
func readMapping(r io.Reader) (*yaml.Node, error) {
	d, err := newDecoder(r)
	if err != nil {
		return nil, err
	}
	var document, second yaml.Node
	if err := d.Decode(&document); errors.Is(err, io.EOF) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if err := d.Decode(&second); !errors.Is(err, io.EOF) {
		return nil, errors.New("the file has more than one document")
	}
	top := document.Content[0]
	if top.Kind != yaml.MappingNode {
		return nil, fail(top, "want a mapping of keys and values")
	}
	return top, nil
}

func fail(n *yaml.Node, format string, args ...any) error {
	return fmt.Errorf("line %d: %s", n.Line, fmt.Sprintf(format, args...))
}

// scalar returns the text of a node that is a single value, and an error for other nodes and for null.
func scalar(n *yaml.Node) (string, error) {
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		return "", fail(n, "want one value")
	}
	return n.Value, nil
}

// values returns the values of a flag in the syntax of the command line.
func (f *File) values(flag *pflag.Flag, n *yaml.Node) ([]string, error) {
	_, repeatable := flag.Value.(pflag.SliceValue)
	switch {
	case slices.Contains(f.Pairs, flag.Name):
		return pairs(n)
	case !repeatable:
		text, err := scalar(n)
		return []string{text}, err
	case n.Kind != yaml.SequenceNode:
		text, err := f.value(flag.Name, n)
		return []string{text}, err
	}
	var out []string
	for _, item := range n.Content {
		text, err := f.value(flag.Name, item)
		if err != nil {
			return nil, err
		}
		out = append(out, text)
	}
	return out, nil
}

// pairs returns the entries of a mapping as KEY=VALUE.
func pairs(n *yaml.Node) (out []string, err error) {
	if n.Kind != yaml.MappingNode {
		return nil, fail(n, "want a mapping of keys and values")
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		value, err := scalar(n.Content[i+1])
		if err != nil {
			return nil, err
		}
		out = append(out, n.Content[i].Value+"="+value)
	}
	return out, nil
}

// value returns one value of a repeatable flag: text, or a mapping of the flag's Shape.
func (f *File) value(flag string, n *yaml.Node) (string, error) {
	shape, shaped := f.Shapes[flag]
	if n.Kind != yaml.MappingNode || !shaped {
		return scalar(n)
	}
	first, rest := "", ""
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if seen[key.Value] {
			return "", fail(key, "%s is given twice", key.Value)
		}
		seen[key.Value] = true
		prefix, isFirst := shape.First[key.Value]
		switch {
		case isFirst:
			text, err := option(value)
			if err != nil {
				return "", err
			}
			if first != "" {
				return "", fail(key, "only one of %s", strings.Join(firstKeys(shape), ", "))
			}
			first = prefix + text
		case slices.Contains(shape.Words, key.Value):
			switch value.Value {
			case "true":
				rest += "," + key.Value
			case "false":
			default:
				return "", fail(value, "%s: want true or false", key.Value)
			}
		case slices.Contains(shape.Keys, key.Value):
			items := []*yaml.Node{value}
			if value.Kind == yaml.SequenceNode {
				items = value.Content
			}
			for _, item := range items {
				text, err := option(item)
				if err != nil {
					return "", err
				}
				rest += "," + key.Value + "=" + text
			}
		default:
			return "", fail(key, "%s is not a known key: want %s", key.Value, strings.Join(slices.Concat(firstKeys(shape), shape.Keys, shape.Words), ", "))
		}
	}
	if first == "" {
		return "", fail(n, "%s is missing", strings.Join(firstKeys(shape), " or "))
	}
	return first + rest, nil
}

func firstKeys(s Shape) []string {
	var keys []string
	for k := range s.First {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// option returns the text of a single value for a part of a flag's value. The text must not be empty or have a comma.
func option(n *yaml.Node) (string, error) {
	text, err := scalar(n)
	if err == nil && (text == "" || strings.Contains(text, ",")) {
		return "", fail(n, "%q is empty or has a comma", text)
	}
	return text, err
}
