package rest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/gorilla/mux"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

type verifier map[string]*cloud.Caller

func (v verifier) Verify(_ context.Context, token string) (*cloud.Caller, error) {
	if c, ok := v[token]; ok {
		clone := *c
		return &clone, nil
	}
	return nil, fault.New(fault.Unauthenticated, "the token is not valid")
}

type thing struct {
	Name  string   `json:"name"`
	Count uint32   `json:"count"`
	Tags  []string `json:"tags"`
	Inner struct {
		Deep int64 `json:"deep"`
	} `json:"inner"`
}

func server(t *testing.T, log *strings.Builder) http.Handler {
	s := New(Options{
		Service: fault.VM, Name: "vm", Verifier: verifier{"good": {User: "ada"}}, Metrics: NewMetrics(prometheus.NewRegistry()),
		Ready: func(context.Context) error { return errors.New("no leader") }, Log: slog.New(slog.NewTextHandler(log, nil)),
	})
	s.Handle("POST", "/things", "/x/X", func(w *Response, r *http.Request) (any, error) {
		var in thing
		if _, err := Decode(r, &in); err != nil {
			return nil, err
		}
		w.Status = http.StatusCreated
		return map[string]any{"name": in.Name, "by": auth.CallerOf(r.Context()).Name()}, nil
	}, Takes(thing{}))
	s.HandleOpen("POST", "/open", "a test", func(_ *Response, r *http.Request) (any, error) {
		var in thing
		_, err := Decode(r, &in)
		return in.Name, err
	}, Takes(thing{}))
	s.Handle("GET", "/things/{id}", "/x/X", func(_ *Response, r *http.Request) (any, error) { return mux.Vars(r)["id"], nil })
	s.Handle("DELETE", "/things/{id}", "/x/X", func(*Response, *http.Request) (any, error) { return nil, fault.New(fault.NotFound, "no thing") })
	s.HandleOpen("POST", "/own", "a test", func(w *Response, _ *http.Request) (any, error) {
		w.Failure = "OWN_FAILED"
		return nil, errors.New("secret path /x")
	})
	s.Handle("GET", "/busy", "/x/X", func(*Response, *http.Request) (any, error) {
		return nil, fault.New(fault.Unavailable, "%s", strings.Repeat("é", 1<<20)).MayRetry()
	})
	s.Handle("GET", "/broken", "/x/X", func(*Response, *http.Request) (any, error) { return nil, errors.New("secret path /x") })
	s.Handle("GET", "/panics", "/x/X", func(*Response, *http.Request) (any, error) { panic("secret") })
	s.Handle("GET", "/late", "/x/X", func(*Response, *http.Request) (any, error) {
		return nil, fmt.Errorf("read: %w", context.DeadlineExceeded)
	})
	s.Handle("GET", "/full", "/x/X", func(*Response, *http.Request) (any, error) {
		return nil, fault.New(fault.ResourceExhausted, "no host fits").With("n1", "memory").WithReason("NO_HOST")
	})
	return s
}

func TestEnvelope(t *testing.T) {
	const good = "Bearer good"
	for _, c := range []struct {
		name, method, path, auth, body string
		header                         map[string]string
		status                         int
		code, says, data               string
	}{
		{name: "health", method: "GET", path: "/health", status: 200, data: `{"status":"healthy"}`},
		{name: "not ready", method: "GET", path: "/ready", status: 503, code: "SERVICE_UNAVAILABLE", says: "no leader"},
		{name: "created", method: "POST", path: "/things", auth: good, body: `{"name":"a","unknown":1}`, status: 201, data: `{"by":"ada","name":"a"}`},
		{name: "no token", method: "POST", path: "/things", body: `{}`, status: 401, code: "UNAUTHENTICATED", says: "Bearer"},
		{name: "bad token", method: "POST", path: "/things", auth: "Bearer x", body: `{}`, status: 401, code: "UNAUTHENTICATED"},
		{name: "unknown path", method: "GET", path: "/nowhere", status: 404, code: "NOT_FOUND", says: "/nowhere"},
		{name: "wrong method", method: "PUT", path: "/things", status: 405, code: "INVALID_ARGUMENT", says: "PUT"},
		{name: "broken JSON", method: "POST", path: "/things", auth: good, body: `{"name":`, status: 400, code: "INVALID_ARGUMENT", says: "not JSON"},
		{name: "trailing JSON", method: "POST", path: "/things", auth: good, body: `{}{}`, status: 400, code: "INVALID_ARGUMENT", says: "not JSON"},
		{name: "empty body", method: "POST", path: "/things", auth: good, status: 400, code: "INVALID_ARGUMENT", says: "empty"},
		{name: "wrong type", method: "POST", path: "/things", auth: good, body: `{"count":"many"}`, status: 400, code: "INVALID_ARGUMENT", says: "count: want a whole number from 0 to 4294967295, got string"},
		{name: "negative number", method: "POST", path: "/things", auth: good, body: `{"count":-1}`, status: 400, code: "INVALID_ARGUMENT", says: "count"},
		{name: "number that is too large", method: "POST", path: "/things", auth: good, body: `{"count":4294967296}`, status: 400, code: "INVALID_ARGUMENT", says: "count"},
		{name: "wrong type in a nested object", method: "POST", path: "/things", auth: good, body: `{"inner":{"deep":"x"}}`, status: 400, code: "INVALID_ARGUMENT", says: "inner.deep"},
		{name: "array wanted", method: "POST", path: "/things", auth: good, body: `{"tags":1}`, status: 400, code: "INVALID_ARGUMENT", says: "tags: want an array"},
		{name: "object wanted", method: "POST", path: "/things", auth: good, body: `[]`, status: 400, code: "INVALID_ARGUMENT", says: "an object"},
		{name: "too large", method: "POST", path: "/things", auth: good, body: `{"name":"` + strings.Repeat("x", 10<<20) + `"}`, status: 413, code: "INVALID_ARGUMENT", says: "1048576"},
		{name: "wrong Content-Type", method: "POST", path: "/things", auth: good, body: `a=b`, header: map[string]string{"Content-Type": "text/plain"}, status: 400, code: "INVALID_ARGUMENT", says: "application/json"},
		{name: "long idempotency key", method: "POST", path: "/things", auth: good, body: `{}`, header: map[string]string{"Idempotency-Key": strings.Repeat("k", 256)}, status: 400, code: "INVALID_ARGUMENT"},
		{name: "not UTF-8", method: "POST", path: "/things", auth: good, body: "{\"name\":\"\xff\"}", status: 400, code: "INVALID_ARGUMENT", says: "not UTF-8"},
		{name: "nested too deep", method: "POST", path: "/things", auth: good, body: strings.Repeat(`{"a":`, 200_000), status: 400, code: "INVALID_ARGUMENT", says: "not JSON"},
		{name: "a number of 500 KB", method: "POST", path: "/things", auth: good, body: `{"count":1` + strings.Repeat("0", 500_000) + `}`, status: 400, code: "INVALID_ARGUMENT", says: "count: want a whole number"},
		{name: "a fraction", method: "POST", path: "/things", auth: good, body: `{"count":1.0}`, status: 400, code: "INVALID_ARGUMENT", says: "count"},
		{name: "null", method: "POST", path: "/things", auth: good, body: `null`, status: 201, data: `{"by":"ada","name":""}`},
		{name: "only spaces", method: "POST", path: "/things", auth: good, body: "  ", status: 400, code: "INVALID_ARGUMENT", says: "not JSON"},
		{name: "no Content-Type, with a token", method: "POST", path: "/things", auth: good, body: `{"name":"a"}`, header: map[string]string{"Content-Type": ""}, status: 201, data: `{"by":"ada","name":"a"}`},
		{name: "Content-Type with a charset", method: "POST", path: "/things", auth: good, body: `{"name":"a"}`, header: map[string]string{"Content-Type": "application/json; charset=utf-8"}, status: 201, data: `{"by":"ada","name":"a"}`},
		{name: "no token and broken JSON", method: "POST", path: "/things", body: `{"name":`, status: 401, code: "UNAUTHENTICATED"},
		{name: "idempotency key that is not printable", method: "POST", path: "/things", auth: good, body: `{}`, header: map[string]string{"Idempotency-Key": "a\xff"}, status: 400, code: "INVALID_ARGUMENT", says: "printable"},
		{name: "thing by ID", method: "GET", path: "/things/x", auth: good, status: 200, data: `"x"`},
		{name: "HEAD of a thing", method: "HEAD", path: "/things/x", auth: good, status: 200, data: `"x"`},
		{name: "two slashes", method: "GET", path: "//things/x", auth: good, status: 404, code: "NOT_FOUND"},
		{name: "a slash too many", method: "GET", path: "/things//x", auth: good, status: 404, code: "NOT_FOUND"},
		{name: "a slash at the end", method: "GET", path: "/things/", auth: good, status: 404, code: "NOT_FOUND"},
		{name: "path through the parent directory", method: "GET", path: "/things/../broken", auth: good, status: 404, code: "NOT_FOUND"},
		{name: "two dots as an ID", method: "GET", path: "/things/..", auth: good, status: 200, data: `".."`},
		{name: "an escaped slash is part of the id", method: "GET", path: "/things/..%2fbroken", auth: good, status: 200, data: `"..%2fbroken"`},
		{name: "an escaped name is another path", method: "GET", path: "/%74hings/x", auth: good, status: 404, code: "NOT_FOUND"},
		{name: "error code set by the handler", method: "POST", path: "/own", body: `{}`, status: 500, code: "OWN_FAILED", says: "internal error, request "},
		{name: "unavailable", method: "GET", path: "/busy", auth: good, status: 500, code: "INTERNAL", says: "éé …"},
		{name: "open route", method: "POST", path: "/open", body: `{"name":"a"}`, status: 200, data: `"a"`},
		{name: "open route from a web page", method: "POST", path: "/open", body: `{}`, header: map[string]string{"Origin": "https://evil.example"}, status: 403, code: "FORBIDDEN"},
		{name: "open route from another site", method: "POST", path: "/open", body: `{"name":"a"}`, header: map[string]string{"Sec-Fetch-Site": "cross-site"}, status: 403, code: "FORBIDDEN"},
		{name: "open route from another host of the site", method: "POST", path: "/open", body: `{"name":"a"}`, header: map[string]string{"Sec-Fetch-Site": "same-site"}, status: 403, code: "FORBIDDEN"},
		{name: "open route from the address bar", method: "POST", path: "/open", body: `{"name":"a"}`, header: map[string]string{"Sec-Fetch-Site": "none"}, status: 200, data: `"a"`},
		{name: "open route from the same origin", method: "POST", path: "/open", body: `{"name":"a"}`, header: map[string]string{"Sec-Fetch-Site": "same-origin"}, status: 200, data: `"a"`},
		{name: "open route by a foreign host name, as in DNS rebinding", method: "POST", path: "http://evil.example/open", body: `{}`, status: 403, code: "FORBIDDEN"},
		{name: "open route by a host name over TLS", method: "POST", path: "https://cloud.example/open", body: `{"name":"a"}`, status: 200, data: `"a"`},
		{name: "open route from a web page over TLS", method: "POST", path: "https://cloud.example/open", body: `{}`, header: map[string]string{"Origin": "https://cloud.example"}, status: 403, code: "FORBIDDEN"},
		{name: "open route without a Content-Type", method: "POST", path: "/open", body: `{}`, header: map[string]string{"Content-Type": ""}, status: 400, code: "INVALID_ARGUMENT"},
		{name: "internal error", method: "GET", path: "/broken", auth: good, status: 500, code: "INTERNAL", says: "internal error, request "},
		{name: "panic", method: "GET", path: "/panics", auth: good, status: 500, code: "INTERNAL", says: "internal error, request "},
		{name: "deadline exceeded", method: "GET", path: "/late", auth: good, status: 500, code: "INTERNAL", says: "in time"},
		{name: "error details", method: "GET", path: "/full", auth: good, status: 429, code: "RESOURCE_EXHAUSTED", says: "no host fits"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log strings.Builder
			target := c.path
			if !strings.HasPrefix(target, "http") {
				target = "http://127.0.0.1:8084" + target
			}
			r := httptest.NewRequest(c.method, target, strings.NewReader(c.body))
			r.Header.Set("Content-Type", "application/json")
			r.Header.Set("Authorization", c.auth)
			for k, v := range c.header {
				r.Header.Set(k, v)
			}
			w := httptest.NewRecorder()
			server(t, &log).ServeHTTP(w, r)
			require.Equal(t, c.status, w.Code, w.Body)
			require.Equal(t, "application/json", w.Header().Get("Content-Type"))
			var body struct {
				Data  json.RawMessage
				Error struct {
					Code, Message string
					Details       map[string]any
				}
				Meta struct {
					RequestID string `json:"request_id"`
					Timestamp string
				}
			}
			text, err := io.ReadAll(w.Body)
			require.NoError(t, err)
			require.NoError(t, json.Unmarshal(text, &body))
			id, err := uuid.Parse(body.Meta.RequestID)
			require.NoError(t, err)
			require.EqualValues(t, 4, id.Version())
			at, err := time.Parse(time.RFC3339, body.Meta.Timestamp)
			require.NoError(t, err)
			require.Equal(t, time.UTC, at.Location())
			require.Equal(t, c.data, string(body.Data))
			require.Equal(t, c.code, body.Error.Code)
			require.Contains(t, body.Error.Message, c.says)
			require.NotContains(t, string(text), "secret")
			require.Less(t, len(text), 4<<10, "the length of a response must not grow with the request")
			require.Equal(t, c.name == "unavailable" || c.name == "deadline exceeded", w.Header().Get("Retry-After") != "")
			if c.status == http.StatusMethodNotAllowed {
				require.Equal(t, "POST", w.Header().Get("Allow"))
			}
			if c.name == "internal error" || c.name == "panic" {
				require.Contains(t, log.String(), "secret", "the cause of an internal error must be logged")
				require.Contains(t, log.String(), body.Meta.RequestID)
			}
			if c.name == "error details" {
				require.Equal(t, map[string]any{"n1": "memory", "reason": "NO_HOST"}, body.Error.Details)
			}
		})
	}
}
