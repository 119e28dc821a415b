package rpc

import (
	"context"
	"net"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"
)

// conn is a connection on which the unsent bytes of streams are counted.
type conn struct {
	net.Conn
	s     *Streams
	key   string
	flows map[*flow]struct{} // guarded by Streams.mu
}

// Close closes the connection and stops counting the unsent bytes of its streams, because gRPC does not report that it
// has released them.
func (c *conn) Close() error {
	err := c.Conn.Close()
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.s.conns[c.key] == c {
		delete(c.s.conns, c.key)
	}
	for f := range c.flows {
		f.lose()
	}
	return err
}

// lose subtracts all unsent bytes of a stream whose connection is closed. Later releases of these bytes by gRPC are
// ignored.
func (f *flow) lose() {
	f.lost = true
	f.free(f.buffered)
}

// connKey returns the map key of a connection: its remote and local address.
func connKey(remote, local net.Addr) string { return remote.String() + " " + local.String() }

// connOf returns the connKey of the connection that a call came on, or "" if it is unknown.
func connOf(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil || p.LocalAddr == nil {
		return ""
	}
	return connKey(p.Addr, p.LocalAddr)
}

// connCounter adds each connection that the embedded credentials accept to s.conns.
type connCounter struct {
	credentials.TransportCredentials
	s *Streams
}

// countConns wraps the credentials of a listener in a connCounter. Nil credentials mean plaintext.
func countConns(c credentials.TransportCredentials, s *Streams) credentials.TransportCredentials {
	if c == nil {
		c = insecure.NewCredentials()
	}
	return connCounter{c, s}
}

// ServerHandshake implements credentials.TransportCredentials. It returns the connection as a conn that is registered
// in c.s.conns.
func (c connCounter) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secure, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return secure, info, err
	}
	one := &conn{Conn: secure, s: c.s, key: connKey(secure.RemoteAddr(), secure.LocalAddr()), flows: map[*flow]struct{}{}}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.conns[one.key] = one
	return one, info, nil
}

// Clone implements credentials.TransportCredentials.
func (c connCounter) Clone() credentials.TransportCredentials {
	return connCounter{c.TransportCredentials.Clone(), c.s}
}
