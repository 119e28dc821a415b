package main

import (
	"context"
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// TestListEndpointsReportsUnknownAndMissing checks that listEndpoints reports endpoints without a rule, reason, row or
// line, and rows, lines and rules without an endpoint.
func TestListEndpointsReportsUnknownAndMissing(t *testing.T) {
	g := grpc.NewServer()
	g.RegisterService(&grpc.ServiceDesc{
		ServiceName: "new.v1.NewService", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{
			MethodName: "Do", Handler: func(any, context.Context, func(any) error, grpc.UnaryServerInterceptor) (any, error) {
				return &emptypb.Empty{}, nil
			},
		}},
	}, struct{}{})
	s := rest.New(rest.Options{Name: "vm", Metrics: rest.NewMetrics(prometheus.NewRegistry())})
	nothing := func(*rest.Response, *http.Request) (any, error) { return nil, nil }
	s.Handle(http.MethodPost, "/api/v1/new", "/new.v1.NewService/Do", nothing)
	s.HandleOpen(http.MethodGet, "/api/v1/new", "", nothing)
	s.HandleOpen(http.MethodGet, "/api/v1/open", "a route with a reason, but without a row", nothing)

	b := &matrix{}
	listEndpoints(b, []boundListener{{name: "grpc", grpc: g}, {name: "vm", http: s}, {name: "mux", http: http.NewServeMux()}})
	for _, complaint := range []string{
		"/new.v1.NewService/Do has neither a rule nor a reason why it is open",
		"/new.v1.NewService/Do has no row",
		"/new.v1.NewService/Do has no line in " + callersFile,
		vms + "GetVm has a line in " + callersFile + " but is not served",
		"vm POST /api/v1/new has neither a rule nor a reason why it is open",
		"vm GET /api/v1/new has neither a rule nor a reason why it is open",
		"vm GET /api/v1/open has no row",
		"mux: the endpoints of a *http.ServeMux cannot be listed",
		"vm GET /api/v1/vms has a row but is not served",
		vms + "GetVm has a row but is not served",
		vms + "GetVm has a rule but is not served",
		identityService + "IssueToken is listed as open, but has a rule or is not served",
	} {
		require.Contains(t, b.problems, complaint)
	}
	require.NotContains(t, b.problems, "vm GET /health has no row")
}

// TestExpectedOutcomes compares the function expected with hand-written outcomes for some endpoints and columns.
func TestExpectedOutcomes(t *testing.T) {
	lines, err := parseAccess(authorizedCallers)
	require.NoError(t, err)
	e := endpoint{name: vms + "GetVm", access: lines[vms+"GetVm"]}
	r := row{body: webRequest(`,"vm_id":"$vm"`), allowed: "OK", otherTenant: "NOT_FOUND"}
	for name, want := range map[string]string{
		"no token": "UNAUTHENTICATED", "expired": "UNAUTHENTICATED", "wrong aud": "UNAUTHENTICATED", "unproven": "PERMISSION_DENIED",
		"proven without role": noTenant, "other org": "PERMISSION_DENIED", "other org, by id": "NOT_FOUND", "project:viewer": "OK",
		"billing:admin": "PERMISSION_DENIED", "system:admin of no project": "OK", "system:admin of no project, naming none": "INVALID_ARGUMENT",
	} {
		require.Equal(t, want, expected(e, r, columnNamed(name)), name)
	}
	e = endpoint{name: "vm GET /api/v1/vms/{id}", access: lines["vm GET /api/v1/vms/{id}"], method: http.MethodGet}
	r = row{path: "/api/v1/vms/$vm", allowed: "200", otherTenant: "404 NOT_FOUND"}
	for name, want := range map[string]string{
		"garbage": "401 UNAUTHENTICATED", "unproven": "403 FORBIDDEN", "other org": "404 NOT_FOUND", "project:viewer": "200",
		"system:admin of no project": "403 FORBIDDEN",
	} {
		require.Equal(t, want, expected(e, r, columnNamed(name)), name)
	}
}
