// Package protorest serves routes of a REST API by the RPCs of a gRPC service. The main function is Handle.
//
// A request is the RPC's request as JSON: the body of POST and PATCH, the query of GET and DELETE, and the variables of
// the path. The response is the RPC's response. The JSON differs from protobuf's own: names are those of the .proto
// files, enums are in lower case without prefix, 64-bit integers are numbers, bytes are in base64, and a message whose only field is a list
// or a map is that list or map.
//
// Decision: the RPC authorizes the call, because the tenant may be in the body. Handle only authenticates the caller
// before it reads the body. The package must not know records or services.
package protorest

import (
	"context"
	"net/http"
	"strings"

	"github.com/gorilla/mux"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Message is a request or response of an RPC: a pointer to the generated struct T.
type Message[T any] interface {
	*T
	proto.Message
}

// Route is one HTTP method and path that is served by an RPC.
type Route struct {
	// Method is the HTTP method. The parts of Path in braces are fields of the RPC's request.
	Method, Path string
	// RPC is the full name of the RPC. Its rule in the authorization table applies to the call.
	RPC auth.Method
	// Body is the name of a field of the RPC's request. The HTTP body has the fields of the message in this field, and
	// also org_id and project_id. If Body is empty, the HTTP body is the whole request.
	Body string
	// Creates is true if a success has the status 201 in place of 200.
	Creates bool
}

// Handle registers a route that is served by the function call, which implements route.RPC.
func Handle[I, O any, PI Message[I], PO Message[O]](r *rest.Server, route Route, call func(context.Context, PI) (PO, error)) {
	r.Handle(route.Method, route.Path, route.RPC, func(w *rest.Response, q *http.Request) (any, error) {
		in := PI(new(I))
		if err := route.read(q, in); err != nil {
			return nil, err
		}
		header := &headers{}
		out, err := call(grpc.NewContextWithServerTransportStream(q.Context(), header), in)
		if err != nil {
			return nil, err
		}
		if len(header.md.Get("idempotency-replayed")) > 0 {
			w.Header().Set("Idempotency-Replayed", "true")
		}
		if route.Method == http.MethodDelete && out.ProtoReflect().Descriptor().Fields().Len() == 0 {
			return map[string]any{"id": mux.Vars(q)[lastVariable(route.Path)], "deleted": true}, nil
		}
		if route.Creates {
			w.Status = http.StatusCreated
		}
		return Encode(out.ProtoReflect()), nil
	})
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

// lastVariable returns the name of the last variable of a path. In the path of a DELETE, this variable is the ID of the
// deleted resource.
func lastVariable(path string) string {
	return strings.TrimSuffix(path[strings.LastIndexByte(path, '{')+1:], "}")
}

// read fills the request of the RPC from the path, and from the body or the query of an HTTP request.
func (route *Route) read(q *http.Request, in proto.Message) error {
	// The caller is authenticated before the body is read. The RPC authorizes the caller afterwards, because the tenant
	// may be in the body.
	if _, err := auth.Admit(q.Context(), route.RPC, "", ""); err != nil && !auth.Undecided(err) {
		return err
	}
	m := in.ProtoReflect()
	// An action on a resource without a tenant, such as cordon, needs no body.
	if q.Method == http.MethodPost && q.ContentLength == 0 && len(mux.Vars(q)) > 0 && m.Descriptor().Fields().ByName("org_id") == nil {
		return readVariables(q, m)
	}
	if q.Method == http.MethodPost || q.Method == http.MethodPatch {
		var body map[string]any
		if _, err := rest.Decode(q, &body); err != nil {
			return err
		}
		if route.Body != "" {
			body = nest(body, route.Body)
		}
		if err := Decode(m, "", body); err != nil {
			return err
		}
		return readVariables(q, m)
	}
	return readParameters(q, m)
}

// readParameters sets those fields of a request that are parameters of the query or variables of the path.
func readParameters(q *http.Request, m protoreflect.Message) error {
	for key, values := range q.URL.Query() {
		if f := m.Descriptor().Fields().ByName(protoreflect.Name(key)); f != nil && len(values) > 0 {
			if err := decodeQuery(m, f, values[0]); err != nil {
				return err
			}
		}
	}
	return readVariables(q, m)
}

// readVariables sets the fields of a request that are variables of the path.
func readVariables(q *http.Request, m protoreflect.Message) error {
	for key, value := range mux.Vars(q) {
		m.Set(m.Descriptor().Fields().ByName(protoreflect.Name(key)), protoreflect.ValueOfString(value))
	}
	return nil
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

// headers collects the response headers that an RPC sets. It implements grpc.ServerTransportStream.
type headers struct{ md metadata.MD }

func (h *headers) Method() string { return "" }

func (h *headers) SetHeader(md metadata.MD) error {
	h.md = metadata.Join(h.md, md)
	return nil
}

func (h *headers) SendHeader(md metadata.MD) error { return h.SetHeader(md) }

func (h *headers) SetTrailer(metadata.MD) error { return nil }
