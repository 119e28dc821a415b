package qmp

import (
	"context"
	"errors"
	"io/fs"
	"syscall"
	"time"

	"github.com/trivet-cloud/trivet/shared/retry"
)

// dialPauses are the pauses between attempts to dial a socket that nothing listens at yet.
var dialPauses = retry.Pauses{First: 5 * time.Millisecond, Last: 250 * time.Millisecond}

// firstHandshake is the timeout of the first handshake of a call of dial. The timeout doubles with each further
// handshake of the call.
const firstHandshake = 2 * time.Second

// Socket opens and holds the [Conn] to the monitor at the path of a socket. It connects at the first call of its method
// Conn, and again after the connection has ended. It does not repeat commands: when the connection ends, a command in
// progress returns [ErrClosed].
type Socket struct {
	path string
	life context.Context // ends with Close
	end  context.CancelFunc
	// handshake is the timeout of the first handshake; see firstHandshake.
	handshake time.Duration

	turn chan struct{} // capacity 1: contains a value while a goroutine uses conn or dials
	conn *Conn         // nil before the first use
}

// NewSocket returns a Socket for the monitor at path. It does not connect yet.
func NewSocket(path string) *Socket {
	life, end := context.WithCancel(context.Background())
	return &Socket{path: path, life: life, end: end, handshake: firstHandshake, turn: make(chan struct{}, 1)}
}

// Conn returns the open connection, and connects if there is none. If the socket does not exist, nothing listens at it,
// or the handshake takes too long, Conn tries again until ctx ends, or for [DefaultTimeout] if ctx has no deadline.
// Cancel ctx when the process has ended. If the result differs from that of the last call, events may have been missed:
// query QEMU's state then.
func (s *Socket) Conn(ctx context.Context) (*Conn, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return nil, s.closedErr(ctx.Err())
	}
	if s.life.Err() != nil {
		return nil, ErrClosed
	}
	if s.conn != nil && !s.conn.isEnding() {
		return s.conn, nil
	}
	if s.conn != nil {
		select {
		case <-s.conn.Done(): // within drainTimeout
		case <-ctx.Done():
			return nil, s.closedErr(ctx.Err())
		}
	}
	c, err := s.dial(ctx)
	if err != nil {
		return nil, s.closedErr(err)
	}
	s.conn = c
	return c, nil
}

// closedErr returns ErrClosed if err was caused by Close, and err otherwise.
func (s *Socket) closedErr(err error) error {
	if s.life.Err() != nil && errors.Is(err, context.Canceled) {
		return ErrClosed
	}
	return err
}

// dial connects to the socket. It tries again after dialPauses if nothing listens at the socket, the handshake takes
// too long, or QEMU sends two greetings. The last two happen if a client connects while QEMU sets up the monitor in
// another thread: QEMU 7.2 may then greet twice, or greet and ignore commands. A new connection to the same monitor
// works.
func (s *Socket) dial(ctx context.Context) (c *Conn, err error) {
	handshake := s.handshake
	err = retry.Do(ctx, dialPauses, func() error {
		attempt, cancel := context.WithTimeout(ctx, handshake)
		defer cancel()
		c, err = Dial(attempt, s.path)
		switch {
		case err == nil || notListening(err):
			return err
		case attempt.Err() != nil || errors.Is(err, errGreeted):
			handshake *= 2
			return err
		}
		return retry.Permanent(err)
	})
	return c, err
}

// notListening reports whether err means that nothing listens at the socket.
func notListening(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EAGAIN)
}

// Close ends the connection for good. Calls in progress return [ErrClosed]. QEMU continues to run.
func (s *Socket) Close() error {
	s.end()
	s.turn <- struct{}{} // A call of Conn that is dialing has ended, because life has ended.
	defer func() { <-s.turn }()
	if s.conn == nil {
		return nil
	}
	return s.conn.Close()
}
