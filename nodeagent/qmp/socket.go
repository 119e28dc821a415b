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

// Socket holds the [Conn] to the monitor at a socket's path. It connects when it is first used, and again when the
// connection has ended. It never repeats a command: the caller of a command in progress gets [ErrClosed].
type Socket struct {
	path string
	life context.Context // ends with Close
	end  context.CancelFunc

	turn chan struct{} // capacity 1: a lock that can be waited for with a context; guards conn and dialing
	conn *Conn         // nil before the first use
}

// NewSocket returns the monitor socket at path. It does not connect yet.
func NewSocket(path string) *Socket {
	life, end := context.WithCancel(context.Background())
	return &Socket{path: path, life: life, end: end, turn: make(chan struct{}, 1)}
}

// Conn returns the open connection, and connects if there is none. While the socket does not exist or nothing listens
// it tries again until ctx ends, or for [DefaultTimeout] if ctx has no deadline; cancel ctx when the process has ended.
// When the result is another Conn than last time, events may have been missed: query QEMU's whole state.
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

// closedErr returns ErrClosed if Close caused err, and err otherwise.
func (s *Socket) closedErr(err error) error {
	if s.life.Err() != nil && errors.Is(err, context.Canceled) {
		return ErrClosed
	}
	return err
}

// dial connects, and tries again with pauses while nothing listens at the socket.
func (s *Socket) dial(ctx context.Context) (c *Conn, err error) {
	err = retry.Do(ctx, dialPauses, func() error {
		if c, err = Dial(ctx, s.path); err != nil && !notListening(err) {
			return retry.Permanent(err)
		}
		return err
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
	s.turn <- struct{}{} // A Conn call that is dialing ends with life.
	defer func() { <-s.turn }()
	if s.conn == nil {
		return nil
	}
	return s.conn.Close()
}
