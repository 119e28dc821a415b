package rest

import (
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// Decode decodes the JSON body of a request into v and returns the body. Handlers store a hash of the body with the
// idempotency key. Decode ignores unknown fields, except in strict requests, where it returns InvalidArgument. It also
// returns InvalidArgument with the name of the field if a value does not have the type that v requires, and TooLarge if
// the body is too long. If v is a pointer to a map, the caller checks the fields.
func Decode(r *http.Request, v any) ([]byte, error) {
	if err := jsonType(r); err != nil {
		return nil, err
	}
	raw, err := ReadBody(r)
	if err != nil {
		return nil, err
	}
	if err := parse(raw, v); err != nil {
		return raw, err
	}
	strict, err := Strict(r)
	if err != nil || !strict {
		return raw, err
	}
	return raw, checkFields(raw, reflect.TypeOf(v), "")
}

// ReadBody returns the body of a request. It returns TooLarge if the body is too long, and InvalidArgument if the
// connection ended before the body's end.
func ReadBody(r *http.Request) ([]byte, error) {
	raw, err := io.ReadAll(r.Body)
	if err == nil {
		return raw, nil
	}
	var big *http.MaxBytesError
	if errors.As(err, &big) {
		return nil, fault.New(fault.TooLarge, "the body is larger than %d bytes", big.Limit)
	}
	if f, ok := fault.From(err); ok {
		return nil, f // the service has replaced r.Body by a reader that returns faults
	}
	return nil, fault.New(fault.InvalidArgument, "the request body is incomplete: the connection ended before its end").Because(err)
}

// parse decodes a JSON object into v. It returns an InvalidArgument fault if raw is not UTF-8 or not JSON.
func parse(raw []byte, v any) error {
	if len(raw) == 0 {
		return fault.New(fault.InvalidArgument, "the body is empty: want a JSON object")
	}
	if !utf8.Valid(raw) {
		return fault.New(fault.InvalidArgument, "the body is not JSON: it is not UTF-8")
	}
	err := json.Unmarshal(raw, v)
	if err == nil {
		return nil
	}
	var wrong *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	var own *fault.Fault
	switch {
	case errors.As(err, &own):
		return own
	case errors.As(err, &wrong):
		field := wrong.Field
		if field == "" {
			field = "body"
		}
		got := wrong.Value
		if len(got) > 64 {
			got = got[:64] + "…"
		}
		return fault.Invalid(field, "want %s, got %s", jsonName(wrong.Type.String()), got)
	case errors.As(err, &syntax):
		return fault.New(fault.InvalidArgument, "the body is not JSON: %v at byte %d", syntax, syntax.Offset)
	}
	return fault.New(fault.InvalidArgument, "the body is not JSON: %v", err)
}

// jsonName returns a description of the JSON value that decodes into a Go type, such as "a string", for error messages.
func jsonName(goType string) string {
	goType = strings.TrimLeft(goType, "*")
	switch {
	case strings.HasPrefix(goType, "[]"):
		return "an array"
	case strings.HasPrefix(goType, "uint32"):
		return "a whole number from 0 to 4294967295"
	case strings.HasPrefix(goType, "uint"):
		return "a whole number from 0"
	case strings.HasPrefix(goType, "int"):
		return "a whole number"
	case goType == "string", goType == "bool":
		return "a " + goType
	}
	return "an object"
}

// jsonType returns an InvalidArgument fault if the request has a Content-Type other than application/json.
func jsonType(r *http.Request) error {
	value := r.Header.Get("Content-Type")
	if value == "" {
		return nil
	}
	if kind, _, err := mime.ParseMediaType(value); err != nil || kind != "application/json" {
		return fault.Invalid("Content-Type", "want application/json, got %q", value)
	}
	return nil
}

// RefuseBrowser returns an error for requests that a web page can make a browser send. These are the requests that
// CheckPage refuses, and those with a body that is not declared as application/json: a browser sends some other types
// without a CORS preflight.
func (s *Server) RefuseBrowser(r *http.Request) error {
	if err := CheckPage(r, s.opts.Hosts); err != nil {
		return err
	}
	if r.ContentLength != 0 && r.Header.Get("Content-Type") == "" {
		return fault.Invalid("Content-Type", "want application/json")
	}
	return jsonType(r)
}

// CheckPage returns PermissionDenied for a request from a web page, and for one whose Host is not an IP address,
// localhost or one of hosts. The Host is checked because an attacker's host name can resolve to a loopback address (DNS
// rebinding).
//
// Browsers set Sec-Fetch-Site (W3C Fetch Metadata). "none" means a navigation by the user, such as a typed address;
// "same-origin" a request by a page of this server; "same-site" and "cross-site" requests by other pages.
//
// Over TLS the Host is not checked: the certificate does not contain the attacker's host name, so the browser refuses
// the connection.
func CheckPage(r *http.Request, hosts []string) error {
	if r.Header.Get("Origin") != "" {
		return fault.New(fault.PermissionDenied, "this endpoint refuses requests from web pages")
	}
	for _, site := range r.Header.Values("Sec-Fetch-Site") {
		if site != "none" && site != "same-origin" {
			return fault.New(fault.PermissionDenied, "this endpoint refuses requests from web pages")
		}
	}
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	if r.TLS == nil && !strings.EqualFold(host, "localhost") && net.ParseIP(strings.Trim(host, "[]")) == nil && !slices.Contains(hosts, host) {
		return fault.New(fault.PermissionDenied, "call this endpoint by an IP address or as localhost, not as %q", host)
	}
	return nil
}
