package session

import (
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/show"
)

// Print prints the result of a command in the format of --output: the document of m (see show.Document), or the names
// one per line, or the text that the function table writes. Commands that print objects of a list call [list.Kind]
// instead.
func (s *Session) Print(m proto.Message, names []string, table func(io.Writer) error) error {
	return s.PrintValue(m, names, table)
}

// PrintValue is like Print, for a message or any other value that encoding/json can encode.
func (s *Session) PrintValue(v any, names []string, table func(io.Writer) error) error {
	return s.print(v, names, table, s.format.Print)
}

// PrintItem is like PrintValue, for one of the values that a command prints as they come: JSON is on one line.
func (s *Session) PrintItem(v any, names []string, table func(io.Writer) error) error {
	if s.Form == show.CSV {
		return Usagef("-o csv is not possible for a stream")
	}
	return s.print(v, names, table, s.format.PrintItem)
}

func (s *Session) print(v any, names []string, table func(io.Writer) error, document func(io.Writer, any) error) error {
	switch {
	case s.Form.ForPeople():
		return table(s.Stdout)
	case s.Form == show.Name:
		for _, n := range names {
			if _, err := fmt.Fprintln(s.Stdout, show.Text(n)); err != nil {
				return err
			}
		}
		return nil
	}
	doc, err := show.Item(v)
	if err != nil {
		return err
	}
	if s.collected != nil {
		*s.collected = append(*s.collected, doc)
		return nil
	}
	return document(s.Stdout, doc)
}

// Done prints the success of a command that returns no object, such as a delete. Depending on --output, it prints "NAME
// WHAT", only the name, or an empty object.
func (s *Session) Done(name, what string) error {
	return s.PrintValue(show.Object{}, []string{name}, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, show.Text(name+" "+what))
		return err
	})
}
