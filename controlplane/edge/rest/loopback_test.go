package rest

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFromLoopback checks that a client counts as one on this host only if both addresses of its connection are
// loopback addresses.
func TestFromLoopback(t *testing.T) {
	for _, c := range []struct {
		name          string
		local, remote string
		want          bool
	}{
		{"on this host", "127.0.0.1", "127.0.0.1:1000", true},
		{"IPv6", "::1", "[::1]:1000", true},
		{"another host", "127.0.0.1", "192.0.2.1:1000", false},
		{"remote loopback address, but another local one", "192.0.2.2", "127.0.0.1:1000", false},
		{"no remote address", "127.0.0.1", "", false},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.RemoteAddr = c.remote
		local := &net.TCPAddr{IP: net.ParseIP(c.local), Port: 8083}
		require.Equal(t, c.want, FromLoopback(r.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, local))), c.name)
	}
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.RemoteAddr = "127.0.0.1:1000"
	require.False(t, FromLoopback(r), "a connection without a known local address")
}
