// Package split serves gRPC and HTTP/1 on one port. Ports for etcd's clients need it, because etcd does so, and so does
// the port of network.v1. The main type is Splitter.
package split

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
)

// Splitter shares one listener between gRPC and HTTP/1. Without TLS, a connection that starts with the HTTP/2 preface
// is for gRPC. With TLS, the negotiated ALPN protocol decides.
type Splitter struct {
	listener net.Listener
	tls      *tls.Config // nil without TLS
	grpc     *subListener
	http     *subListener

	mu      sync.Mutex
	pending map[net.Conn]struct{} // connections whose protocol is not known yet
	done    bool
	work    sync.WaitGroup
}

// Limits of connections whose protocol is not known yet: the maximum time to detect the protocol, and the maximum
// number of these connections at a time.
const (
	detectTimeout = 10 * time.Second
	maxPending    = 1024
)

// preface is the start of an HTTP/2 connection without TLS (RFC 9113, 3.4).
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// New creates a Splitter, which owns the listener from then on. If config is nil, connections use no TLS.
func New(listener net.Listener, config *tls.Config) *Splitter {
	s := &Splitter{listener: listener, pending: map[net.Conn]struct{}{}}
	if config != nil {
		s.tls = config.Clone()
		s.tls.NextProtos = []string{"h2", "http/1.1"}
	}
	s.grpc, s.http = newSubListener(listener.Addr()), newSubListener(listener.Addr())
	return s
}

// GRPC returns the listener for a gRPC server, which must use the transport credentials of Credentials.
func (s *Splitter) GRPC() net.Listener { return s.grpc }

// HTTP returns the listener for an HTTP server.
func (s *Splitter) HTTP() net.Listener { return s.http }

// Serve accepts connections and passes them to the listeners GRPC and HTTP, until the Splitter is closed or the
// listener fails.
func (s *Splitter) Serve() error {
	defer s.work.Wait()
	defer s.closeAll()
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			var temporary interface{ Temporary() bool }
			if errors.As(err, &temporary) && temporary.Temporary() {
				time.Sleep(10 * time.Millisecond) // Accept may succeed later: file descriptors may have run out
				continue
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.done {
				return nil
			}
			return err
		}
		s.mu.Lock()
		if s.done || len(s.pending) >= maxPending {
			s.mu.Unlock()
			conn.Close()
			continue
		}
		s.pending[conn] = struct{}{}
		s.work.Add(1)
		s.mu.Unlock()
		go s.detect(conn)
	}
}

// Close closes the listener, which makes Serve return.
func (s *Splitter) Close() error {
	s.mu.Lock()
	s.done = true
	s.mu.Unlock()
	return s.listener.Close()
}

func (s *Splitter) closeAll() {
	s.mu.Lock()
	s.done = true
	for conn := range s.pending {
		conn.Close()
	}
	s.mu.Unlock()
	s.grpc.Close()
	s.http.Close()
}

// detect detects the protocol of a connection and passes it to the gRPC or HTTP listener.
func (s *Splitter) detect(conn net.Conn) {
	defer s.work.Done()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.pending, conn)
	}()
	if conn.SetDeadline(time.Now().Add(detectTimeout)) != nil {
		conn.Close()
		return
	}
	var detected net.Conn
	target := s.http
	if s.tls != nil {
		t := tls.Server(conn, s.tls)
		if t.Handshake() != nil {
			conn.Close()
			return
		}
		if t.ConnectionState().NegotiatedProtocol == "h2" {
			target = s.grpc
		}
		detected = t
	} else {
		first := make([]byte, 4) // no HTTP/1 method begins with the first 4 bytes of the preface
		n, err := io.ReadFull(conn, first)
		if err != nil {
			conn.Close()
			return
		}
		if bytes.HasPrefix([]byte(preface), first[:n]) {
			target = s.grpc
		}
		detected = &prefixedConn{Conn: conn, prefix: first}
	}
	if conn.SetDeadline(time.Time{}) != nil || !target.deliver(detected) {
		conn.Close()
	}
}

// prefixedConn is a connection whose first bytes were already read.
type prefixedConn struct {
	net.Conn
	prefix []byte
}

func (c *prefixedConn) Read(b []byte) (int, error) {
	if len(c.prefix) > 0 {
		n := copy(b, c.prefix)
		c.prefix = c.prefix[n:]
		return n, nil
	}
	return c.Conn.Read(b)
}

// subListener is a net.Listener whose Accept returns the connections passed to deliver.
type subListener struct {
	addr  net.Addr
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newSubListener(addr net.Addr) *subListener {
	return &subListener{addr: addr, conns: make(chan net.Conn), done: make(chan struct{})}
}

func (h *subListener) deliver(conn net.Conn) bool {
	select {
	case h.conns <- conn:
		return true
	case <-h.done:
		return false
	}
}

// Accept implements net.Listener.
func (h *subListener) Accept() (net.Conn, error) {
	select {
	case conn := <-h.conns:
		return conn, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (h *subListener) Close() error {
	h.once.Do(func() { close(h.done) })
	return nil
}

// Addr implements net.Listener.
func (h *subListener) Addr() net.Addr { return h.addr }

// Credentials returns the transport credentials for a gRPC server behind a Splitter. With them, the gRPC server gets
// the client's certificate from the TLS connection.
func Credentials() credentials.TransportCredentials { return splitCredentials{} }

type splitCredentials struct{}

// ServerHandshake implements credentials.TransportCredentials. The Splitter has already made the TLS handshake.
func (splitCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	t, ok := conn.(*tls.Conn)
	if !ok {
		return conn, plaintextInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}}, nil
	}
	return conn, credentials.TLSInfo{
		State: t.ConnectionState(), CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
	}, nil
}

// plaintextInfo is the AuthInfo of a connection without TLS.
type plaintextInfo struct{ credentials.CommonAuthInfo }

// AuthType implements credentials.AuthInfo.
func (plaintextInfo) AuthType() string { return "insecure" }

// ClientHandshake implements credentials.TransportCredentials. It always fails, since the credentials are for servers.
func (splitCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("these credentials are for servers")
}

// Info implements credentials.TransportCredentials.
func (splitCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (splitCredentials) Clone() credentials.TransportCredentials { return splitCredentials{} }

// OverrideServerName implements credentials.TransportCredentials. It does nothing, since it is for clients.
func (splitCredentials) OverrideServerName(string) error { return nil }
