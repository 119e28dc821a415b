// Package openapi generates the OpenAPI 3.1 document of a REST API from its routes. The main function is Document.
//
// Decisions:
//   - A document is generated from the routes that the server has, and from the descriptors of the protos, so that it
//     cannot differ from them. Tests write it to docs/api; members serve those files.
//   - Descriptions are the comments of the protos and of the Go structs of bodies. They are not in compiled programs, so
//     Document gets them as options.
//   - Schemas allow unknown fields, because servers ignore them in requests, and clients must ignore them in responses.
//     With Options.Closed they do not, for tests that compare requests and responses with the document.
//
// The package must not know records or services.
package openapi

import (
	"net/http"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Options configures Document.
type Options struct {
	// Title and Description describe the API.
	Title, Description string
	// Port is the TCP port of the API.
	Port int
	// Comment returns the comment of an RPC, a message, a field or an enum, or "".
	Comment func(protoreflect.FullName) string
	// GoComment returns the comment of a field of a Go struct, or "". The name of the field is the import path of the
	// package, the type and the field, with dots between them. Optional.
	GoComment func(field string) string
	// Closed makes the schemas refuse unknown fields.
	Closed bool
}

type object = map[string]any

// generator holds the parts of a document while it is generated.
type generator struct {
	opts    Options
	schemas object
	// ids counts the routes with the same operation ID.
	ids map[string]int
}

// Document returns the OpenAPI document of an API with the given routes, as a value that is encoded as JSON.
func Document(routes []rest.Route, opts Options) any {
	g := &generator{opts: opts, schemas: object{}, ids: map[string]int{}}
	for _, r := range routes {
		g.ids[baseID(r)]++
	}
	paths := object{}
	for _, r := range routes {
		path := documentPath(r.Path)
		item, ok := paths[path].(object)
		if !ok {
			item = object{}
			paths[path] = item
		}
		item[strings.ToLower(r.Method)] = g.operation(r)
	}
	g.schemas["Meta"] = g.objectOf(object{
		"request_id": object{"type": "string", "format": "uuid", "description": "Identifies the request in the log and in the audit."},
		"timestamp":  object{"type": "string", "format": "date-time", "description": "When the response was made."},
	}, "request_id", "timestamp")
	g.schemas["Error"] = g.objectOf(object{
		"error": g.objectOf(object{
			"code":    object{"type": "string", "description": "One of the codes in docs/api.md."},
			"message": object{"type": "string", "description": "What is wrong, and what to do."},
			"details": object{"type": "object", "description": "May have reason and field, and further values."},
		}, "code", "message"),
		"meta": ref("Meta"),
	}, "error", "meta")
	return object{
		"openapi": "3.1.0",
		"info":    object{"title": opts.Title, "description": opts.Description, "version": "v1", "license": object{"name": "Apache-2.0", "identifier": "Apache-2.0"}},
		"servers": []any{object{"url": "http://127.0.0.1:" + strconv.Itoa(opts.Port)}},
		"paths":   paths,
		"components": object{
			"schemas": g.schemas, "parameters": headers(),
			"responses": object{"Error": object{
				"description": "The call failed.", "content": object{"application/json": object{"schema": ref("Error")}},
			}},
			"securitySchemes": object{"token": object{"type": "http", "scheme": "bearer"}},
		},
	}
}

// headers returns the headers that requests can have.
func headers() object {
	header := func(name, about string, schema object) object {
		return object{"name": name, "in": "header", "description": about, "schema": schema}
	}
	return object{
		"Strict":  header(rest.StrictHeader, "true: unknown fields and parameters are errors.", object{"type": "string", "enum": []any{"true", "false"}}),
		"Org":     header("Trivet-Org", "The org of the call, unless the request names one.", object{"type": "string"}),
		"Project": header("Trivet-Project", "The project of the call, unless the request names one.", object{"type": "string"}),
		"IdempotencyKey": header("Idempotency-Key", "Repeats of the call with the same key get the response of the first.",
			object{"type": "string", "maxLength": 255}),
	}
}

func ref(schema string) object { return object{"$ref": "#/components/schemas/" + schema} }

// documentPath returns the path of a route without the patterns of its variables.
func documentPath(path string) string { return strings.ReplaceAll(path, ":.*}", "}") }

// rpc returns the gRPC method that describes a route, or "".
func rpc(r rest.Route) auth.Method {
	if r.RPC != "" {
		return r.RPC
	}
	return r.As
}

// baseID returns the operation ID of a route, if no other route has the same one.
func baseID(r rest.Route) string {
	if m := string(rpc(r)); m != "" {
		return m[strings.LastIndexByte(m, '/')+1:]
	}
	return pathID(r)
}

// pathID returns an operation ID that is made of the method and the path.
func pathID(r rest.Route) string {
	words := strings.FieldsFunc(documentPath(r.Path), func(c rune) bool { return !('a' <= c && c <= 'z' || '0' <= c && c <= '9') })
	return strings.ToLower(r.Method) + "_" + strings.Join(words, "_")
}

func (g *generator) operation(r rest.Route) object {
	id := baseID(r)
	if g.ids[id] > 1 {
		id = pathID(r)
	}
	op := object{
		"operationId": id, "tags": []any{tag(r.Path)}, "parameters": g.parameters(r),
		"responses": object{strconv.Itoa(r.Status): g.success(r), "default": object{"$ref": "#/components/responses/Error"}},
	}
	text := r.Summary
	if text == "" {
		full := strings.Replace(strings.TrimPrefix(string(rpc(r)), "/"), "/", ".", 1)
		text = g.opts.Comment(protoreflect.FullName(full))
	}
	op["summary"] = firstSentence(text)
	op["description"] = text
	if m := rpc(r); m != "" {
		op["x-rpc"] = strings.TrimPrefix(string(m), "/")
	}
	op["security"] = []any{}
	if r.As != "" {
		op["security"] = []any{object{"token": []any{}}}
	}
	switch {
	case r.Binary != "":
		op["requestBody"] = object{"required": true, "content": object{r.Binary: object{"schema": object{}}}}
	case r.Body != nil:
		op["requestBody"] = object{"required": !r.OptionalBody, "content": object{"application/json": object{"schema": g.schema(r.Body, input)}}}
	}
	return op
}

// tag returns the first part of a path after its version, for the group of a route.
func tag(path string) string {
	path = strings.TrimPrefix(strings.TrimPrefix(path, "/api/v1"), "/")
	first, _, _ := strings.Cut(path, "/")
	return strings.TrimPrefix(first, ".")
}

// firstSentence returns the text up to its first full stop.
func firstSentence(text string) string {
	first, _, _ := strings.Cut(strings.ReplaceAll(text, "\n", " "), ". ")
	return strings.TrimSuffix(first, ".")
}

func (g *generator) parameters(r rest.Route) []any {
	out := []any{}
	for _, part := range strings.Split(documentPath(r.Path), "/") {
		if name, ok := strings.CutPrefix(part, "{"); ok {
			out = append(out, object{"name": strings.TrimSuffix(name, "}"), "in": "path", "required": true, "schema": object{"type": "string"}})
		}
	}
	for _, p := range r.Query {
		schema := object{"type": "string"}
		if p.Type != nil {
			schema = g.schema(p.Type, input)
		}
		one := object{"name": p.Name, "in": "query", "schema": schema}
		if about, ok := schema["description"].(string); ok {
			one["description"] = about
			delete(schema, "description")
		}
		if p.Doc != "" {
			one["description"] = p.Doc
		}
		out = append(out, one)
	}
	names := []string{"Strict"}
	if r.As != "" {
		names = append(names, "Org", "Project")
		if !r.As.Reads() {
			names = append(names, "IdempotencyKey")
		}
	}
	for _, name := range names {
		out = append(out, object{"$ref": "#/components/parameters/" + name})
	}
	return slices.Clip(out)
}

// success returns the response of a call that succeeds.
func (g *generator) success(r rest.Route) object {
	out := object{"description": http.StatusText(r.Status)}
	switch {
	case r.Status == http.StatusSwitchingProtocols:
	case r.Content == "text/event-stream":
		out["content"] = object{r.Content: object{"schema": object{"type": "string"}, "x-event-data": g.schema(r.Data, output)}}
	case r.Content != "" && r.Data != nil:
		out["content"] = object{r.Content: object{"schema": g.schema(r.Data, output)}}
	case r.Content != "":
		out["content"] = object{r.Content: object{"schema": object{}}}
	default:
		data := object{}
		if r.Data != nil {
			data = g.schema(r.Data, output)
		}
		out["content"] = object{"application/json": object{"schema": g.objectOf(object{"data": data, "meta": ref("Meta")}, "data", "meta")}}
	}
	return out
}

// objectOf returns the schema of an object with the given properties, of which some are required.
func (g *generator) objectOf(properties object, required ...string) object {
	out := object{"type": "object", "properties": properties}
	if len(required) > 0 {
		slices.Sort(required)
		out["required"] = required
	}
	if g.opts.Closed {
		out["additionalProperties"] = false
	}
	return out
}
