package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/openapi/openapitest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
)

// authClass is the mechanism by which an endpoint authorizes callers.
type authClass string

const (
	ruled authClass = "rule" // by the rule in auth.Rules
	open  authClass = "open" // all callers are allowed, for the reason in openReason
	etcd  authClass = "etcd" // by etcd's Auth
	hosts authClass = "host" // by a host's client certificate
	peers authClass = "peer" // by a member's client certificate
)

// endpoint is a gRPC method or a REST route of a listener.
type endpoint struct {
	listener boundListener
	class    authClass
	// access is the endpoint's line in authorizedCallers. listEndpoints sets it.
	access access
	// name is the full name of a gRPC method, or, for REST, the listener, the HTTP method and the path.
	name string
	// row is the name of the endpoint's row in the authorization matrix: name, preceded by the listener if callers
	// authenticate with certificates.
	row string
	// ruleMethod is the gRPC method whose rule in auth.Rules applies to the endpoint.
	ruleMethod auth.Method
	// openReason is the reason why an endpoint of the class open requires no credential.
	openReason string
	// method and path are the HTTP method and path of a REST route, empty for gRPC.
	method, path string
	// route describes a REST route of package rest.
	route rest.Route
	info  grpc.MethodInfo
}

// byCertificate lists the listeners whose callers authenticate with certificates.
var byCertificate = map[string]authClass{"agents": hosts, "peers": peers}

// standard lists the services that gRPC itself defines, with the reason why they are open to all callers.
var standard = map[string]string{
	"grpc.health.v1.Health":                    "says whether the port serves",
	"grpc.reflection.v1.ServerReflection":      "describes the methods",
	"grpc.reflection.v1alpha.ServerReflection": "describes the methods",
}

// endpoints lists the endpoints of a listener. It leaves class empty if it cannot tell how an endpoint authorizes
// callers.
func (d boundListener) endpoints() (all []endpoint, err error) {
	if d.grpc != nil {
		for service, info := range d.grpc.GetServiceInfo() {
			for _, m := range info.Methods {
				name := "/" + service + "/" + m.Name
				e := endpoint{listener: d, name: name, row: name, ruleMethod: auth.Method(name), info: m}
				_, isRuled := auth.Rules()[e.ruleMethod]
				switch {
				case byCertificate[d.name] != "":
					e.class, e.row = byCertificate[d.name], d.name+" "+name
				case strings.HasPrefix(name, etcdrpc.Prefix):
					e.class = etcd
				case isRuled && auth.Open[e.ruleMethod] == "":
					e.class = ruled
				case !isRuled && auth.Open[e.ruleMethod] != "":
					e.class, e.openReason = open, auth.Open[e.ruleMethod]
				case standard[service] != "":
					e.class, e.openReason = open, standard[service]
				}
				all = append(all, e)
			}
		}
	}
	switch h := d.http.(type) {
	case nil:
	case interface{ Routes() []rest.Route }:
		for _, r := range h.Routes() {
			name := d.name + " " + r.Method + " " + r.Path
			e := endpoint{listener: d, name: name, row: name, ruleMethod: r.As, openReason: r.Open, method: r.Method, path: r.Path, route: r}
			_, isRuled := auth.Rules()[r.As]
			switch {
			case isRuled && r.Open == "":
				e.class = ruled
			case r.As == "" && r.Open != "":
				e.class = open
			}
			all = append(all, e)
		}
	case interface{ Paths() []string }:
		for _, path := range h.Paths() {
			name := d.name + " GET " + path
			all = append(all, endpoint{
				listener: d, name: name, row: name, class: open, openReason: "etcd serves this path without a credential too", method: http.MethodGet, path: path,
			})
		}
	default:
		return nil, fmt.Errorf("%s: the endpoints of a %T cannot be listed", d.name, h)
	}
	slices.SortFunc(all, func(a, b endpoint) int { return strings.Compare(a.name, b.name) })
	return all, nil
}

// call is one call of an endpoint, with its token and request.
type call struct {
	endpoint
	token string
	// conn is a connection to the listener, for gRPC calls.
	conn *grpc.ClientConn
	// drain makes invoke read a stream until it ends, instead of only its first response.
	drain bool
	// path is the path of an HTTP request. body is the request as JSON, for HTTP and for gRPC.
	path, body string
	// strict makes an HTTP request strict (rest.StrictHeader).
	strict bool
	// lax is set for an HTTP request that the OpenAPI document does not allow, and that succeeds nevertheless.
	lax bool
}

// outcome makes a call and returns its outcome: the gRPC code, or the HTTP status and error code. It also returns the
// error message, and fails the test if the message contains the token.
func (h *testMember) outcome(v call) (result, message string) {
	if v.method != "" {
		result, message = h.rest(v)
	} else {
		result, message = h.rpc(v)
	}
	if len(v.token) > 20 {
		require.NotContains(h.t, message, v.token, "%s shows the token", v.name)
	}
	return result, message
}

func (h *testMember) rest(v call) (result, message string) {
	got, body := h.send(v)
	if got.StatusCode < 400 || v.method == http.MethodHead {
		return fmt.Sprint(got.StatusCode), "" // no message: the response of the token endpoint contains a token
	}
	var reply restError
	require.NoError(h.t, json.Unmarshal(body, &reply), "%s: %s", v.name, body)
	require.Equal(h.t, got.StatusCode == http.StatusUnauthorized, got.Header.Get("WWW-Authenticate") == "Bearer", v.name)
	return strings.TrimSpace(fmt.Sprint(got.StatusCode, " ", reply.Error.Code)), reply.Error.Message
}

// restError is the body of an error response.
type restError struct {
	Error struct {
		Code, Message string
		Details       struct{ Field string }
	}
}

// send makes a call of a REST route, and returns the response and its body. It fails the test if the OpenAPI document of
// the API does not allow the request or the response.
func (h *testMember) send(v call) (*http.Response, []byte) {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, v.method, "http://"+v.listener.address+v.path, strings.NewReader(v.body))
	require.NoError(h.t, err)
	if v.body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	if v.token != "" {
		r.Header.Set("Authorization", "Bearer "+v.token)
	}
	if v.strict {
		r.Header.Set(rest.StrictHeader, "true")
	}
	got, err := http.DefaultClient.Do(r)
	require.NoError(h.t, err, v.name)
	defer got.Body.Close()
	content := io.Reader(got.Body)
	if got.Header.Get("Content-Type") == "text/event-stream" {
		content = io.LimitReader(got.Body, 1) // the stream of events has no end
	}
	body, err := io.ReadAll(content)
	require.NoError(h.t, err, v.name)
	if c := h.checkerOf(v.listener); c != nil && !isScrape(v.path) && !v.lax {
		require.NoError(h.t, c.Check(openapitest.Exchange{
			Method: v.method, URL: v.path, Header: r.Header, Body: []byte(v.body), Status: got.StatusCode, ResponseHeader: got.Header, Response: body,
		}))
	}
	return got, body
}

func (h *testMember) rpc(v call) (result, message string) {
	err := h.invoke(v)
	c := code.Code(status.Code(err)).String()
	if err == nil {
		return c, ""
	}
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetReason() == "TENANT_NOT_FOUND" {
			return noTenant, err.Error()
		}
	}
	return c, err.Error()
}

// splitMethod splits the full name of a gRPC method, such as /a.B/C, into a.B and C.
func splitMethod(name string) (service, method string) {
	service, method, _ = strings.Cut(strings.TrimPrefix(name, "/"), "/")
	return service, method
}

// invoke calls the gRPC method v.name and reads the first response, or all if v.drain is set. It returns the error of
// the call.
func (h *testMember) invoke(v call) error {
	service, method := splitMethod(v.name)
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service + "." + method))
	require.NoError(h.t, err, v.name)
	d := found.(protoreflect.MethodDescriptor)
	in, out := dynamicpb.NewMessage(d.Input()), dynamicpb.NewMessage(d.Output())
	require.NoError(h.t, protojson.Unmarshal([]byte(v.body), in), v.name)
	// Streams without an end are ended by canceling the context.
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	if v.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+v.token)
	}
	if !v.info.IsServerStream && !v.info.IsClientStream {
		return v.conn.Invoke(ctx, v.name, in, out)
	}
	s, err := v.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: v.info.IsServerStream, ClientStreams: v.info.IsClientStream}, v.name)
	if err != nil {
		return err
	}
	// Ignore io.EOF here: RecvMsg returns the error of a stream that was refused.
	if err := s.SendMsg(in); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if !v.info.IsServerStream || !v.info.IsClientStream {
		if err := s.CloseSend(); err != nil {
			return err
		}
	}
	for more := true; more; more = v.drain {
		if err := s.RecvMsg(out); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
	// etcd refuses a watch by a field in the response, not by an error of the stream.
	if f := d.Output().Fields().ByName("cancel_reason"); f != nil && out.Get(f).String() != "" {
		return status.Error(codes.PermissionDenied, out.Get(f).String())
	}
	return nil
}

// placeholder matches $name, and $no-name, which stands for a resource that does not exist.
var placeholder = regexp.MustCompile(`\$(no-)?([a-z]+)`)

// placeholderMode selects how fillPlaceholders replaces placeholders.
type placeholderMode uint8

const (
	fillAsWritten       placeholderMode = iota
	fillAllWithExisting                 // $no-name, too, becomes the ID of an existing resource of project web
	fillAllWithMissing                  // $name, too, becomes an ID that does not exist
)

// missingID is an ID that no resource has.
const missingID = "6f1c6a52-0d0e-4f6b-9c39-3c1d3b6f2a11"

// tenantResources lists the placeholders of resources of which other tenants must not learn whether they exist.
var tenantResources = []string{
	"vm", "image", "reservation", "account", "vpc", "subnet", "port", "group", "table", "nat", "floating", "service", "peering", "volume",
}

// fillPlaceholders replaces the placeholders in a path or body by IDs, new names or random UUIDs.
func (h *testMember) fillPlaceholders(text string, how placeholderMode) string {
	return placeholder.ReplaceAllStringFunc(text, func(p string) string {
		found := placeholder.FindStringSubmatch(p)
		switch name := found[2]; {
		case name == "new":
			return "n" + strings.ReplaceAll(uuid.NewString(), "-", "")
		case name == "uuid":
			return uuid.NewString()
		case found[1] != "" && how != fillAllWithExisting, how == fillAllWithMissing && slices.Contains(tenantResources, name):
			return missingID
		default:
			require.NotEmpty(h.t, h.resources[name], p)
			return h.resources[name]
		}
	})
}

// withoutTenantFields returns the request body without the fields org_id and project_id.
func withoutTenantFields(h *testMember, body string) string {
	if body == "" {
		return ""
	}
	var fields map[string]json.RawMessage
	require.NoError(h.t, json.Unmarshal([]byte(body), &fields), body)
	for _, field := range []string{"org_id", "project_id"} {
		delete(fields, field)
	}
	out, err := json.Marshal(fields)
	require.NoError(h.t, err)
	return string(bytes.TrimSpace(out))
}
