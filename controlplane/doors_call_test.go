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
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
)

// class is how an endpoint decides who may call it.
type class string

const (
	ruled class = "rule" // by the table of rules
	open  class = "open" // everybody, for a reason that is said
	etcd  class = "etcd" // by etcd's Auth
	hosts class = "host" // by the certificate of a host
	peers class = "peer" // by the certificate of a member
)

// endpoint is one way to call a member.
type endpoint struct {
	door  door
	class class
	// name is a gRPC method, or the listener with an HTTP method and a path.
	name string
	// row is the name of its row: name, with the listener where callers prove themselves by certificate.
	row string
	// as is the method whose rule holds.
	as auth.Method
	// why is the reason of an open one.
	why string
	// method and path are HTTP's.
	method, path string
	info         grpc.MethodInfo
}

// byCertificate are the listeners whose callers prove themselves by certificate.
var byCertificate = map[string]class{"agents": hosts, "peers": peers}

// standard are the services that gRPC itself defines.
var standard = map[string]string{
	"grpc.health.v1.Health":                    "says whether the port serves",
	"grpc.reflection.v1.ServerReflection":      "describes the methods",
	"grpc.reflection.v1alpha.ServerReflection": "describes the methods",
}

// endpoints lists everything behind a listener. What has no class comes without one.
func (d door) endpoints() (all []endpoint, err error) {
	if d.grpc != nil {
		for service, info := range d.grpc.GetServiceInfo() {
			for _, m := range info.Methods {
				name := "/" + service + "/" + m.Name
				e := endpoint{door: d, name: name, row: name, as: auth.Method(name), info: m}
				_, isRuled := auth.Rules()[e.as]
				switch {
				case byCertificate[d.name] != "":
					e.class, e.row = byCertificate[d.name], d.name+" "+name
				case strings.HasPrefix(name, etcdrpc.Prefix):
					e.class = etcd
				case isRuled && auth.Open[e.as] == "":
					e.class = ruled
				case !isRuled && auth.Open[e.as] != "":
					e.class, e.why = open, auth.Open[e.as]
				case standard[service] != "":
					e.class, e.why = open, standard[service]
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
			e := endpoint{door: d, name: name, row: name, as: r.As, why: r.Open, method: r.Method, path: r.Path}
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
				door: d, name: name, row: name, class: open, why: "as with etcd, for whoever reaches the port", method: http.MethodGet, path: path,
			})
		}
	default:
		return nil, fmt.Errorf("%s: a %T does not say what it serves", d.name, h)
	}
	slices.SortFunc(all, func(a, b endpoint) int { return strings.Compare(a.name, b.name) })
	return all, nil
}

// visit is one call of an endpoint.
type visit struct {
	endpoint
	token string
	// conn is the listener's, for gRPC.
	conn *grpc.ClientConn
	// drain is set for a stream that must be read to its end.
	drain bool
	// path and body are the request: body is JSON for gRPC too.
	path, body string
}

// outcome is what came of a call: a gRPC code, or an HTTP status with the code of the error, and the message of that.
// Nothing that is said of a failure may repeat the token.
func (h *house) outcome(v visit) (result, message string) {
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

func (h *house) rest(v visit) (result, message string) {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, v.method, "http://"+v.door.address+v.path, strings.NewReader(v.body))
	require.NoError(h.t, err)
	if v.body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	if v.token != "" {
		r.Header.Set("Authorization", "Bearer "+v.token)
	}
	got, err := http.DefaultClient.Do(r)
	require.NoError(h.t, err, v.name)
	defer got.Body.Close()
	body, err := io.ReadAll(got.Body)
	require.NoError(h.t, err, v.name)
	if got.StatusCode < 400 || v.method == http.MethodHead {
		return fmt.Sprint(got.StatusCode), "" // the token endpoint's answer is a token
	}
	var said struct {
		Error struct{ Code, Message string }
	}
	require.NoError(h.t, json.Unmarshal(body, &said), "%s: %s", v.name, body)
	require.Equal(h.t, got.StatusCode == http.StatusUnauthorized, got.Header.Get("WWW-Authenticate") == "Bearer", v.name)
	return strings.TrimSpace(fmt.Sprint(got.StatusCode, " ", said.Error.Code)), said.Error.Message
}

func (h *house) rpc(v visit) (result, message string) {
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

// splitMethod splits the full name of a gRPC method.
func splitMethod(name string) (service, method string) {
	service, method, _ = strings.Cut(strings.TrimPrefix(name, "/"), "/")
	return service, method
}

// invoke calls a gRPC method as far as its first answer.
func (h *house) invoke(v visit) error {
	service, method := splitMethod(v.name)
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service + "." + method))
	require.NoError(h.t, err, v.name)
	d := found.(protoreflect.MethodDescriptor)
	in, out := dynamicpb.NewMessage(d.Input()), dynamicpb.NewMessage(d.Output())
	require.NoError(h.t, protojson.Unmarshal([]byte(v.body), in), v.name)
	// A stream that goes on is ended.
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
	// A stream that was refused says so when it is read.
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
	// etcd says within the answer that a watch is refused.
	if f := d.Output().Fields().ByName("cancel_reason"); f != nil && out.Get(f).String() != "" {
		return status.Error(codes.PermissionDenied, out.Get(f).String())
	}
	return nil
}

// placeholder is $name, or $no-name for something that is not there.
var placeholder = regexp.MustCompile(`\$(no-)?([a-z]+)`)

// How a request is filled.
type filling uint8

const (
	asWritten  filling = iota
	everything         // also what should not be there is what project web has
	nothing            // nor is what should be there
)

// gone is an id that nothing has.
const gone = "6f1c6a52-0d0e-4f6b-9c39-3c1d3b6f2a11"

// hidden are the things that other tenants must not find.
var hidden = []string{"vm", "image", "reservation", "account"}

// fill puts things into a request.
func (h *house) fill(text string, how filling) string {
	return placeholder.ReplaceAllStringFunc(text, func(p string) string {
		found := placeholder.FindStringSubmatch(p)
		switch name := found[2]; {
		case name == "new":
			return "n" + strings.ReplaceAll(uuid.NewString(), "-", "")
		case name == "uuid":
			return uuid.NewString()
		case found[1] != "" && how != everything, how == nothing && slices.Contains(hidden, name):
			return gone
		default:
			require.NotEmpty(h.t, h.things[name], p)
			return h.things[name]
		}
	})
}

// nameless is a request without the fields that name a tenant.
func nameless(h *house, body string) string {
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
