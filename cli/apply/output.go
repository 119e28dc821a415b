package apply

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// output prints the results.
type output struct {
	s     *session.Session
	run   *Run
	items []any
	names []string
}

// done adds the result of an object, and prints a line about it for people at once.
func (o *output) done(x *object, plan *Plan) error {
	result, text := "unchanged", ""
	switch {
	case plan.Create:
		result = "created"
	case len(plan.Changes) > 0:
		result, text = "changed", " ("+strings.Join(plan.Changes, ", ")+")"
	}
	o.add(x, result, plan.Changes)
	if !o.s.Form.ForPeople() {
		return nil
	}
	if o.run.Dry {
		text += " (dry run)"
	}
	_, err := fmt.Fprintln(o.s.Stdout, show.Text(x.String()+" "+result+text))
	return err
}

// add adds an object to the document of the results.
func (o *output) add(x *object, result string, changes []string) {
	texts := make([]any, len(changes))
	for i, text := range changes {
		texts[i] = text
	}
	o.names = append(o.names, x.String())
	o.items = append(o.items, show.Object{
		{Key: "kind", Value: x.kind}, {Key: "name", Value: x.name}, {Key: "result", Value: result},
		{Key: "changes", Value: texts}, {Key: "dry_run", Value: o.run.Dry},
	})
}

// addOthers adds those of the objects that have no result, because the deadline of the command passed or the user
// interrupted it.
func (o *output) addOthers(objects []*object) {
	for _, x := range objects {
		if !slices.Contains(o.names, x.String()) {
			o.add(x, "not attempted", nil)
		}
	}
}

// end prints the document, for the formats that have one.
func (o *output) end() error {
	return o.s.PrintValue(show.Documents(o.items, ""), o.names, func(io.Writer) error { return nil })
}
