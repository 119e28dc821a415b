package nettest

import (
	"net"
	"testing"
)

// Accept calls handle for each connection that the listener accepts, each call in its own goroutine. At the end of the
// test, Accept closes the listener and all connections, so handle need not close its connection.
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
