// Package qmp is a client of the QEMU Machine Protocol (QMP): commands with a deadline, typed errors, an event log that
// reports dropped events, and passing of file descriptors to QEMU. It implements only the protocol: the caller decides
// the order of commands, and what an event means for a VM.
//
// A [Conn] is one connection to one monitor socket. A [Socket] is the path of a monitor socket: it dials when a Conn is
// needed, and again when the Conn has ended.
//
// # Commands
//
// Commands are sent by the typed functions of github.com/digitalocean/go-qemu/qmp/raw over our connection: [Conn.With]
// returns go-qemu's Monitor, bound to a context, which gives each command a deadline. [Conn.Do] sends a command without
// types. It is for the commands that go-qemu lacks or decodes wrongly:
//
//	command                used by      sent by   reason
//	qmp_capabilities       qmp          go-qemu
//	query-status           qemu         go-qemu   it fails on a run state that it does not know: none up to QEMU 9.1
//	query-uuid             qemu         go-qemu
//	query-blockstats       qemu         go-qemu
//	query-block            qemu         Do        go-qemu refuses the answer if an image has an unknown format-specific
//	                                              type: "file" (raw images, since QEMU 8.0) or "rbd" (since 6.1)
//	qom-set                qemu         go-qemu
//	x-exit-preconfig       qemu         Do        not in go-qemu's schema
//	cont, stop             qemu         go-qemu
//	system_reset           qemu         go-qemu
//	system_powerdown       qemu         go-qemu
//	quit                   qemu, facts  go-qemu
//	query-machines         facts        go-qemu
//	query-cpu-definitions  facts        go-qemu
//	device_add, netdev_add qemu         Do        go-qemu's types lack the properties of the device and of the backend
//	device_del             qemu         Do        together with Mark and Wait
//	closefd                qemu         Do        together with getfd
//	qom-list, netdev_del   qemu         go-qemu
//	getfd                  qemu         own       [Conn.SendFD]: go-qemu cannot pass a file descriptor
//	object-add, blockdev-add, blockdev-create, query-jobs, …
//	                       qemu         Do        go-qemu's types lack LUKS, throttle groups and jobs of new kinds
//	add-fd                 qemu         own       [Conn.AddFD]
//
// Events are read by [Conn.Subscribe] and decoded by the caller. go-qemu decodes every event to a map of float64 and
// cannot report that events were dropped.
//
// # How the owner of a VM uses it
//
// QEMU serves one client per socket, so give each QEMU two sockets: one for commands that change the machine
// (device_add, blockdev-add and migrate can take seconds), one for query commands and events. Then a slow device_add
// does not delay a query. QEMU's main loop serves both sockets: when it hangs, neither answers.
//
// Events sent while no client was connected are lost. To wait for the event that a command causes, take a [Conn.Mark],
// send the command, and Wait from the Mark. Query QEMU's whole state (query-status, query-migrate, query-jobs,
// query-block) after each new Conn, when an event has Dropped set, and when Wait returns [ErrDropped]. A QEMU that
// crashes sends no event: watch its process as well.
//
// QEMU may still execute a command whose context has ended. Query the state before sending the command again.
//
// # Decisions
//
//   - go-qemu's own socket monitor is not used: a line above 64 KiB ends it, it matches replies by their order, waits
//     without a limit, and drops the error class.
//   - Only the reader goroutine ends a connection, and it never waits for a consumer: events go to a bounded log that
//     each subscriber reads at its own pace, and each reply goes to a channel of its command.
//   - Events are read at a limited rate (pace.go), so that a compromised QEMU that sends events without pause uses
//     little CPU of the host.
//   - Input that is not QMP ends the connection, because the start of the next message cannot be found reliably.
//   - Out-of-band execution is not turned on. With it QEMU reads ahead, and a second descriptor that arrives before the
//     first command ran replaces the first: QEMU 7.2 then stores the wrong file under the right name and reports
//     success. Without it QEMU reads a command only after it has executed the one before.
package qmp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/digitalocean/go-qemu/qmp/raw"
)

const (
	// DefaultTimeout is the maximum time of a command or a handshake whose context has no deadline.
	DefaultTimeout = 10 * time.Second

	// MaxLine is the largest size of a message in bytes, in both directions. QEMU's longest regular message is the
	// reply to query-qmp-schema, 207 KB in QEMU 7.2.
	MaxLine = 16 << 20

	// drainTimeout is how long the reader goroutine continues after a write has failed, to read QEMU's last messages.
	drainTimeout = time.Second
)

var (
	// ErrClosed is wrapped by the error of every call on an ended connection, together with the cause of the end.
	ErrClosed = errors.New("monitor connection closed")

	// ErrBusy means that the socket exists but QEMU sends no greeting: another client uses it, or QEMU's main loop does
	// not run.
	ErrBusy = errors.New("monitor sends no greeting: another client uses it, or QEMU hangs")

	errNotQMP  = errors.New("not a QMP message")
	errGreeted = errors.New("a second greeting")
	errTooLong = fmt.Errorf("message longer than %d bytes", MaxLine)
)

// Error is an error that QEMU returned for a command.
type Error struct {
	Class string `json:"class"` // such as DeviceNotFound: QapiErrorClass in QEMU's qapi/error.json
	Desc  string `json:"desc"`  // for people; the text changes between versions of QEMU
}

func (e *Error) Error() string { return e.Class + ": " + e.Desc }

// Conn is one connection to one QEMU. Its methods may be called concurrently.
type Conn struct {
	nc  net.Conn
	log eventLog

	greeted chan struct{} // closed when QEMU's greeting was read
	done    chan struct{} // closed when the reader goroutine has ended
	closing chan struct{} // closed when cause is set; pacedReader then no longer pauses
	writing chan struct{} // capacity 1: contains a value while a command is written to nc

	mu          sync.Mutex
	lastID      uint64
	pending     map[uint64]chan reply // channels for the replies, by command id; capacity 1 each
	gotGreeting bool
	cause       error  // why the connection has ended or is about to end
	late        uint64 // number of replies to commands whose caller no longer waited
	unasked     uint64 // number of replies whose id is that of no command
}

// Dial connects to the monitor at the unix socket path and negotiates capabilities. It tries once, until ctx ends or
// for [DefaultTimeout] if ctx has no deadline. The error wraps [ErrBusy] when another client may be using the socket.
func Dial(ctx context.Context, path string) (*Conn, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", path)
	if errors.Is(err, syscall.EAGAIN) { // The listen queue is full: QEMU serves another client.
		return nil, fmt.Errorf("dial monitor: %w: %w", ErrBusy, err)
	}
	if err != nil {
		return nil, fmt.Errorf("dial monitor: %w", err)
	}
	return New(ctx, nc)
}

// New negotiates capabilities over nc and returns the connection. It takes ownership of nc and closes it on error. File
// descriptors can be passed only over a *net.UnixConn.
func New(ctx context.Context, nc net.Conn) (*Conn, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	c := &Conn{
		nc:      nc,
		greeted: make(chan struct{}),
		done:    make(chan struct{}),
		closing: make(chan struct{}),
		writing: make(chan struct{}, 1),
		pending: make(map[uint64]chan reply),
	}
	go c.readLoop()
	if err := c.negotiate(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// negotiate waits for QEMU's greeting, and then sends qmp_capabilities without enabling any capability.
func (c *Conn) negotiate(ctx context.Context) error {
	select {
	case <-c.greeted:
	case <-c.done:
		return fmt.Errorf("read greeting: %w", c.Err())
	case <-ctx.Done():
		return fmt.Errorf("read greeting: %w: %w", ErrBusy, ctx.Err())
	}
	return raw.NewMonitor(c.With(ctx)).QMPCapabilities()
}

// Done returns a channel that is closed when the connection has ended. Events received until then can still be read.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err returns nil while the connection is open, and afterwards an error that wraps [ErrClosed] and the cause.
func (c *Conn) Err() error {
	select {
	case <-c.done:
		return c.closedErr()
	default:
		return nil
	}
}

// Close ends the connection and waits until the reader goroutine has ended. Calls in progress return [ErrClosed]. QEMU
// continues to run.
func (c *Conn) Close() error {
	c.mu.Lock()
	c.setCause(ErrClosed)
	c.mu.Unlock()
	_ = c.nc.Close() // The reader goroutine closes nc as well, so an error is expected.
	<-c.done
	return nil
}

// endSoon makes later commands fail with cause, and ends the reader goroutine after drainTimeout.
func (c *Conn) endSoon(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.setCause(cause) {
		_ = c.nc.SetReadDeadline(time.Now().Add(drainTimeout))
	}
}

// setCause sets the cause of the connection's end. It returns false if there is a cause already. The caller must hold
// mu.
func (c *Conn) setCause(cause error) bool {
	if c.cause != nil {
		return false
	}
	c.cause = cause
	close(c.closing)
	return true
}

// isEnding reports whether the connection has ended or is about to end.
func (c *Conn) isEnding() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause != nil
}

// closedErr returns ErrClosed with the cause of the connection's end.
func (c *Conn) closedErr() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return closedError(c.cause)
}

func closedError(cause error) error {
	if cause == nil || errors.Is(cause, ErrClosed) {
		return ErrClosed
	}
	return fmt.Errorf("%w: %w", ErrClosed, cause)
}

// readLoop runs in the reader goroutine. It receives messages until one cannot be read or decoded, and then ends the
// connection.
func (c *Conn) readLoop() {
	defer close(c.done)
	paced := newPacedReader(c.nc, c.closing)
	in := newLines(paced)
	for {
		expected, err := c.receive(in)
		if err == nil {
			if !expected {
				paced.unasked()
			}
			continue
		}
		c.mu.Lock()
		c.setCause(err)
		c.mu.Unlock()
		_ = c.nc.Close()
		return
	}
}

// receive reads one message and passes it to the event log or to the command that it replies to. It blocks only while
// reading from QEMU. The result expected is true for the greeting and for a reply that a command waits for.
func (c *Conn) receive(in *lines) (expected bool, err error) {
	line, err := in.next()
	if err != nil {
		return false, fmt.Errorf("read: %w", err)
	}
	m, err := decode(line)
	if err != nil {
		return false, err
	}
	if m.event != nil {
		c.log.add(*m.event)
		return false, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.greeting {
		if c.gotGreeting {
			return false, fmt.Errorf("%w: %w", errNotQMP, errGreeted)
		}
		c.gotGreeting = true
		close(c.greeted)
		return true, nil
	}
	id := m.reply.id
	slot, waiting := c.pending[id]
	switch {
	case waiting:
		delete(c.pending, id)
		slot <- *m.reply
	case id != 0 && id <= c.lastID:
		c.late++
	default:
		c.unasked++
	}
	return waiting, nil
}

// reply is QEMU's reply to a command. Its id is the id of that command, or 0 if QEMU could not parse the command. No
// command has the id 0.
type reply struct {
	id  uint64
	ret json.RawMessage
	err *Error
}

func (r reply) result() (json.RawMessage, error) {
	if r.err != nil {
		return nil, r.err
	}
	return r.ret, nil
}

// message is one message from QEMU: the greeting, an event or a reply.
type message struct {
	greeting bool
	event    *Event
	reply    *reply
}

// decode parses one message. The caller may reuse the memory of line afterwards.
func decode(line []byte) (message, error) {
	var in struct {
		QMP       *struct{}       `json:"QMP"`
		Event     string          `json:"event"`
		Data      json.RawMessage `json:"data"`
		Timestamp struct {
			Seconds      int64 `json:"seconds"`
			Microseconds int64 `json:"microseconds"`
		} `json:"timestamp"`
		ID     json.RawMessage `json:"id"`
		Return json.RawMessage `json:"return"`
		Error  *Error          `json:"error"`
	}
	if err := json.Unmarshal(line, &in); err != nil {
		return message{}, fmt.Errorf("%w: %w", errNotQMP, err)
	}
	switch {
	case in.QMP != nil:
		return message{greeting: true}, nil
	case in.Event != "":
		e := Event{Name: in.Event, Data: in.Data}
		if in.Timestamp.Seconds > 0 { // QEMU sends -1 if it cannot read the clock.
			e.Time = time.Unix(in.Timestamp.Seconds, in.Timestamp.Microseconds*1000)
		}
		return message{event: &e}, nil
	case in.Return != nil || in.Error != nil:
		// An id that is not a number becomes 0. So does a missing id, which means that QEMU could not parse the
		// command.
		id, _ := strconv.ParseUint(string(in.ID), 10, 64)
		return message{reply: &reply{id: id, ret: in.Return, err: in.Error}}, nil
	}
	return message{}, fmt.Errorf("%w: neither greeting, event nor reply", errNotQMP)
}

// lines reads lines of at most MaxLine bytes from a stream.
type lines struct {
	r    *bufio.Reader
	long []byte // the current line, if it is longer than the reader's buffer
}

// newLines returns a reader of the lines of r. Its buffer is small, because an agent has hundreds of idle monitors.
func newLines(r io.Reader) *lines { return &lines{r: bufio.NewReaderSize(r, 4<<10)} }

// next returns the next line that is not empty, without line ending. The result is valid until the next call.
func (l *lines) next() ([]byte, error) {
	for {
		line, err := l.line()
		if err != nil {
			return nil, err
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			return line, nil
		}
	}
}

// line returns the next line with its line ending.
func (l *lines) line() ([]byte, error) {
	l.long = nil
	for {
		part, err := l.r.ReadSlice('\n')
		if len(l.long)+len(part) > MaxLine {
			return nil, errTooLong
		}
		switch {
		case err == nil && l.long == nil:
			return part, nil
		case err == nil:
			l.long = append(l.long, part...)
			return l.long, nil
		case errors.Is(err, bufio.ErrBufferFull):
			l.long = append(l.long, part...)
		case errors.Is(err, io.EOF) && len(l.long)+len(part) > 0:
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}
