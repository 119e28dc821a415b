package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// TestHTTPAttacks sends requests to a running member as hostile web pages, request smugglers and senders of forged
// proxy headers send them. Every request must be refused, and no key may be written.
func TestHTTPAttacks(t *testing.T) {
	m := startMember(t)
	kvPort, identityPort := m.config.Ports.KV, m.config.Ports.Identity
	const put = "PUT /api/v1/kv/attack HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
	const body = `{"value":"v"}`
	wide := ""
	for _, letter := range body {
		wide += "\x00" + string(letter)
	}
	own := "Host: " + m.config.Address(kvPort) + "\r\n"
	length := fmt.Sprintf("Content-Length: %d\r\n", len(body))
	for _, c := range []struct {
		name    string
		port    uint16
		request string
		// want lists the allowed HTTP statuses. 0 means that the connection is closed without a response.
		want []int
	}{
		{"the Host of a web page", kvPort, put + "Host: evil.example\r\n" + length + "\r\n" + body, []int{403}},
		{"a Host that resolves to loopback", kvPort, put + "Host: 127.0.0.1.nip.io\r\n" + length + "\r\n" + body, []int{403}},
		{"localhost with a dot", kvPort, put + "Host: localhost.\r\n" + length + "\r\n" + body, []int{403}},
		{"a Host with user info", kvPort, put + "Host: 127.0.0.1@evil.example\r\n" + length + "\r\n" + body, []int{400, 403}},
		{"no Host", kvPort, put + length + "\r\n" + body, []int{400}},
		{"two Hosts", kvPort, put + own + "Host: evil.example\r\n" + length + "\r\n" + body, []int{400}},
		{"an absolute URL of another host", kvPort, strings.Replace(put, " /api", " http://evil.example/api", 1) + own + length + "\r\n" + body, []int{403}},
		{"the Origin of a web page", kvPort, put + own + "Origin: https://evil.example\r\n" + length + "\r\n" + body, []int{403}},
		{"the Origin null", kvPort, put + own + "Origin: null\r\n" + length + "\r\n" + body, []int{403}},
		{"text/plain", kvPort, strings.Replace(put, "application/json", "text/plain", 1) + own + length + "\r\n" + body, []int{400}},
		{"a form", kvPort, strings.Replace(put, "application/json", "application/x-www-form-urlencoded", 1) + own + length + "\r\n" + body, []int{400}},
		{"no Content-Type", kvPort, strings.Replace(put, "Content-Type: application/json\r\n", "", 1) + own + length + "\r\n" + body, []int{400}},
		{"JSON in UTF-16", kvPort, strings.Replace(put, "application/json", "application/json; charset=utf-16", 1) + own + fmt.Sprintf("Content-Length: %d\r\n\r\n", len(wide)) + wide, []int{400}},
		{"the preflight request of a browser", kvPort, "OPTIONS /api/v1/kv/attack HTTP/1.1\r\n" + own + "Origin: https://evil.example\r\nAccess-Control-Request-Method: PUT\r\nConnection: close\r\n\r\n", []int{403, 405}},
		{"a line break in the key", kvPort, strings.Replace(put, "/attack ", "/attack\r\nHost: localhost ", 1) + own + length + "\r\n" + body, []int{400}},
		{"Content-Length with chunked encoding", kvPort, put + own + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n", []int{400}},
		{"two values of Content-Length", kvPort, put + own + "Content-Length: 13\r\nContent-Length: 14\r\n\r\n" + body, []int{400}},
		{"an unknown transfer encoding", kvPort, put + own + "Transfer-Encoding: gzip\r\n\r\n" + body, []int{400, 501}},
		{"200 KB of header", kvPort, put + own + "X: " + strings.Repeat("x", 200<<10) + "\r\n" + length + "\r\n" + body, []int{431, 0}},
		{"TRACE", kvPort, "TRACE /api/v1/kv/attack HTTP/1.1\r\n" + own + "\r\n", []int{405}},
		{"CONNECT", kvPort, "CONNECT 127.0.0.1:22 HTTP/1.1\r\n" + own + "\r\n", []int{400, 404, 405}},
		{"another method in a header", kvPort, "POST /api/v1/kv/attack HTTP/1.1\r\n" + own + "Content-Type: application/json\r\nX-HTTP-Method-Override: PUT\r\n" + length + "\r\n" + body, []int{405}},
		{"forged X-Forwarded headers", kvPort, put + own + "X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Host: localhost\r\nHost: evil.example\r\n" + length + "\r\n" + body, []int{400}},
		{"a web page that creates a user", identityPort, "POST /api/v1/users HTTP/1.1\r\nHost: evil.example\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n" + `{"id":"mole"}`, []int{403}},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Contains(t, c.want, rawStatus(t, m.config.Address(c.port), c.request))
		})
	}
	// No refused request may have written a key. Lists of keys must not show the platform's records, such as users and
	// signing keys, because these are in another engine.
	for _, query := range []string{"", "?prefix=", "?prefix=%00", "?prefix=%ff", "?prefix=system", "?prefix=%2f"} {
		listed, err := http.Get("http://" + m.config.Address(kvPort) + "/api/v1/kv" + query)
		require.NoError(t, err)
		text, err := io.ReadAll(listed.Body)
		require.NoError(t, err)
		require.NoError(t, listed.Body.Close())
		require.Equal(t, http.StatusOK, listed.StatusCode)
		require.Contains(t, string(text), `"items":[]`, "keys listed with %q", query)
	}
	users := mustCall(m, identityv1.NewIdentityServiceClient(m.public).ListUsers, &identityv1.ListUsersRequest{})
	for _, u := range users.GetUsers() {
		require.NotEqual(t, "mole", u.GetId())
	}
}

// rawStatus sends the request unchanged over TCP and returns the status of the response, or 0 if the connection was
// closed without one.
func rawStatus(t *testing.T, address, request string) int {
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(callTime)))
	// Ignore the write error: the server may respond and close the connection before it has read everything.
	_, _ = io.WriteString(conn, request)
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "the server must respond or close the connection")
		return 0
	}
	answer.Body.Close()
	return answer.StatusCode
}

// TestSlowHeaders opens connections whose request headers never become complete. The member must close each of them,
// and must respond to other requests meanwhile.
func TestSlowHeaders(t *testing.T) {
	m := startMember(t)
	listenAddress := m.config.Address(m.config.Ports.KV)
	var slow []net.Conn
	for range 200 {
		conn, err := net.Dial("tcp", listenAddress)
		require.NoError(t, err)
		defer conn.Close()
		_, err = io.WriteString(conn, "GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
		require.NoError(t, err)
		slow = append(slow, conn)
	}
	require.Equal(t, 200, rawStatus(t, listenAddress, "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
	for _, conn := range slow {
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Minute)))
		_, err := io.Copy(io.Discard, conn)
		require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "the member must close a connection whose header never ends")
	}
}

// TestSlowBodies sends requests whose bodies never become complete to a server with a hundredth of the usual time
// limits. The server must close each of the connections, and must respond to other requests meanwhile.
func TestSlowBodies(t *testing.T) {
	listeners := &listenerSet{log: slog.New(slog.DiscardHandler)}
	server := listeners.newHTTPServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
	}))
	server.ReadHeaderTimeout, server.ReadTimeout = server.ReadHeaderTimeout/100, server.ReadTimeout/100
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	defer func() {
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-ended, http.ErrServerClosed)
	}()
	listenAddress := listener.Addr().String()
	var slow []net.Conn
	for _, request := range []string{
		"PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
		"PUT / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
	} {
		for range 100 {
			conn, err := net.Dial("tcp", listenAddress)
			require.NoError(t, err)
			defer conn.Close()
			_, err = io.WriteString(conn, request)
			require.NoError(t, err)
			slow = append(slow, conn)
		}
	}
	require.Equal(t, 200, rawStatus(t, listenAddress, "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
	for _, conn := range slow {
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(callTime)))
		_, err := io.Copy(io.Discard, conn)
		require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "the server must close a connection whose body never ends")
	}
}

// TestRapidResets opens 20,000 streams on one connection and cancels each at once. The member must still serve calls on
// other connections; it may close the attacker's.
func TestRapidResets(t *testing.T) {
	m := startMember(t)
	conn, err := net.Dial("tcp", m.config.Address(m.config.Ports.GRPC))
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
	go func() { _, _ = io.Copy(io.Discard, conn) }()
	out := bufio.NewWriter(conn)
	_, err = io.WriteString(out, http2.ClientPreface)
	require.NoError(t, err)
	framer := http2.NewFramer(out, nil)
	require.NoError(t, framer.WriteSettings())
	var block strings.Builder
	encoder := hpack.NewEncoder(&block)
	for n := range uint32(20_000) {
		block.Reset()
		for _, f := range [][2]string{
			{":method", "POST"}, {":scheme", "http"}, {":path", vms + "ListVms"}, {":authority", "x"}, {"content-type", "application/grpc"}, {"te", "trailers"},
		} {
			require.NoError(t, encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}))
		}
		stream := 2*n + 1
		err = errors.Join(
			framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: []byte(block.String()), EndHeaders: true}),
			framer.WriteRSTStream(stream, http2.ErrCodeCancel),
		)
		if err != nil {
			break // the member may close the connection
		}
	}
	_ = out.Flush()
	_, err = identityv1.NewIdentityServiceClient(m.public).WhoAmI(m.adminContext(), &identityv1.WhoAmIRequest{})
	require.NoError(t, err)
}
