package instancetype

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/openapi/openapitest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// none is the hash of a request without an idempotency key, for which it has no meaning.
var none [32]byte

func newService(t *testing.T) (*Service, *storetest.Clock) {
	clock := storetest.NewClock(time.UnixMilli(1_800_000_000_000))
	records, _ := storetest.Open(t, clock.Now)
	return New(records, leader.NewCommands(1, leadertest.NewLeadership(1), nil)), clock
}

// asAdmin returns the context of a call by a system:admin with an idempotency key, which may be empty.
func asAdmin(ctx context.Context, key string) context.Context {
	caller := &cloud.Caller{
		User: "admin", Proof: cloud.ProofPassword, IdempotencyKey: key, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}},
	}
	return auth.With(ctx, caller, auth.RPC)
}

func small() cloud.InstanceType {
	return cloud.InstanceType{Name: "small", VCPUs: 2, MemoryMiB: 4096, RootDiskGiB: 20}
}

// TestTypes creates, changes, lists and deletes types.
func TestTypes(t *testing.T) {
	s, clock := newService(t)
	ctx := asAdmin(t.Context(), "")
	created, err := s.Create(ctx, small(), none)
	require.NoError(t, err)
	want := small()
	want.Available, want.CreatedAt, want.UpdatedAt = true, clock.Now().UnixMilli(), clock.Now().UnixMilli()
	require.Equal(t, Result{Type: want}, created)
	_, err = s.Create(ctx, cloud.InstanceType{Name: "large", VCPUs: 16, MemoryMiB: 65536}, none)
	require.NoError(t, err)

	all, next, err := s.List(ctx, 1, "")
	require.NoError(t, err)
	require.Equal(t, "large", all[0].Name, "in the order of names")
	all, next, err = s.List(ctx, 1, next)
	require.NoError(t, err)
	require.Equal(t, []any{"small", ""}, []any{all[0].Name, next})

	clock.Advance(time.Minute)
	no, text := false, "replaced by medium"
	updated, err := s.Update(ctx, "small", cloud.InstanceTypeUpdate{Available: &no, Description: &text}, none)
	require.NoError(t, err)
	want.Available, want.Description, want.UpdatedAt = false, text, clock.Now().UnixMilli()
	require.Equal(t, want, updated.Type)
	clock.Advance(time.Minute)
	updated, err = s.Update(ctx, "small", cloud.InstanceTypeUpdate{Available: &no}, none)
	require.NoError(t, err)
	require.Equal(t, want, updated.Type, "a repeat changes nothing, also not the time of the last change")
	have, err := s.Get(ctx, "small")
	require.NoError(t, err)
	require.Equal(t, &want, have)

	_, err = s.Delete(ctx, "small", none)
	require.NoError(t, err)
	_, err = s.Get(ctx, "small")
	require.True(t, fault.Is(err, fault.NotFound))
	_, err = s.Create(ctx, small(), none)
	require.NoError(t, err, "the name of a deleted type is free")
}

// TestRefusals checks the errors of invalid calls, and that these calls change nothing.
func TestRefusals(t *testing.T) {
	s, _ := newService(t)
	ctx := asAdmin(t.Context(), "")
	_, err := s.Create(ctx, small(), none)
	require.NoError(t, err)
	_, err = s.Create(ctx, cloud.InstanceType{Name: "small", VCPUs: 1, MemoryMiB: 512}, none)
	require.True(t, fault.Is(err, fault.AlreadyExists))
	_, err = s.Create(ctx, cloud.InstanceType{Name: "tiny", VCPUs: 1}, none)
	require.True(t, fault.Is(err, fault.InvalidArgument))
	require.ErrorContains(t, err, "memory_mib")
	long := strings.Repeat("x", cloud.MaxDescription+1)
	_, err = s.Update(ctx, "small", cloud.InstanceTypeUpdate{Description: &long}, none)
	require.True(t, fault.Is(err, fault.InvalidArgument))
	for _, call := range []func(name string) error{
		func(name string) error { _, err := s.Get(ctx, name); return err },
		func(name string) error { _, err := s.Update(ctx, name, cloud.InstanceTypeUpdate{}, none); return err },
		func(name string) error { _, err := s.Delete(ctx, name, none); return err },
	} {
		require.True(t, fault.Is(call("large"), fault.NotFound))
		require.True(t, fault.Is(call("a/b"), fault.InvalidArgument))
		require.True(t, fault.Is(call(""), fault.InvalidArgument))
	}
	have, err := s.Get(ctx, "small")
	require.NoError(t, err)
	require.Equal(t, []any{uint32(2), ""}, []any{have.VCPUs, have.Description})
}

// TestLimit creates as many types as a cloud can have.
func TestLimit(t *testing.T) {
	s, _ := newService(t)
	ctx := asAdmin(t.Context(), "")
	for i := range Max {
		_, err := s.Create(ctx, cloud.InstanceType{Name: fmt.Sprintf("t%d", i), VCPUs: 1, MemoryMiB: 512}, none)
		require.NoError(t, err)
	}
	_, err := s.Create(ctx, small(), none)
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	_, err = s.Create(ctx, cloud.InstanceType{Name: "t0", VCPUs: 1, MemoryMiB: 512}, none)
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
	_, err = s.Delete(ctx, "t7", none)
	require.NoError(t, err)
	_, err = s.Create(ctx, small(), none)
	require.NoError(t, err)
}

// TestIdempotency repeats calls with an idempotency key.
func TestIdempotency(t *testing.T) {
	s, _ := newService(t)
	ctx := asAdmin(t.Context(), "key-1")
	body := [32]byte{1}
	first, err := s.Create(ctx, small(), body)
	require.NoError(t, err)
	require.False(t, first.Replayed)
	again, err := s.Create(ctx, small(), body)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, first.Type, again.Type)
	_, err = s.Create(ctx, cloud.InstanceType{Name: "large", VCPUs: 16, MemoryMiB: 65536}, [32]byte{2})
	require.Error(t, err, "the key was used for another request")
	_, err = s.Get(ctx, "large")
	require.True(t, fault.Is(err, fault.NotFound))

	ctx = asAdmin(t.Context(), "key-2")
	_, err = s.Delete(ctx, "small", body)
	require.NoError(t, err)
	deleted, err := s.Delete(ctx, "small", body)
	require.NoError(t, err)
	require.True(t, deleted.Replayed)
}

// verifier accepts the token ada of a project member and the token admin of a system:admin.
type verifier struct{}

func (verifier) Verify(_ context.Context, token string) (*cloud.Caller, error) {
	switch token {
	case "ada":
		at := cloud.Tenant{Org: "acme", Project: "web"}
		b := []cloud.Binding{{Role: cloud.ProjectMember, Org: at.Org, Project: at.Project}}
		return &cloud.Caller{User: "ada", Proof: cloud.ProofPassword, Scope: at, Bindings: b}, nil
	case "admin":
		return &cloud.Caller{User: "admin", Proof: cloud.ProofHostKey, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}, nil
	}
	return nil, fault.New(fault.Unauthenticated, "the token is not valid")
}

// TestREST makes the calls of the REST API, as a project member, who may only read, and as an operator.
func TestREST(t *testing.T) {
	s, _ := newService(t)
	server := rest.New(rest.Options{
		Service: fault.VM, Name: "vm", Log: slog.New(slog.DiscardHandler), Metrics: rest.NewMetrics(prometheus.NewRegistry()), Verifier: verifier{},
	})
	s.Routes(server)
	handler := openapitest.Handler(t, server)
	call := func(token, method, path, body string) (int, map[string]any) {
		q := httptest.NewRequest(method, "http://127.0.0.1:8084/api/v1/instance-types"+path, strings.NewReader(body))
		q.Header.Set("Content-Type", "application/json")
		q.Header.Set("Authorization", "Bearer "+token)
		q.Header.Set(rest.StrictHeader, "true")
		r := httptest.NewRecorder()
		handler.ServeHTTP(r, q)
		var out struct{ Data, Error map[string]any }
		require.NoError(t, json.Unmarshal(r.Body.Bytes(), &out), r.Body.String())
		if out.Error != nil {
			return r.Code, out.Error
		}
		return r.Code, out.Data
	}
	const body = `{"name":"small","vcpus":2,"memory_mib":4096,"root_disk_gib":20,"description":"for tests"}`
	status, v := call("admin", http.MethodPost, "", body)
	require.Equal(t, http.StatusCreated, status, "%v", v)
	require.Equal(t, []any{"small", 2.0, 4096.0, 20.0, "for tests", true},
		[]any{v["name"], v["vcpus"], v["memory_mib"], v["root_disk_gib"], v["description"], v["available"]})
	status, v = call("ada", http.MethodGet, "/small", "")
	require.Equal(t, []any{http.StatusOK, "small"}, []any{status, v["name"]})
	status, v = call("ada", http.MethodGet, "?page_size=1", "")
	require.Equal(t, http.StatusOK, status)
	require.Len(t, v["instance_types"], 1)
	status, v = call("admin", http.MethodPatch, "/small", `{"available":false}`)
	require.Equal(t, http.StatusOK, status, "%v", v)
	require.Equal(t, []any{false, "for tests"}, []any{v["available"], v["description"]}, "a field that is not given stays")

	for _, c := range []struct {
		token, method, path, body string
		want                      int
	}{
		{"ada", http.MethodPost, "", body, http.StatusForbidden},
		{"ada", http.MethodPatch, "/small", `{"available":true}`, http.StatusForbidden},
		{"ada", http.MethodDelete, "/small", "", http.StatusForbidden},
		{"nobody", http.MethodGet, "", "", http.StatusUnauthorized},
		{"admin", http.MethodPost, "", body, http.StatusConflict},
		{"admin", http.MethodPost, "", `{"name":"m1.small","vcpus":1,"memory_mib":512}`, http.StatusBadRequest},
		{"admin", http.MethodPatch, "/small", `{"vcpus":4}`, http.StatusBadRequest}, // sizes are fixed
		{"admin", http.MethodPatch, "/large", `{"available":true}`, http.StatusNotFound},
	} {
		status, v := call(c.token, c.method, c.path, c.body)
		require.Equal(t, c.want, status, "%v %v", c, v)
	}
	status, v = call("admin", http.MethodDelete, "/small", "")
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, map[string]any{"id": "small", "deleted": true}, v)
	status, _ = call("ada", http.MethodGet, "/small", "")
	require.Equal(t, http.StatusNotFound, status)
}
