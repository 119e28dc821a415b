package volume

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

// verifier accepts the token ada of a project member and the token admin of a system:admin.
type verifier struct{}

func (verifier) Verify(_ context.Context, token string) (*cloud.Caller, error) {
	switch token {
	case "ada":
		b := []cloud.Binding{{Role: cloud.ProjectMember, Org: acme.Org, Project: acme.Project}}
		return &cloud.Caller{User: "ada", Proof: cloud.ProofPassword, Scope: acme, Bindings: b}, nil
	case "admin":
		return &cloud.Caller{User: "admin", Proof: cloud.ProofHostKey, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}, nil
	}
	return nil, fault.New(fault.Unauthenticated, "the token is not valid")
}

// TestREST makes the calls of the REST API of volumes and storage classes.
func TestREST(t *testing.T) {
	w := newWorld(t)
	host := w.host("h1", 100)
	server := rest.New(rest.Options{
		Service: fault.VM, Name: "vm", Log: slog.New(slog.DiscardHandler), Metrics: rest.NewMetrics(prometheus.NewRegistry()), Verifier: verifier{},
	})
	w.volumes.Routes(server)
	w.classes.Routes(server)
	handler := openapitest.Handler(t, server)
	call := func(token, method, path, body string) (int, map[string]any) {
		q := httptest.NewRequest(method, "http://127.0.0.1:8084"+path, strings.NewReader(body))
		q.Header.Set("Content-Type", "application/json")
		q.Header.Set("Authorization", "Bearer "+token)
		r := httptest.NewRecorder()
		q.Header.Set(rest.StrictHeader, "true")
		handler.ServeHTTP(r, q)
		var out struct {
			Data, Error map[string]any
		}
		require.NoError(t, json.Unmarshal(r.Body.Bytes(), &out), r.Body.String())
		if out.Error != nil {
			return r.Code, out.Error
		}
		return r.Code, out.Data
	}
	status, v := call("ada", http.MethodPost, "/api/v1/volumes", `{"name":"data","size_gib":3,"labels":{"env":"prod"}}`)
	require.Equal(t, http.StatusCreated, status, "%v", v)
	require.Equal(t, []any{"available", "local", "managed", float64(3), map[string]any{"env": "prod"}},
		[]any{v["status"], v["storage_class"], v["driver"], v["size_gib"], v["labels"]})
	path := "/api/v1/volumes/" + v["id"].(string)
	status, v = call("ada", http.MethodPatch, path, `{"name":"logs","metadata":{"trivet/max-iops":"100"}}`)
	require.Equal(t, http.StatusOK, status, "%v", v)
	require.Equal(t, "logs", v["name"])
	status, v = call("ada", http.MethodPost, path+"/resize", `{"size_gib":5}`)
	require.Equal(t, http.StatusOK, status, "%v", v)
	require.EqualValues(t, 5, v["size_gib"])
	status, v = call("ada", http.MethodPost, path+"/resize", `{"size_gib":"5"}`)
	require.Equal(t, http.StatusBadRequest, status, "%v", v)

	require.NoError(t, w.attach(cloud.VolumeID(strings.TrimPrefix(path, "/api/v1/volumes/")), vmA, host))
	for query, want := range map[string]int{
		"": 1, "?status=in_use": 1, "?status=available": 0, "?attached_to_vm=" + string(vmA): 1, "?name=logs&storage_class=local": 1, "?name=data": 0, "?page_size=1": 1,
	} {
		status, list := call("ada", http.MethodGet, "/api/v1/volumes"+query, "")
		require.Equal(t, http.StatusOK, status)
		require.Len(t, list["volumes"], want, query)
	}
	status, v = call("ada", http.MethodDelete, path, "")
	require.Equal(t, http.StatusUnprocessableEntity, status, "%v", v)
	w.release(cloud.VolumeID(strings.TrimPrefix(path, "/api/v1/volumes/")), vmA)
	status, v = call("ada", http.MethodDelete, path, "")
	require.Equal(t, http.StatusOK, status, "%v", v)
	require.Equal(t, map[string]any{"id": strings.TrimPrefix(path, "/api/v1/volumes/"), "deleted": true}, v)
	status, _ = call("ada", http.MethodGet, path, "")
	require.Equal(t, http.StatusNotFound, status)

	status, _ = call("ada", http.MethodPost, "/api/v1/storage-classes", `{"name":"fast","driver":"managed","pool":"nvme"}`)
	require.Equal(t, http.StatusForbidden, status)
	status, c := call("admin", http.MethodPost, "/api/v1/storage-classes", `{"name":"fast","driver":"managed","pool":"nvme","is_default":true}`)
	require.Equal(t, http.StatusCreated, status, "%v", c)
	status, c = call("ada", http.MethodGet, "/api/v1/storage-classes/local", "")
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, false, c["is_default"])
	status, c = call("admin", http.MethodPatch, "/api/v1/storage-classes/fast", `{"max_iops":7,"description":"NVMe"}`)
	require.Equal(t, http.StatusOK, status, "%v", c)
	require.Equal(t, []any{float64(7), "NVMe", true}, []any{c["max_iops"], c["description"], c["is_default"]}, "a field that is not given stays")
	status, c = call("admin", http.MethodPatch, "/api/v1/storage-classes/fast", `{"rbd":{"monitors":["192.0.2.1"]}}`)
	require.Equal(t, http.StatusBadRequest, status, "%v", c)
	status, c = call("admin", http.MethodPatch, "/api/v1/storage-classes/fast", `{"pool":"other"}`)
	require.Equal(t, http.StatusBadRequest, status, "%v", c)
	status, _ = call("ada", http.MethodPatch, "/api/v1/storage-classes/fast", `{"max_iops":8}`)
	require.Equal(t, http.StatusForbidden, status)
	const register = `{"org_id":"acme","project_id":"web","name":"old","size_gib":5,"storage_class":"ceph","rbd":{"image":"old-data"}}`
	w.rbdClass()
	status, _ = call("ada", http.MethodPost, "/api/v1/volumes/register", register)
	require.Equal(t, http.StatusForbidden, status)
	status, v = call("admin", http.MethodPost, "/api/v1/volumes/register", register)
	require.Equal(t, http.StatusCreated, status, "%v", v)
	require.Equal(t, []any{"pending", "rbd", "old-data"}, []any{v["status"], v["driver"], v["backing"].(map[string]any)["rbd"].(map[string]any)["image"]})
	status, v = call("admin", http.MethodPost, "/api/v1/volumes/register", strings.Replace(register, `"old"`, `"again"`, 1))
	require.Equal(t, http.StatusConflict, status, "%v", v)
	status, c = call("admin", http.MethodDelete, "/api/v1/storage-classes/fast", "")
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, map[string]any{"id": "fast", "deleted": true}, c)
}
