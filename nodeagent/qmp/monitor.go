package qmp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"syscall"
	"time"

	goqemu "github.com/digitalocean/go-qemu/qmp"
)

// Between two attempts to dial a socket that is not there yet.
const (
	firstPause = 5 * time.Millisecond
	lastPause  = 250 * time.Millisecond
)

var _ goqemu.Monitor = (*Monitor)(nil)

// Monitor is QEMU's monitor at a socket's path: it connects when it is first used, and again when the connection has
// ended. It is go-qemu's Monitor for code that speaks through that, and for the agent the holder of a [Conn].
//
// It never repeats a command by itself: who had one under way learns that the connection ended, and decides.
type Monitor struct {
	path string
	life context.Context // ends with Disconnect
	end  context.CancelFunc

	turn chan struct{} // capacity 1: whoever is in it may dial, and touch conn
	conn *Conn         // nil before the first use

	mu       sync.Mutex // guards over, and that nothing is added to forward once it is set
	over     bool
	forwards sync.WaitGroup
}

// NewMonitor names the unix socket and touches nothing yet.
func NewMonitor(path string) *Monitor {
	life, end := context.WithCancel(context.Background())
	return &Monitor{path: path, life: life, end: end, turn: make(chan struct{}, 1)}
}

// Conn returns the live connection, making one if there is none: while the socket does not exist or nobody listens it
// tries again until ctx ends ([DefaultTimeout] without a deadline), so cancel ctx when the process is gone. A result
// other than last time's means that events were missed: ask QEMU for its whole state.
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

// ended turns an error that Disconnect caused into ErrClosed.
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

// absent: nobody is there, which may change.
func absent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EAGAIN)
}

// Connect connects now rather than at the first use, within [DefaultTimeout].
func (m *Monitor) Connect() error {
	_, err := m.Conn(m.life)
	return err
}

// Disconnect ends the connection, the calls under way and the channels from Events, for good. QEMU is left as it is.
func (m *Monitor) Disconnect() error {
	m.mu.Lock()
	m.over = true
	m.mu.Unlock()
	m.end()
	m.turn <- struct{}{} // whoever dials now sees the end of life and comes out
	if m.conn != nil {
		m.conn.Close()
	}
	<-m.turn
	m.forwards.Wait()
	return nil
}

// Run sends one command, {"execute": …, "arguments": …}, and returns QEMU's answer, {"return": …}, in memory of its own.
// It takes at most [DefaultTimeout]. An id of the caller's comes back; on the wire it is replaced.
func (m *Monitor) Run(command []byte) ([]byte, error) {
	var in struct {
		Execute   string          `json:"execute"`
		Arguments json.RawMessage `json:"arguments"`
		ID        json.RawMessage `json:"id"`
	}
	d := json.NewDecoder(bytes.NewReader(command))
	d.DisallowUnknownFields() // rather than send something else than was asked for
	if err := d.Decode(&in); err != nil {
		return nil, fmt.Errorf("read command: %w", err)
	}
	if d.More() || in.Execute == "" {
		return nil, errors.New("read command: want one object with execute")
	}
	ctx, cancel := bound(m.life)
	defer cancel()
	c, err := m.Conn(ctx)
	if err != nil {
		return nil, err
	}
	var args any
	if in.Arguments != nil {
		args = in.Arguments
	}
	var out struct {
		Return json.RawMessage `json:"return"`
		ID     json.RawMessage `json:"id,omitempty"`
	}
	out.ID = in.ID
	if err := c.Do(ctx, in.Execute, args, &out.Return); err != nil {
		return nil, m.ended(err)
	}
	return json.Marshal(out)
}

// Events returns the events from now on, in order. The channel is closed when ctx ends, when the connection does, and
// when its reader was so slow that events were dropped: never is there a gap in it. Whoever finds it closed asks QEMU
// for its state and calls Events again. An unread channel holds up nothing else.
func (m *Monitor) Events(ctx context.Context) (<-chan goqemu.Event, error) {
	c, err := m.Conn(ctx)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over {
		return nil, ErrClosed
	}
	out := make(chan goqemu.Event)
	s := c.Subscribe(c.Mark())
	m.forwards.Go(func() {
		defer close(out)
		m.forward(ctx, s, out)
	})
	return out, nil
}

func (m *Monitor) forward(ctx context.Context, s *Stream, out chan<- goqemu.Event) {
	for {
		e, err := s.Next(ctx)
		if err != nil || e.Dropped > 0 {
			return
		}
		g, err := e.GoQEMU()
		if err != nil {
			return
		}
		select {
		case out <- g:
		case <-ctx.Done():
			return
		case <-m.life.Done():
			return
		}
	}
}
