package transport

import (
	"context"
	"crypto/tls"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mtls"
)

// TestVerify checks that Verify returns nil only if the server at the address presents the certificate of the given
// member.
func TestVerify(t *testing.T) {
	w := newTestCluster(t, 3)
	one, two, three := w.servers[1].mesh, w.servers[2].mesh.Members()[1], w.servers[1].mesh.Members()[3]
	require.NoError(t, w.servers[2].mesh.Verify(limited(t), two, 1))
	require.NoError(t, one.Verify(limited(t), three, 3))
	require.ErrorContains(t, one.Verify(limited(t), three, 2), "member/3 answers at the address of member 2")

	// Neither a certificate for the same member from another cluster's authority, nor a host's certificate from this
	// cluster's authority, may be accepted.
	for name, source := range map[string]mtls.Source{
		"member of another cluster": issued(t, authority(t, "other"), mtls.Member, "3", time.Now()),
		"host of this cluster":      issued(t, one.opts.Authority, mtls.Node, "3", time.Now()),
	} {
		c, err := source()
		require.NoError(t, err)
		l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{*c}, NextProtos: []string{"h2"}})
		require.NoError(t, err)
		defer l.Close()
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				go func() { conn.(*tls.Conn).Handshake(); conn.Close() }()
			}
		}()
		require.Error(t, one.Verify(limited(t), l.Addr().String(), 3), name)
	}

	// If the server does not respond, Verify must return when the caller's context ends.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.Error(t, one.Verify(ctx, silent.Addr().String(), 3))
}
