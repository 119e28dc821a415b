// Package protorest serves routes of a REST API by the RPCs of a gRPC service. The main function is Serve.
//
// A table of rows states, for each route, the RPC that serves it. The route has the RPC's authorization, audit, limits
// and fields, because Serve calls the same handler that the gRPC server calls.
//
// A request is the RPC's request as JSON: the body of POST, PUT and PATCH, the query of GET and DELETE, and the
// variables of the path. The response is the RPC's response. The JSON differs from protobuf's own: names are those of
// the .proto files, enums are in lower case without prefix, 64-bit integers are numbers, bytes are in base64, and a
// message whose only field is a list or a map is that list or map.
//
// Decision: the RPC authorizes the call, because the tenant may be in the body. Serve only authenticates the caller
// before it reads the body. The package must not know records or services.
package protorest

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Row is one HTTP method and path that is served by an RPC.
type Row struct {
	// Method is the HTTP method. The parts of Path in braces are fields of the RPC's request. If the request has no
	// field of that name, the part is the field "id".
	Method, Path string
	// RPC is the name of the RPC within its service.
	RPC string
	// Body is the name of a field of the RPC's request. The HTTP body has the fields of the message in this field, and
	// also org_id and project_id. If Body is empty, the HTTP body is the whole request.
	Body string
	// Ignored lists parameters of the query that the wire contract names and the RPC does not need.
	Ignored []string
	// Creates is true if a success has the status 201 in place of 200.
	Creates bool
	// Event is the name of the server-sent events that the response consists of, for an RPC with a stream of messages.
	Event string
	// Media is the media type of the response, for an RPC with a stream of messages whose only field is bytes. The
	// response consists of these bytes.
	Media string
	// Codes selects the column of the error table in package fault, if it is not that of the server.
	Codes *fault.Service
}

// method is an RPC of a gRPC service, and the implementation of the service.
type method struct {
	name   auth.Method
	desc   protoreflect.MethodDescriptor
	impl   any
	unary  *grpc.MethodDesc
	stream *grpc.StreamDesc
}

// Serve registers the routes of a table. The parameter desc describes the gRPC service, and impl implements it. Serve
// panics if a row names an RPC that the service does not have, or one that it cannot serve.
func Serve(r *rest.Server, desc *grpc.ServiceDesc, impl any, rows []Row) {
	for _, row := range rows {
		m := find(desc, row.RPC)
		m.impl = impl
		options := []rest.Option{m.describe(row)}
		switch {
		case m.unary != nil && auth.Open[m.name] != "":
			r.HandleOpen(row.Method, row.Path, auth.Open[m.name], m.handler(row), options...)
		case m.unary != nil:
			r.Handle(row.Method, row.Path, m.name, m.handler(row), options...)
		case row.Event != "":
			r.HandleEvents(row.Path, m.name, m.sendEvents(row), options...)
		case row.Media != "":
			r.HandleDownload(row.Path, m.name, row.Media, m.sendBytes(row), options...)
		default:
			panic(fmt.Sprintf("%s is a stream: the row for %s needs Event or Media", m.name, row.Path))
		}
	}
}

// Description returns the description of the route that Serve registers for a row, for a route with a handler of its
// own.
func Description(desc *grpc.ServiceDesc, row Row) rest.Option {
	return find(desc, row.RPC).describe(row)
}

func find(desc *grpc.ServiceDesc, name string) *method {
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(desc.ServiceName + "." + name))
	if err != nil {
		panic(err)
	}
	m := &method{name: auth.Method("/" + desc.ServiceName + "/" + name), desc: found.(protoreflect.MethodDescriptor)}
	for i := range desc.Methods {
		if desc.Methods[i].MethodName == name {
			m.unary = &desc.Methods[i]
		}
	}
	for i := range desc.Streams {
		if desc.Streams[i].StreamName == name {
			m.stream = &desc.Streams[i]
		}
	}
	return m
}

// handler returns the handler of a route that is served by an RPC with a single response.
func (m *method) handler(row Row) rest.Handler {
	return func(w *rest.Response, q *http.Request) (any, error) {
		if row.Codes != nil {
			w.Codes = *row.Codes
		}
		header := &headers{}
		answer, err := m.unary.Handler(m.impl, grpc.NewContextWithServerTransportStream(q.Context(), header), func(in any) error {
			return m.read(row, q, in.(proto.Message))
		}, nil)
		if err != nil {
			return nil, err
		}
		if len(header.md.Get("idempotency-replayed")) > 0 {
			w.Header().Set("Idempotency-Replayed", "true")
		}
		if row.deletes(m.desc) {
			id, err := variable(q, lastVariable(row.Path))
			return rest.Deleted{ID: id, Deleted: true}, err
		}
		if row.Creates {
			w.Status = http.StatusCreated
		}
		return Encode(answer.(proto.Message).ProtoReflect()), nil
	}
}

// deletes reports whether the response to the route is rest.Deleted: that of a DELETE with an RPC whose response is empty.
func (row *Row) deletes(m protoreflect.MethodDescriptor) bool {
	return row.Method == http.MethodDelete && m.Output().Fields().Len() == 0
}

// Read serves a GET request by an RPC, for routes whose handler also reads other parameters of the query. It ignores
// parameters that are not fields of the RPC's request.
func Read[I, O any, PI Message[I], PO Message[O]](q *http.Request, call func(context.Context, PI) (PO, error)) (any, error) {
	in := PI(new(I))
	if err := readParameters(q, in.ProtoReflect()); err != nil {
		return nil, err
	}
	out, err := call(q.Context(), in)
	if err != nil {
		return nil, err
	}
	return Encode(out.ProtoReflect()), nil
}

// Message is a request or response of an RPC: a pointer to the generated struct T.
type Message[T any] interface {
	*T
	proto.Message
}

// lastVariable returns the name of the last variable of a path. In the path of a DELETE, this variable is the ID of the
// deleted resource.
func lastVariable(path string) string {
	return strings.TrimSuffix(path[strings.LastIndexByte(path, '{')+1:], "}")
}

// read fills the request of the RPC from the path, and from the body or the query of an HTTP request.
func (m *method) read(row Row, q *http.Request, into proto.Message) error {
	in := into.ProtoReflect()
	if !row.takesBody() {
		return readParameters(q, in)
	}
	if err := authenticate(q.Context(), m.name); err != nil {
		return err
	}
	if q.ContentLength == 0 && row.optionalBody(m.desc.Input()) {
		return readVariables(q, in)
	}
	var body map[string]any
	if _, err := rest.Decode(q, &body); err != nil {
		return err
	}
	strict, err := rest.Strict(q)
	if err != nil {
		return err
	}
	if row.Body != "" {
		body = nest(body, row.Body)
	}
	if err := Decode(in, "", body, strict); err != nil {
		return err
	}
	return readVariables(q, in)
}

// authenticate refuses a caller before the body is read, where the outcome cannot depend on the body. The RPC
// authorizes the caller afterwards.
func authenticate(ctx context.Context, name auth.Method) error {
	if auth.Open[name] != "" {
		return nil
	}
	_, err := auth.Admit(ctx, name, "", "")
	if err == nil || auth.Undecided(err) {
		return nil
	}
	named := []auth.Scope{auth.OfNamedProject, auth.OfPlace, auth.OfProjectOrOrg}
	if c := auth.CallerOf(ctx); c != nil && c.Authenticated() && slices.Contains(named, auth.Rules()[name].Scope) {
		return nil
	}
	return err
}

func (row *Row) takesBody() bool {
	return row.Method == http.MethodPost || row.Method == http.MethodPut || row.Method == http.MethodPatch
}

// optionalBody reports whether the body may be absent: that of an action on a resource, such as cordon, without a tenant
// or without other fields than the tenant.
func (row *Row) optionalBody(in protoreflect.MessageDescriptor) bool {
	if !strings.Contains(row.Path, "{") || row.Method != http.MethodPost {
		return false
	}
	tenant, others := false, false
	for i := range in.Fields().Len() {
		switch f := in.Fields().Get(i); {
		case f.Name() == "org_id" || f.Name() == "project_id":
			tenant = true
		case !slices.Contains(row.variables(in), f):
			others = true
		}
	}
	return !tenant || !others
}

// variables returns the fields of the request that are variables of the path.
func (row *Row) variables(in protoreflect.MessageDescriptor) (out []protoreflect.FieldDescriptor) {
	for _, part := range strings.Split(row.Path, "/") {
		if name, ok := strings.CutPrefix(part, "{"); ok {
			out = append(out, variableField(in, strings.TrimSuffix(name, "}")))
		}
	}
	return out
}

// variableField returns the field of a request for a variable of the path.
func variableField(in protoreflect.MessageDescriptor, name string) protoreflect.FieldDescriptor {
	if f := in.Fields().ByName(protoreflect.Name(name)); f != nil {
		return f
	}
	return in.Fields().ByName("id")
}

// nest returns a body in which all fields except org_id and project_id are moved into the field with the given name.
func nest(body map[string]any, field string) map[string]any {
	out, inner := map[string]any{}, map[string]any{}
	for key, value := range body {
		if key == "org_id" || key == "project_id" {
			out[key] = value
		} else {
			inner[key] = value
		}
	}
	out[field] = inner
	return out
}
