package nettest

import (
	"net"
	"testing"
)

// Accept calls handle in a goroutine of its own for each connection that the listener accepts. At the end of the test it
// closes the listener and all connections, so handle need not close them.
func Accept(t testing.TB, listener net.Listener, handle func(net.Conn)) {
	t.Helper()
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { conn.Close() })
			go handle(conn)
		}
	}()
}
