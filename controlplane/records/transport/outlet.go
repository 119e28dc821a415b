package transport

import (
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// outlet is the socket under a TLS connection. It keeps the records that TLS writes until somebody passes them on: at
// once as far as the socket takes them (try), or waiting for it (flush). So encrypting never waits for the network, and a
// record that the socket took only half of is not lost.
type outlet struct {
	net.Conn
	raw syscall.RawConn
	// patience is how long flush waits for the socket to take some of what is kept.
	patience time.Duration

	mu   sync.Mutex
	hold bool // after the handshake
	kept []byte
}

const (
	// mostKept is about how much is kept by who flushes before it waits for the socket.
	mostKept = 256 << 10
	// piece is what the socket has to take within the outlet's patience.
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

// shaken ends the handshake, in which what is written goes out at once.
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

// try passes on what the socket takes without waiting, and says whether nothing is left.
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

// flush passes all on when more than most is kept.
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
