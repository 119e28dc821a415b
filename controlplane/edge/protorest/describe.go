package protorest

import (
	"net/http"
	"slices"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Input describes a JSON body: the fields of the message, except those in Omit, which are variables of the path. If
// Nested is not nil, the body has the fields of the message in the field Nested, and also org_id and project_id.
type Input struct {
	Message protoreflect.MessageDescriptor
	Omit    []protoreflect.FieldDescriptor
	Nested  protoreflect.FieldDescriptor
}

// Output describes a JSON response: the message as Encode encodes it.
type Output struct {
	Message protoreflect.MessageDescriptor
}

// describe returns the description of the route for a row.
func (m *method) describe(row Row) rest.Option {
	in, out := m.desc.Input(), m.desc.Output()
	r := rest.Route{RPC: m.name, Status: http.StatusOK, Data: Output{out}}
	variables := row.variables(in)
	switch {
	case row.takesBody():
		body := Input{Message: in, Omit: variables}
		if row.Body != "" {
			body.Nested = in.Fields().ByName(protoreflect.Name(row.Body))
		}
		r.Body, r.OptionalBody = body, row.optionalBody(in)
	default:
		for i := range in.Fields().Len() {
			if f := in.Fields().Get(i); inQuery(f) && !slices.Contains(variables, f) {
				r.Query = append(r.Query, rest.Parameter{Name: string(f.Name()), Type: f})
			}
		}
		for _, name := range row.Ignored {
			r.Query = append(r.Query, rest.Parameter{Name: name, Doc: "Ignored."})
		}
	}
	switch {
	case row.deletes(m.desc):
		r.Data = rest.Deleted{}
	case row.Creates:
		r.Status = http.StatusCreated
	case row.Event != "":
		r.Content = "text/event-stream"
	}
	return rest.Described(r)
}
