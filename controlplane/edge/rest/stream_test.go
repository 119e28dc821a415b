package rest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// streams returns a server with streamed and verbatim responses. The path selects their length and whether they are
// complete, or end with an internal error or a fault.
func streams(t *testing.T, log io.Writer) *httptest.Server {
	s := New(Options{
		Service: fault.KV, Name: "kv", Metrics: NewMetrics(prometheus.NewRegistry()), Log: slog.New(slog.NewTextHandler(log, nil)), MaxBody: 4 << 20,
		Hosts: []string{"keys.example"},
	})
	broken := errors.New("the disk is gone")
	lengths := map[string]int{"short": 10, "long": 1 << 20}
	ends := map[string]error{"complete": nil, "error": broken, "fault": fault.New(fault.BadGateway, "the leader is gone")}
	for length, n := range lengths {
		for how, err := range ends {
			s.HandleOpen("GET", "/stream/"+length+"/"+how, "a test", func(w *Response, _ *http.Request) (any, error) {
				w.Header().Set("X-Note", "n")
				return Stream(func(out io.Writer) error {
					io.WriteString(out, `"`+strings.Repeat("x", n)+`"`)
					return err
				}), nil
			})
			s.HandleOpen("GET", "/verbatim/"+length+"/"+how, "a test", func(w *Response, _ *http.Request) (any, error) {
				w.Status = http.StatusTeapot
				body := io.Reader(strings.NewReader(strings.Repeat("y", n)))
				if err != nil {
					body = io.MultiReader(body, failing{err})
				}
				return Verbatim{io.NopCloser(body)}, nil
			})
		}
	}
	s.HandleOpen("PUT", "/large", "a test", func(_ *Response, r *http.Request) (any, error) {
		var in thing
		_, err := Decode(r, &in)
		return len(in.Name), err
	})
	s.HandleBare("GET", "/bare", "a test", func(*Response, *http.Request) (any, error) { return "in", nil })
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return server
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// TestStreams checks that a streamed response is complete, or an error response, or interrupted such that the client
// gets an error.
func TestStreams(t *testing.T) {
	var log bytes.Buffer
	server := streams(t, &log)
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	for _, c := range []struct {
		path   string
		status int
		says   string
		size   int
		cut    bool
	}{
		{path: "/stream/short/complete", status: 200, says: `{"data":"xxxxxxxxxx","meta":{"request_id":"`},
		{path: "/stream/long/complete", status: 200, says: `{"data":"xx`, size: 1 << 20},
		{path: "/stream/short/error", status: 500, says: "INTERNAL_ERROR"},
		{path: "/stream/short/fault", status: 502, says: "LEADER_PROXY_FAILED"},
		{path: "/stream/long/error", status: 200, cut: true},
		{path: "/stream/long/fault", status: 200, cut: true},
		{path: "/verbatim/short/complete", status: 418, says: "yyyyyyyyyy"},
		{path: "/verbatim/long/complete", status: 418, size: 1 << 20},
		{path: "/verbatim/short/fault", status: 502, says: "LEADER_PROXY_FAILED"},
		{path: "/verbatim/long/error", status: 418, cut: true},
	} {
		t.Run(c.path, func(t *testing.T) {
			resp, err := http.Get(server.URL + c.path)
			require.NoError(t, err)
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			require.Equal(t, c.status, resp.StatusCode)
			require.Equal(t, "application/json", resp.Header.Get("Content-Type"))
			if c.cut {
				require.Error(t, err, "a client must get an error if the response is incomplete")
				return
			}
			require.NoError(t, err)
			require.Contains(t, string(body), c.says)
			require.GreaterOrEqual(t, len(body), c.size)
			require.NotContains(t, string(body), "disk")
		})
	}
	head, err := http.Head(server.URL + "/stream/long/error")
	require.NoError(t, err)
	require.Equal(t, 200, head.StatusCode)
	require.Equal(t, "n", head.Header.Get("X-Note"))
	server.Close()
	require.Contains(t, log.String(), "the disk is gone")
}

// TestSlowHandlers checks that a handler may take longer than the server's ReadTimeout and WriteTimeout: its context must
// not be canceled, and the client must get the response.
func TestSlowHandlers(t *testing.T) {
	const limit = 100 * time.Millisecond
	s := New(Options{
		Service: fault.VM, Name: "vm", Metrics: NewMetrics(prometheus.NewRegistry()), Log: slog.New(slog.DiscardHandler),
	})
	wait := func(r *http.Request) (any, error) {
		select {
		case <-r.Context().Done():
			return nil, context.Cause(r.Context())
		case <-time.After(3 * limit):
			return "slow", nil
		}
	}
	s.HandleOpen("GET", "/slow", "a test", func(_ *Response, r *http.Request) (any, error) { return wait(r) })
	s.HandleOpen("POST", "/slow", "a test", func(_ *Response, r *http.Request) (any, error) {
		if _, err := Decode(r, &thing{}); err != nil {
			return nil, err
		}
		return wait(r)
	})
	server := httptest.NewUnstartedServer(s)
	server.Config.ReadTimeout, server.Config.WriteTimeout = limit, limit
	server.Start()
	t.Cleanup(server.Close)
	for range 2 { // the second request uses the same connection
		for _, method := range []string{"GET", "POST"} {
			body := io.Reader(http.NoBody)
			if method == "POST" {
				body = strings.NewReader(`{"name": "a"}`)
			}
			r, err := http.NewRequest(method, server.URL+"/slow", body)
			require.NoError(t, err)
			r.Header.Set("Content-Type", "application/json")
			resp, err := http.DefaultClient.Do(r)
			require.NoError(t, err, method)
			text, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			require.NoError(t, err, method)
			require.Equal(t, http.StatusOK, resp.StatusCode, "%s: %s", method, text)
			require.Contains(t, string(text), `"data":"slow"`)
		}
	}
}

// TestServiceLimits checks the options of a server: the limit of the body and further host names for open routes. A
// route of HandleBare must have no checks.
func TestServiceLimits(t *testing.T) {
	server := streams(t, io.Discard)
	ask := func(method, path, host, origin, body string) int {
		r, err := http.NewRequest(method, server.URL+path, strings.NewReader(body))
		require.NoError(t, err)
		r.Host = host
		if body != "" {
			r.Header.Set("Content-Type", "application/json")
		}
		if origin != "" {
			r.Header.Set("Origin", origin)
		}
		resp, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		defer resp.Body.Close()
		return resp.StatusCode
	}
	large := func(n int) string { return `{"name":"` + strings.Repeat("x", n) + `"}` }
	require.Equal(t, 200, ask("PUT", "/large", "127.0.0.1", "", large(3<<20)))
	require.Equal(t, 413, ask("PUT", "/large", "127.0.0.1", "", large(4<<20)))
	require.Equal(t, 200, ask("PUT", "/large", "keys.example:8081", "", large(1)))
	require.Equal(t, 403, ask("PUT", "/large", "evil.example", "", large(1)))
	require.Equal(t, 200, ask("GET", "/bare", "evil.example", "https://evil.example", ""), "a route of HandleBare must not check Host and Origin")
	require.Equal(t, 400, ask("PUT", "/large", "127.0.0.1", "", ""), "a request without a body needs no Content-Type, but the handler requires a body")
}
