// Package openapitest compares requests and responses of REST APIs with OpenAPI documents, for tests. The main type is
// Checker. Handler checks all exchanges with a server.
package openapitest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-cloud/trivet/controlplane/edge/openapi"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Checker compares exchanges with an OpenAPI document.
type Checker struct {
	doc *openapi3.T

	mu sync.Mutex
	// failures holds the failed responses that were compared already, by operation, status and error code. The schema of
	// all errors is the same, and each comparison compiles it.
	failures map[string]bool
}

// New returns a Checker for an OpenAPI document as JSON. It returns an error if the document is not valid.
func New(document []byte) (*Checker, error) {
	doc, err := openapi3.NewLoader().LoadFromData(document)
	if err != nil {
		return nil, fmt.Errorf("read the OpenAPI document: %w", err)
	}
	if err := doc.Validate(context.Background()); err != nil {
		return nil, fmt.Errorf("the OpenAPI document is not valid: %w", err)
	}
	return &Checker{doc: doc, failures: map[string]bool{}}, nil
}

// ForRoutes returns a Checker for the OpenAPI document of routes, whose schemas refuse unknown fields.
func ForRoutes(routes []rest.Route) (*Checker, error) {
	text, err := json.Marshal(openapi.Document(routes, openapi.Options{
		Title: "Test", Port: 80, Closed: true, Comment: func(protoreflect.FullName) string { return "" },
	}))
	if err != nil {
		return nil, err
	}
	return New(text)
}

// Exchange is a request with its response.
type Exchange struct {
	Method string
	// URL is the path, with the query.
	URL    string
	Header http.Header
	Body   []byte

	Status         int
	ResponseHeader http.Header
	Response       []byte
}

// Check returns an error if the document does not allow the response, or does not allow the request although it
// succeeded. Requests with a field or parameter that is named unknown are not compared, nor are responses to HEAD, and to
// paths and methods that do not exist.
func (c *Checker) Check(x Exchange) error {
	target, err := url.Parse(x.URL)
	if err != nil {
		return err
	}
	path, variables := c.find(x.Method, target.EscapedPath())
	switch {
	case x.Method == http.MethodHead:
		return nil
	case path == "" && (x.Status == http.StatusNotFound || x.Status == http.StatusMethodNotAllowed):
		return nil
	case path == "":
		return fmt.Errorf("%s %s is not in the document, but its response is %d", x.Method, x.URL, x.Status)
	}
	if x.Status >= 400 && x.Status != http.StatusNotImplemented && c.known(x, path) {
		return nil
	}
	item := c.doc.Paths.Value(path)
	options := &openapi3filter.Options{
		AuthenticationFunc: openapi3filter.NoopAuthenticationFunc, IncludeResponseStatus: true, SkipSettingDefaults: true,
		RejectWhenRequestBodyNotSpecified: len(x.Body) > len("{}"), ExcludeResponseBody: !isJSON(x.ResponseHeader),
	}
	q := &openapi3filter.RequestValidationInput{
		Request: x.request(target, item.GetOperation(x.Method)), PathParams: variables, Options: options,
		Route: &routers.Route{Spec: c.doc, Path: path, PathItem: item, Method: x.Method, Operation: item.GetOperation(x.Method)},
	}
	if x.Status < 400 && !x.lax() {
		if err := checkQuery(q); err != nil {
			return fmt.Errorf("request %s %s: %w", x.Method, x.URL, err)
		}
		if err := openapi3filter.ValidateRequest(context.Background(), q); err != nil {
			return fmt.Errorf("request %s %s: %w", x.Method, x.URL, err)
		}
	}
	answer := &openapi3filter.ResponseValidationInput{RequestValidationInput: q, Status: x.Status, Header: x.ResponseHeader, Options: options}
	if err := openapi3filter.ValidateResponse(context.Background(), answer.SetBodyBytes(x.Response)); err != nil {
		return fmt.Errorf("response %d to %s %s: %w", x.Status, x.Method, x.URL, err)
	}
	return nil
}

// lax reports whether the request has a field or a parameter with the name unknown, by which tests check that servers
// ignore what they do not know.
func (x *Exchange) lax() bool {
	return bytes.Contains(x.Body, []byte(`"unknown":`)) || strings.Contains(x.URL, "unknown=")
}

// known reports whether a failed response with the same error code was compared before, and remembers this one.
func (c *Checker) known(x Exchange, path string) bool {
	var fields struct {
		Error struct{ Code string }
		Data  any
	}
	if json.Unmarshal(x.Response, &fields) != nil || fields.Error.Code == "" || fields.Data != nil {
		return false
	}
	key := fmt.Sprint(x.Method, path, x.Status, fields.Error.Code)
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.failures[key]
	c.failures[key] = true
	return was
}

func isJSON(header http.Header) bool { return header.Get("Content-Type") == "application/json" }

// request returns the request of an exchange as it is compared.
func (x *Exchange) request(target *url.URL, op *openapi3.Operation) *http.Request {
	q := &http.Request{Method: x.Method, URL: target, Header: x.Header.Clone(), Body: http.NoBody}
	if q.Header == nil {
		q.Header = http.Header{}
	}
	if len(x.Body) > 0 {
		q.Body, q.ContentLength = io.NopCloser(bytes.NewReader(x.Body)), int64(len(x.Body))
		if body := op.RequestBody; body != nil && q.Header.Get("Content-Type") == "" {
			for media := range body.Value.Content {
				q.Header.Set("Content-Type", media) // may be absent on some ports
			}
		}
	}
	return q
}

// checkQuery returns an error for a parameter of the query that the operation does not have.
func checkQuery(q *openapi3filter.RequestValidationInput) error {
	for name := range q.Request.URL.Query() {
		if q.Route.Operation.Parameters.GetByInAndName("query", name) == nil {
			return fmt.Errorf("the query parameter %s is not in the document", name)
		}
	}
	return nil
}

// find returns the path of the document that matches an escaped path and has the method, and the values of its
// variables. A path without variables comes before one with variables. The variable {key} matches any number of parts.
func (c *Checker) find(method, escaped string) (path string, variables map[string]string) {
	for _, candidate := range c.doc.Paths.Keys() {
		if c.doc.Paths.Value(candidate).GetOperation(method) == nil {
			continue
		}
		if values, ok := match(candidate, escaped); ok && (path == "" || len(values) < len(variables) || longer(candidate, path)) {
			path, variables = candidate, values
		}
	}
	return path, variables
}

// longer reports whether a has more parts than b. It decides between /kv/{key} and /kv/{key}/put.
func longer(a, b string) bool { return strings.Count(a, "/") > strings.Count(b, "/") }

func match(template, escaped string) (map[string]string, bool) {
	values := map[string]string{}
	if before, after, ok := strings.Cut(template, "{key}"); ok {
		rest, ok1 := strings.CutPrefix(escaped, before)
		key, ok2 := strings.CutSuffix(rest, after)
		values["key"] = key
		return values, ok1 && ok2
	}
	want, got := strings.Split(template, "/"), strings.Split(escaped, "/")
	if len(want) != len(got) {
		return nil, false
	}
	for i := range want {
		if name, ok := strings.CutPrefix(want[i], "{"); ok {
			values[strings.TrimSuffix(name, "}")] = got[i]
		} else if want[i] != got[i] {
			return nil, false
		}
	}
	return values, true
}

// Handler returns a handler that calls the server, and fails the test for an exchange that the OpenAPI document of the
// server's routes does not allow. Responses must be recorded by httptest.ResponseRecorder.
func Handler(t testing.TB, s *rest.Server) http.Handler {
	t.Helper()
	c, err := ForRoutes(s.Routes())
	if err != nil {
		t.Fatal(err)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		s.ServeHTTP(w, r)
		if a, ok := w.(*httptest.ResponseRecorder); ok {
			if err := c.Check(Exchange{
				Method: r.Method, URL: r.URL.RequestURI(), Header: r.Header, Body: body,
				Status: a.Code, ResponseHeader: a.Header(), Response: a.Body.Bytes(),
			}); err != nil {
				t.Error(err)
			}
		}
	})
}
