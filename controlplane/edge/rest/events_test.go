package rest

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestEvents reads streams of events that end in different ways, and counts the streams that were opened and left.
func TestEvents(t *testing.T) {
	opened, left := 0, 0
	s := New(Options{
		Service: fault.VM, Name: "vm", Metrics: NewMetrics(prometheus.NewRegistry()), Log: slog.New(slog.DiscardHandler),
		Verifier: verifier{"good": {User: "ada"}, "many": {User: "bob"}},
		OpenStream: func(ctx context.Context, token string) (context.Context, func(), error) {
			if token == "many" {
				return nil, nil, fault.New(fault.ResourceExhausted, "too many streams")
			}
			opened++
			ctx, end := context.WithCancelCause(ctx)
			ctx = context.WithValue(ctx, cancelKey{}, end)
			return ctx, func() { left++; end(nil) }, nil
		},
	})
	s.HandleEvents("/refused", "/x/X", func(*http.Request, func(Event) error) error { return fault.New(fault.NotFound, "no thing") })
	s.HandleEvents("/none", "/x/X", func(*http.Request, func(Event) error) error { return nil })
	s.HandleEvents("/two", "/x/X", func(_ *http.Request, send func(Event) error) error {
		return errors.Join(send(Event{"made", map[string]int{"n": 1}}), send(Event{"gone", "a\nb"}))
	})
	s.HandleEvents("/late", "/x/X", func(_ *http.Request, send func(Event) error) error {
		if err := send(Event{"made", 1}); err != nil {
			return err
		}
		return fault.New(fault.OutOfRange, "too far behind").WithReason("HISTORY_EXPIRED")
	})
	s.HandleEvents("/revoked", "/x/X", func(r *http.Request, send func(Event) error) error {
		if err := send(Event{"made", 1}); err != nil {
			return err
		}
		r.Context().Value(cancelKey{}).(context.CancelCauseFunc)(fault.New(fault.Unauthenticated, "the token is revoked"))
		<-r.Context().Done()
		return r.Context().Err()
	})
	server := httptest.NewServer(s)
	defer server.Close()
	for _, c := range []struct {
		method, path, token string
		status              int
		body, contains      string
	}{
		{method: "GET", path: "/two", token: "good", status: 200, body: "event: made\ndata: {\"n\":1}\n\nevent: gone\ndata: \"a\\nb\"\n\n"},
		{method: "GET", path: "/none", token: "good", status: 200},
		{method: "HEAD", path: "/two", token: "good", status: 200},
		{method: "HEAD", path: "/refused", token: "good", status: 404},
		{method: "GET", path: "/refused", token: "good", status: 404, contains: `"code":"NOT_FOUND"`},
		{method: "GET", path: "/late", token: "good", status: 200, contains: "event: error\ndata: {\"status\":500,"},
		{method: "GET", path: "/revoked", token: "good", status: 200, contains: "event: error\ndata: {\"status\":401,\"code\":\"UNAUTHENTICATED\",\"message\":\"the token is revoked\"}\n\n"},
		{method: "GET", path: "/two", token: "bad", status: 401, contains: "UNAUTHENTICATED"},
		{method: "GET", path: "/two", token: "many", status: 429, contains: "too many streams"},
	} {
		q, err := http.NewRequestWithContext(t.Context(), c.method, server.URL+c.path, nil)
		require.NoError(t, err)
		q.Header.Set("Authorization", "Bearer "+c.token)
		resp, err := server.Client().Do(q)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		resp.Body.Close()
		require.Equal(t, c.status, resp.StatusCode, "%s %s: %s", c.method, c.path, body)
		if c.contains != "" {
			require.Contains(t, string(body), c.contains, "%s %s", c.method, c.path)
		} else {
			require.Equal(t, c.body, string(body), "%s %s", c.method, c.path)
		}
		if c.status == 200 {
			require.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
		}
	}
	require.Equal(t, opened, left, "each stream must be left")
	require.Equal(t, 7, opened)
}

type cancelKey struct{}

// TestEventsOutlastTheTimeLimits checks that the server's time limits for a request and a response do not end a stream.
func TestEventsOutlastTheTimeLimits(t *testing.T) {
	const limit = 50 * time.Millisecond
	s := New(Options{
		Service: fault.VM, Name: "vm", Metrics: NewMetrics(prometheus.NewRegistry()), Log: slog.New(slog.DiscardHandler),
		Verifier: verifier{"good": {User: "ada"}},
	})
	s.HandleEvents("/slow", "/x/X", func(r *http.Request, send func(Event) error) error {
		select {
		case <-r.Context().Done():
			return r.Context().Err()
		case <-time.After(5 * limit):
			return send(Event{"late", 1})
		}
	})
	server := httptest.NewUnstartedServer(s)
	server.Config.ReadTimeout, server.Config.WriteTimeout = limit, limit
	server.Start()
	defer server.Close()
	q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/slow", nil)
	require.NoError(t, err)
	q.Header.Set("Authorization", "Bearer good")
	resp, err := server.Client().Do(q)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, "event: late\ndata: 1\n\n", string(body))
}
