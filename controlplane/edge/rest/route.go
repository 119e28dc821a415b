package rest

import (
	"net/http"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
)

// Route is one HTTP method and path that a server handles, with a description of its requests and responses. Strict
// requests are checked against the description, and the OpenAPI document of the server is generated from it.
type Route struct {
	Method, Path string
	// As is the gRPC method whose rule authorizes the calls of this route. If As is empty, Open is the reason why the
	// route needs no authorization.
	As   auth.Method
	Open string

	// RPC is the gRPC method that serves the route, whose comment describes it. It is empty if that is As, or if there is
	// none.
	RPC auth.Method
	// Summary says what the route does. It is empty if the comment of RPC says it.
	Summary string
	// Query lists the parameters that the query may have.
	Query []Parameter
	// Body describes the JSON body of requests: a value of the Go type that the handler decodes, or whatever the
	// generator of the OpenAPI document accepts as a schema. It is nil if requests have no body.
	Body any
	// OptionalBody is true if the body may be absent.
	OptionalBody bool
	// Binary is the media type of a body that is not JSON, or empty.
	Binary string
	// Status is the HTTP status of a success, and Data describes its data like Body.
	Status int
	Data   any
	// Content is the media type of a success. It is empty for the JSON envelope.
	Content string
}

// Deleted is the data of the response to a DELETE: the ID of the deleted resource, and true.
type Deleted struct {
	// The ID of the deleted resource.
	ID string `json:"id"`
	// Always true.
	Deleted bool `json:"deleted"`
}

// Parameter is a parameter of the query, or a variable of the path.
type Parameter struct {
	Name string
	// Type describes the values like Route.Body; nil means a string.
	Type any
	// Doc says what the parameter means, if Type does not.
	Doc string
}

// Option describes a part of the requests or responses of a route.
type Option func(*Route)

// Summary returns an option that sets what the route does.
func Summary(text string) Option { return func(r *Route) { r.Summary = text } }

// Query returns an option that adds parameters of the query, each with a string as value.
func Query(names ...string) Option {
	return func(r *Route) {
		for _, name := range names {
			r.Query = append(r.Query, Parameter{Name: name})
		}
	}
}

// QueryOf returns an option that adds a parameter of the query. See Parameter for its arguments.
func QueryOf(name string, of any, doc string) Option {
	return func(r *Route) { r.Query = append(r.Query, Parameter{Name: name, Type: of, Doc: doc}) }
}

// Takes returns an option for a route with a JSON body of the type of the given value.
func Takes(body any) Option { return func(r *Route) { r.Body = body } }

// TakesBinary returns an option for a route with a body of the given media type, which is not JSON.
func TakesBinary(media string) Option { return func(r *Route) { r.Binary = media } }

// Returns returns an option for the status of a success, and the type of its data.
func Returns(status int, data any) Option {
	return func(r *Route) { r.Status, r.Data = status, data }
}

// ReturnsBare returns an option for a route whose success is not in the JSON envelope. The parameter media is its media
// type, and data is nil if it is not JSON.
func ReturnsBare(media string, data any) Option {
	return func(r *Route) { r.Content, r.Data = media, data }
}

// ReturnsSocket returns an option for a route whose success is a websocket.
func ReturnsSocket() Option { return func(r *Route) { r.Status = http.StatusSwitchingProtocols } }

// Described returns an option that sets all parts of the description to those of another route.
func Described(of Route) Option {
	return func(r *Route) {
		r.RPC, r.Summary, r.Query, r.Body, r.OptionalBody, r.Binary = of.RPC, of.Summary, of.Query, of.Body, of.OptionalBody, of.Binary
		r.Status, r.Data, r.Content = of.Status, of.Data, of.Content
	}
}

func newRoute(method, path string, as auth.Method, why string, options []Option) Route {
	r := Route{Method: method, Path: path, As: as, Open: why, Status: http.StatusOK}
	for _, o := range options {
		o(&r)
	}
	return r
}
