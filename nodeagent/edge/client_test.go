package edge

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/nettest"
)

// serve runs a TCP server until the test ends. It tells each client the client's address, then returns what it reads.
func (l *lab) serve(name, address string) {
	l.t.Helper()
	l.serveLines(name, address)
}

// serveLines is like serve for a server that also sends the given lines to each client.
func (l *lab) serveLines(name, address string, lines ...string) {
	l.t.Helper()
	t := l.t // the goroutines must not read l.t, which subtests change
	var listener net.Listener
	require.NoError(l.t, l.In(name, func() (err error) {
		listener, err = net.Listen("tcp4", address)
		return err
	}))
	nettest.Accept(t, listener, func(conn net.Conn) {
		host, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
		for _, line := range append([]string{host}, lines...) {
			fmt.Fprintln(conn, line)
		}
		for lines := bufio.NewScanner(conn); lines.Scan(); {
			fmt.Fprintln(conn, lines.Text())
		}
	})
}

// client is a connection to a server of the lab.
type client struct {
	net.Conn
	lines *bufio.Reader
	seen  string // address of the client that the server sees
}

func (l *lab) dial(from, to string, wait time.Duration) (*client, error) {
	return l.dialAs(from, "0.0.0.0", to, wait)
}

// dialAs is like dial with a source address.
func (l *lab) dialAs(from, source, to string, wait time.Duration) (*client, error) {
	c := &client{}
	err := l.In(from, func() (err error) {
		d := net.Dialer{Timeout: wait, LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
		c.Conn, err = d.DialContext(l.t.Context(), "tcp4", to)
		return err
	})
	if err != nil {
		return nil, err
	}
	l.t.Cleanup(func() { c.Close() })
	c.lines = bufio.NewReader(c)
	_ = c.SetDeadline(time.Now().Add(patience))
	c.seen, err = c.lines.ReadString('\n')
	c.seen = strings.TrimSpace(c.seen)
	return c, err
}

// echo sends a line and waits for it to return.
func (c *client) echo(wait time.Duration) error {
	_ = c.SetDeadline(time.Now().Add(wait))
	if _, err := fmt.Fprintln(c, "line"); err != nil {
		return err
	}
	_, err := c.lines.ReadString('\n')
	return err
}

// requireDial requires that a server answers and sees the client with the address seen.
func (l *lab) requireDial(from, to, seen string) *client {
	l.t.Helper()
	c, err := l.dial(from, to, patience)
	require.NoError(l.t, err, "%s cannot connect to %s", from, to)
	require.Equal(l.t, seen, c.seen, "source of the connection from %s to %s", from, to)
	return c
}

func (l *lab) requireNoDial(from, to, message string) {
	l.t.Helper()
	_, err := l.dial(from, to, blocked)
	require.Error(l.t, err, message)
}
