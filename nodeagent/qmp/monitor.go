package qmp

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"time"
)

// Between two attempts to dial a socket that is not there yet.
const (
	firstPause = 5 * time.Millisecond
	lastPause  = 250 * time.Millisecond
)

// Monitor holds the [Conn] to the monitor at a socket's path. It connects when it is first used, and again when the
// connection has ended. It never repeats a command: the caller of a command under way gets [ErrClosed].
type Monitor struct {
	path string
	life context.Context // ends with Close
	end  context.CancelFunc

	turn chan struct{} // capacity 1: a lock that can be waited for with a context; guards conn and dialing
	conn *Conn         // nil before the first use
}

// NewMonitor returns the monitor at the unix socket path. It does not connect yet.
func NewMonitor(path string) *Monitor {
	life, end := context.WithCancel(context.Background())
	return &Monitor{path: path, life: life, end: end, turn: make(chan struct{}, 1)}
}

// Conn returns the open connection, and connects if there is none. While the socket does not exist or nothing listens
// it tries again until ctx ends, or for [DefaultTimeout] if ctx has no deadline; cancel ctx when the process has ended.
// When the result is another Conn than last time, events may have been missed: query QEMU's whole state.
func (m *Monitor) Conn(ctx context.Context) (*Conn, error) {
	ctx, cancel := bound(ctx)
	defer cancel()
	defer context.AfterFunc(m.life, cancel)()
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	case <-ctx.Done():
		return nil, m.ended(ctx.Err())
	}
	if m.life.Err() != nil {
		return nil, ErrClosed
	}
	if m.conn != nil && !m.conn.doomed() {
		return m.conn, nil
	}
	if m.conn != nil {
		select {
		case <-m.conn.Done(): // soon: it is reading what QEMU said last
		case <-ctx.Done():
			return nil, m.ended(ctx.Err())
		}
	}
	c, err := m.dial(ctx)
	if err != nil {
		return nil, m.ended(err)
	}
	m.conn = c
	return c, nil
}

// ended turns an error that Close caused into ErrClosed.
func (m *Monitor) ended(err error) error {
	if m.life.Err() != nil && errors.Is(err, context.Canceled) {
		return ErrClosed
	}
	return err
}

func (m *Monitor) dial(ctx context.Context) (*Conn, error) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		c, err := Dial(ctx, m.path)
		if err == nil || !absent(err) {
			return c, err
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, fmt.Errorf("%w: %w", err, ctx.Err())
		}
	}
}

// absent reports whether err means that nothing listens at the socket, or not yet.
func absent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EAGAIN)
}

// Close ends the connection for good. Calls under way return [ErrClosed]. QEMU is left as it is.
func (m *Monitor) Close() error {
	m.end()
	m.turn <- struct{}{} // A Conn that dials ends with life and leaves.
	defer func() { <-m.turn }()
	if m.conn == nil {
		return nil
	}
	return m.conn.Close()
}
