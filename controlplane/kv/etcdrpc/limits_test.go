package etcdrpc

import (
	"context"
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// TestOpenStreamsAreLimited checks the limits for one client and for all clients of a member. Streams that have ended
// must not count.
func TestOpenStreamsAreLimited(t *testing.T) {
	from := func(address string) context.Context {
		return peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(address), Port: 1}})
	}
	o := &openStreams{}
	var ends []func()
	fill := func(ctx context.Context, user string, n int) {
		for range n {
			done, err := o.acquire(ctx, user)
			require.NoError(t, err)
			ends = append(ends, done)
		}
	}
	refused := func(ctx context.Context, user, text string) {
		t.Helper()
		_, err := o.acquire(ctx, user)
		require.Equal(t, codes.ResourceExhausted, status.Code(err))
		require.ErrorContains(t, err, text)
	}
	fill(from("192.0.2.1"), "", maxClientStreams)
	refused(from("192.0.2.1"), "", "address 192.0.2.1 has 2048 streams open")
	fill(from("192.0.2.1"), "ada", maxClientStreams)
	refused(from("192.0.2.2"), "ada", "user ada has 2048 streams open")
	for i := range (maxStreams - 2*maxClientStreams) / maxClientStreams {
		fill(from(fmt.Sprint("192.0.2.", 10+i)), "", maxClientStreams)
	}
	refused(from("192.0.2.99"), "", "all clients together have 8192 streams open")
	for _, done := range ends {
		done()
	}
	require.Zero(t, o.all)
	require.Empty(t, o.clients)
}
