package transport

import (
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// outlet is the socket below a TLS connection. It buffers the records that TLS writes until try sends them without
// blocking or flush sends them, waiting for the socket. So encryption never waits for the network, and the rest of a
// partly written record is kept.
type outlet struct {
	net.Conn
	raw syscall.RawConn
	// patience is the timeout of flush for each piece.
	patience time.Duration

	mu   sync.Mutex
	hold bool // buffer writes: set after the handshake
	kept []byte
}

const (
	// mostKept is roughly how many bytes the writer goroutine buffers before it waits for the socket.
	mostKept = 256 << 10
	// piece is the number of bytes that the socket must accept within the outlet's patience.
	piece = 64 << 10
)

func newOutlet(conn net.Conn, patience time.Duration) (*outlet, error) {
	s, ok := conn.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("a connection to %s is no socket", conn.RemoteAddr())
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &outlet{Conn: conn, raw: raw, patience: patience}, nil
}

// shaken starts to buffer writes. During the TLS handshake they are sent at once.
func (o *outlet) shaken() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.hold = true
}

// Write implements net.Conn.
func (o *outlet) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.hold {
		return o.Conn.Write(b)
	}
	o.kept = append(o.kept, b...)
	return len(b), nil
}

// try sends what the socket accepts without blocking. empty reports whether the buffer is empty.
func (o *outlet) try() (empty bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.kept) == 0 {
		return true, nil
	}
	var n int
	var failed error
	err = o.raw.Write(func(fd uintptr) bool {
		for {
			if n, failed = unix.Write(int(fd), o.kept); failed != unix.EINTR {
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
	o.kept = o.kept[:copy(o.kept, o.kept[n:])]
	return len(o.kept) == 0, nil
}

// flush sends the whole buffer if it holds more than most bytes, waiting for the socket.
func (o *outlet) flush(most int) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.kept) <= most {
		return nil
	}
	for left := o.kept; len(left) > 0; {
		if err := o.SetWriteDeadline(time.Now().Add(o.patience)); err != nil {
			return err
		}
		n, err := o.Conn.Write(left[:min(len(left), piece)])
		if err != nil {
			return err
		}
		left = left[n:]
	}
	o.kept = o.kept[:0]
	if cap(o.kept) > 2*mostKept {
		o.kept = nil
	}
	return o.SetWriteDeadline(time.Time{})
}
