package node

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/openapi/openapitest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// verifier accepts the token admin of a system:admin, and the token ada of a user without roles.
type verifier struct{}

func (verifier) Verify(_ context.Context, token string) (*cloud.Caller, error) {
	switch token {
	case "admin":
		return &cloud.Caller{User: "admin", Proof: cloud.ProofHostKey, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}, nil
	case "ada":
		return &cloud.Caller{User: "ada", Proof: cloud.ProofPassword}, nil
	}
	return nil, fault.New(fault.Unauthenticated, "the token is not valid")
}

// TestREST makes the calls of the REST API of hosts.
func TestREST(t *testing.T) {
	w := newWorld(t)
	w.follow(1)
	a := w.host(1, 1)
	_, err := a.HeartbeatNode(limited(t), sendHeartbeat(a))
	require.NoError(t, err)
	server := rest.New(rest.Options{
		Service: fault.VM, Name: "vm", Log: slog.New(slog.DiscardHandler), Metrics: rest.NewMetrics(prometheus.NewRegistry()), Verifier: verifier{},
	})
	w.members[1].Routes(server)
	body := "{}"
	call := func(token, method, path string, status int) map[string]any {
		t.Helper()
		q := httptest.NewRequest(method, "http://127.0.0.1:8084"+path, strings.NewReader(body))
		q.Header.Set("Content-Type", "application/json")
		q.Header.Set("Authorization", "Bearer "+token)
		r := httptest.NewRecorder()
		openapitest.Handler(t, server).ServeHTTP(r, q)
		require.Equal(t, status, r.Code, r.Body.String())
		var out struct{ Data map[string]any }
		require.NoError(t, json.Unmarshal(r.Body.Bytes(), &out), r.Body.String())
		return out.Data
	}
	const all = "/api/v1/nodes"
	one := all + "/" + string(a.id)
	for _, token := range []string{"admin", "ada"} {
		list := call(token, http.MethodGet, all, http.StatusOK)["nodes"].([]any)
		require.Len(t, list, 1)
		first := list[0].(map[string]any)
		require.Equal(t, string(a.id), first["id"])
		require.Equal(t, first, call(token, http.MethodGet, all+"/"+first["name"].(string), http.StatusOK), "the path has the name of the host")
	}
	require.Equal(t, "cordoned", call("admin", http.MethodPost, one+"/cordon", http.StatusOK)["state"])
	require.Equal(t, "cordoned", call("ada", http.MethodGet, one, http.StatusOK)["state"])
	require.Equal(t, "ready", call("admin", http.MethodPost, one+"/uncordon", http.StatusOK)["state"])
	call("ada", http.MethodPost, one+"/cordon", http.StatusForbidden)
	body = "" // optional
	require.Equal(t, "cordoned", call("admin", http.MethodPost, one+"/cordon", http.StatusOK)["state"])
	require.Equal(t, "draining", call("admin", http.MethodPost, one+"/drain", http.StatusOK)["state"])
	body = `{"force":true,"timeout_seconds":86401}`
	call("admin", http.MethodPost, one+"/drain", http.StatusBadRequest)
	body = ""
	call("ada", http.MethodPost, one+"/drain", http.StatusForbidden)
	call("admin", http.MethodGet, all+"/"+string(testVM(1)), http.StatusNotFound)
	call("admin", http.MethodGet, all+"/x", http.StatusNotFound)
	call("", http.MethodGet, all, http.StatusUnauthorized)
}
