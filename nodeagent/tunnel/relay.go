package tunnel

import (
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// duplex is a connection whose two directions can be closed separately.
type duplex interface {
	net.Conn
	CloseWrite() error
}

// relayBuffer is the size of the buffer of one direction, in bytes.
const relayBuffer = 256 << 10

// relay copies data in both directions until both directions have ended, and then closes both connections. The end of
// one direction closes only this direction. An error in one direction ends both, and relay returns it.
func relay(a, b duplex) error {
	defer a.Close()
	defer b.Close()
	var both sync.WaitGroup
	errs := make(chan error, 2)
	direction := func(to, from duplex) {
		err := copyAll(to, from)
		if err == nil {
			err = to.CloseWrite()
		}
		if err != nil {
			errs <- err
			_, _ = a.Close(), b.Close()
		}
	}
	both.Go(func() { direction(a, b) })
	both.Go(func() { direction(b, a) })
	both.Wait()
	close(errs)
	return <-errs
}

// copyAll copies all data.
func copyAll(to io.Writer, from io.Reader) error {
	// The structs hide the methods WriteTo and ReadFrom, so that io.CopyBuffer uses the buffer.
	_, err := io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, make([]byte, relayBuffer))
	return err
}

// userTimeout is the maximum time for which sent data may stay unacknowledged. The kernel then closes the connection to
// the other host.
const userTimeout = 30 * time.Second

// setUserTimeout makes the kernel close a TCP connection whose peer does not answer for userTimeout. Errors are
// ignored, because the agent also cancels a migration without progress.
func setUserTimeout(conn net.Conn) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 6})
	if raw, err := tcp.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
		})
	}
}

// oneLine returns the text of an error in one line.
func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
