package transport

import (
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// nonblockingConn is the socket below a TLS connection. It buffers the data that TLS writes, so that encryption never
// waits for the network. The method try sends what the socket accepts without blocking; flush waits for the socket.
// Data that the socket has not accepted remains in the buffer.
type nonblockingConn struct {
	net.Conn
	raw syscall.RawConn
	// timeouts is the maximum time until the socket accepts one piece that flush writes. flush fails if it takes
	// longer.
	timeouts time.Duration

	mu       sync.Mutex
	hold     bool // buffer writes instead of sending them; set after the TLS handshake
	buffered []byte
}

const (
	// maxBuffered is the approximate maximum number of bytes that the writer goroutine buffers before it waits for the
	// socket.
	maxBuffered = 256 << 10
	// piece is the number of bytes that the socket must accept within the time nonblockingConn.timeouts.
	piece = 64 << 10
)

func newNonblockingConn(conn net.Conn, patience time.Duration) (*nonblockingConn, error) {
	s, ok := conn.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("a connection to %s is no socket", conn.RemoteAddr())
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &nonblockingConn{Conn: conn, raw: raw, timeouts: patience}, nil
}

// startBuffering makes Write buffer its data from now on. Before, during the TLS handshake, Write sends data at once.
func (o *nonblockingConn) startBuffering() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.hold = true
}

// Write implements net.Conn.
func (o *nonblockingConn) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.hold {
		return o.Conn.Write(b)
	}
	o.buffered = append(o.buffered, b...)
	return len(b), nil
}

// try sends as much of the buffer as the socket accepts without blocking. empty reports whether the buffer is empty
// now.
func (o *nonblockingConn) try() (empty bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.buffered) == 0 {
		return true, nil
	}
	var n int
	var failed error
	err = o.raw.Write(func(fd uintptr) bool {
		for {
			if n, failed = unix.Write(int(fd), o.buffered); failed != unix.EINTR {
				return true
			}
		}
	})
	switch {
	case err != nil:
		return false, err
	case failed == unix.EAGAIN:
		return false, nil
	case failed != nil:
		return false, fmt.Errorf("write: %w", failed)
	}
	o.buffered = o.buffered[:copy(o.buffered, o.buffered[n:])]
	return len(o.buffered) == 0, nil
}

// flush does nothing if the buffer has at most the given number of bytes. Otherwise it sends the complete buffer and
// waits until the socket has accepted it.
func (o *nonblockingConn) flush(most int) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.buffered) <= most {
		return nil
	}
	for left := o.buffered; len(left) > 0; {
		if err := o.SetWriteDeadline(time.Now().Add(o.timeouts)); err != nil {
			return err
		}
		n, err := o.Conn.Write(left[:min(len(left), piece)])
		if err != nil {
			return err
		}
		left = left[n:]
	}
	o.buffered = o.buffered[:0]
	if cap(o.buffered) > 2*maxBuffered {
		o.buffered = nil
	}
	return o.SetWriteDeadline(time.Time{})
}
