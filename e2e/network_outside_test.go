package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// serveAddresses starts a server on the router of the external network, which answers each client with the client's
// address. The returned function stops the server.
func (c *networkCloud) serveAddresses(port int) (stop func()) {
	c.t.Helper()
	page, err := lab.ListenIn(c.external.Net(), fmt.Sprintf("%s:%d", lab.ExternalRouter, port))
	require.NoError(c.t, err)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintln(w, host)
	})}
	go server.Serve(page)
	return func() { server.Close() }
}

// fetchOutside requests the page / of an HTTP server from the external network, and returns the response with its
// headers. Address has a port.
func (c *networkCloud) fetchOutside(ctx context.Context, address string) (string, error) {
	conn, err := lab.DialIn(ctx, c.external.Net(), address)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := conn.Write([]byte("GET / HTTP/1.0\r\n\r\n")); err != nil {
		return "", err
	}
	text, err := io.ReadAll(conn)
	return string(text), err
}
