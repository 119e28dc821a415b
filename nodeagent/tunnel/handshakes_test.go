package tunnel

import (
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakeConn is a connection that only has an address and can be closed.
type fakeConn struct {
	net.Conn
	from   string
	closed bool
}

func (c *fakeConn) Close() error { c.closed = true; return nil }
func (c *fakeConn) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.from))
}

// TestHandshakesOfOtherHosts opens many connections from another host during a handshake of the peer. Only connections
// of the other host are closed, the oldest first.
func TestHandshakesOfOtherHosts(t *testing.T) {
	var h handshakes
	peer := &fakeConn{from: "192.0.2.1:1"}
	h.add(peer)
	var others []*fakeConn
	for range 3 * maxHandshakes {
		others = append(others, &fakeConn{from: "192.0.2.2:1"})
		h.add(others[len(others)-1])
	}
	second := &fakeConn{from: "192.0.2.1:2"}
	h.add(second)
	require.Len(t, h.all, maxHandshakes)
	require.False(t, peer.closed)
	require.False(t, second.closed)
	open := maxHandshakes - 2
	for i, c := range others {
		require.Equal(t, i < len(others)-open, c.closed, i)
	}
	h.remove(peer)
	require.NotContains(t, h.all, net.Conn(peer))
}
