package openloop

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func get(path string, target, want int) Call {
	return Call{Kind: path, Target: target, Request: fmt.Appendf(nil, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path), Want: want}
}

func serve(t *testing.T, h http.HandlerFunc) string {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func TestCallsReuseConnections(t *testing.T) {
	var conns sync.Map
	var asked atomic.Int64
	addr := serve(t, func(w http.ResponseWriter, r *http.Request) {
		conns.Store(r.RemoteAddr, true)
		asked.Add(1)
		fmt.Fprint(w, strings.Repeat("x", 5000)) // so long that the response is chunked
	})
	var calls []Call
	for i := range 100 {
		calls = append(calls, get(fmt.Sprintf("/%d", i%2), i%2, 200))
	}
	r, err := Run(t.Context(), Options{Targets: []string{addr, addr}, Conns: 3, Rate: 1e6, Calls: calls})
	require.NoError(t, err)
	require.NoError(t, r.First)
	require.Len(t, r.Latencies["/0"], 50)
	require.Len(t, r.Latencies["/1"], 50)
	require.Len(t, r.Late, 100)
	require.EqualValues(t, 100, asked.Load())
	n := 0
	conns.Range(func(any, any) bool { n++; return true })
	require.LessOrEqual(t, n, 6)
}

func TestUnexpectedStatusFailsOneCall(t *testing.T) {
	addr := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/bad" {
			http.Error(w, "no such luck", http.StatusTeapot)
		}
	})
	r, err := Run(t.Context(), Options{Targets: []string{addr}, Conns: 1, Rate: 1e6, Calls: []Call{get("/bad", 0, 200), get("/good", 0, 200)}})
	require.NoError(t, err)
	require.ErrorContains(t, r.First, "no such luck")
	require.Equal(t, map[string]int{"/bad": 1}, r.Failed)
	require.Len(t, r.Latencies["/good"], 1)
}

// TestLatencyCountsFromDueTime stalls the server during the first of two requests, and checks that the second request,
// which becomes due meanwhile, is measured from when it was due.
func TestLatencyCountsFromDueTime(t *testing.T) {
	gate := make(chan struct{})
	came := make(chan struct{}, 1)
	addr := serve(t, func(http.ResponseWriter, *http.Request) { came <- struct{}{}; <-gate })
	go func() { <-came; close(gate); <-came }()
	r, err := Run(t.Context(), Options{Targets: []string{addr}, Conns: 1, Rate: 1e6, Calls: []Call{get("/", 0, 200), get("/", 0, 200)}})
	require.NoError(t, err)
	require.Len(t, r.Latencies["/"], 2)
	// The second request was due at once but had to wait for the first response, since there is one connection. The
	// millisecond is for the time between the two due times.
	require.Greater(t, r.Late[1], r.Latencies["/"][0]-time.Millisecond)
}

func TestInvalidOptions(t *testing.T) {
	_, err := Run(t.Context(), Options{})
	require.Error(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Run(ctx, Options{Targets: []string{"127.0.0.1:1"}, Conns: 1, Rate: 1, Calls: []Call{get("/", 0, 200)}})
	require.ErrorIs(t, err, context.Canceled)
	r, err := Run(t.Context(), Options{Targets: []string{"127.0.0.1:1"}, Conns: 1, Rate: 1e6, Calls: []Call{get("/", 0, 200)}})
	require.NoError(t, err)
	require.Error(t, r.First, "a call to a closed port must fail")
}
