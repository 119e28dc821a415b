package main

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMetricsAreForLoopback(t *testing.T) {
	h := localMetrics(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }), http.NotFoundHandler(),
		[]string{"cloud.example"})
	const near, far = "127.0.0.1", "10.0.0.1"
	for name, c := range map[string]struct {
		local, remote, host, site string
		status                    int
	}{
		"loopback":                 {near, near, "127.0.0.1:8084", "", http.StatusTeapot},
		"localhost":                {near, near, "localhost:8084", "", http.StatusTeapot},
		"a configured name":        {near, near, "cloud.example:8084", "", http.StatusTeapot},
		"IPv6":                     {"::1", "::1", "[::1]:8084", "", http.StatusTeapot},
		"another host":             {far, far, "10.0.0.1:8084", "", http.StatusNotFound},
		"source bound to loopback": {far, near, "10.0.0.1:8084", "", http.StatusNotFound},
		"a foreign host name, as in DNS rebinding": {near, near, "evil.example:8084", "", http.StatusForbidden},
		"a web page": {near, near, "127.0.0.1:8084", "cross-site", http.StatusForbidden},
	} {
		r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
		r.RemoteAddr, r.Host = net.JoinHostPort(c.remote, "1"), c.host
		if c.site != "" {
			r.Header.Set("Sec-Fetch-Site", c.site)
		}
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.ParseIP(c.local), Port: 8084}))
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		require.Equal(t, c.status, w.Code, name)
	}
}
