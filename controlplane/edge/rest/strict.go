package rest

import (
	"encoding/json"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// StrictHeader is the header of a strict request. A server refuses a strict request with a field of the body or a
// parameter of the query that the route does not have. In other requests, such fields and parameters are ignored, as
// the wire contract needs it.
const StrictHeader = "Trivet-Strict"

// Strict reports whether a request is strict. It returns InvalidArgument if the header has another value than true or
// false.
func Strict(r *http.Request) (bool, error) {
	switch text := r.Header.Get(StrictHeader); text {
	case "", "false":
		return false, nil
	case "true":
		return !mutant.On(mutant.IgnoreStrict), nil
	default:
		return false, fault.Invalid(StrictHeader, "must be true or false, got %q", text[:min(len(text), 64)])
	}
}

// maxUnusedBody is the maximum size, in bytes, of the body of a strict request to a route that takes no body.
const maxUnusedBody = 64 << 10

// checkStrict returns InvalidArgument if a strict request has a parameter of the query that the route does not have, or
// a body although the route takes none. An empty JSON object counts as no body. The fields of other bodies are checked
// when they are decoded.
func (route *Route) checkStrict(r *http.Request) error {
	strict, err := Strict(r)
	if err != nil || !strict {
		return err
	}
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return fault.New(fault.InvalidArgument, "the query cannot be read: %v", err)
	}
	for name := range query {
		if !slices.ContainsFunc(route.Query, func(p Parameter) bool { return p.Name == name }) {
			return fault.Invalid(name, "is not a parameter of %s %s", route.Method, route.Path).With("constraint", "unknown_field")
		}
	}
	if route.Body != nil || route.Binary != "" {
		return nil
	}
	r.Body = http.MaxBytesReader(nil, r.Body, maxUnusedBody)
	raw, err := ReadBody(r)
	if err != nil || len(raw) == 0 {
		return err
	}
	var body map[string]any
	if err := parse(raw, &body); err != nil {
		return err
	}
	for name := range body {
		return UnknownField(name)
	}
	return nil
}

// UnknownField returns the InvalidArgument fault for a field of the body that the request does not have.
func UnknownField(name string) error {
	return fault.Invalid(name[:min(len(name), 64)], "is not a field of this request").With("constraint", "unknown_field")
}

// checkFields returns InvalidArgument if raw, a JSON object, has a field that the Go type t does not have. Names are
// compared exactly, although encoding/json also accepts other upper and lower case. at is the path of the object in the
// request, with a final dot, or empty.
func checkFields(raw json.RawMessage, t reflect.Type, at string) error {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]()) {
		return nil
	}
	switch t.Kind() {
	case reflect.Slice:
		var all []json.RawMessage
		if json.Unmarshal(raw, &all) != nil {
			return nil // the type of the value is checked when it is decoded
		}
		for i, one := range all {
			if err := checkFields(one, t.Elem(), strings.TrimSuffix(at, ".")+"["+strconv.Itoa(i)+"]."); err != nil {
				return err
			}
		}
	case reflect.Struct:
		var all map[string]json.RawMessage
		if json.Unmarshal(raw, &all) != nil {
			return nil
		}
		for name, value := range all {
			f, ok := fieldNamed(t, name)
			if !ok {
				return UnknownField(at + name)
			}
			if err := checkFields(value, f.Type, at+name+"."); err != nil {
				return err
			}
		}
	}
	return nil
}

func fieldNamed(t reflect.Type, name string) (reflect.StructField, bool) {
	for i := range t.NumField() {
		tag, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		if tag == name && t.Field(i).IsExported() {
			return t.Field(i), true
		}
	}
	return reflect.StructField{}, false
}
