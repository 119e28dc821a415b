package rpc

import (
	"bufio"
	"encoding/binary"
	"net"
	"runtime"
	"sync"
)

// meter is a server's connection that parses the HTTP/2 frames that gRPC reads, to track which messages have arrived.
// One Read never returns bytes of two frames. So when gRPC calls the server's tap handle for a call, the HEADERS frame
// that was read last belongs to that call.
type meter struct {
	net.Conn
	// remote is a copy of the client's address that no other connection uses. Its pointer is the key of this connection
	// in Intake.meters.
	remote net.Addr
	intake *Intake
	in     *bufio.Reader

	// The fields up to mu are used only by the goroutine that reads:
	preface int    // bytes of the client's preface that were not read yet
	head    int    // bytes of the frame's header that were not read yet
	left    int    // bytes of the frame's payload that were not read yet
	kind    byte   // type of the frame
	flags   byte   // flags of the frame
	stream  uint32 // ID of the frame's stream
	padding int    // padding bytes at the end of the payload; -1 until their number was read
	current *call  // the call whose data the frame carries, or nil
	last    uint32 // stream ID of the last HEADERS frame
	ended   bool   // whether the last HEADERS frame ends the client's half of the stream

	mu     sync.Mutex
	calls  map[uint32]*call
	closed bool

	release func() // removes the connection from the count Intake.conns, on the first call
}

// Frame types and flags of HTTP/2 that the type meter uses:
const (
	frameHeader = 9

	frameData    = 0
	frameHeaders = 1
	frameReset   = 3

	flagEndStream = 1
	flagPadded    = 8
)

// prefaceBytes is the length of the preface with which a client begins a connection (RFC 9113, section 3.4).
const prefaceBytes = len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

// readAhead is the size of a meter's read buffer in bytes. gRPC's own read buffer is disabled for these connections.
const readAhead = 16 << 10

func newMeter(conn net.Conn, intake *Intake, release func()) *meter {
	m := &meter{
		Conn: conn, remote: ownAddr(conn.RemoteAddr()), intake: intake, in: bufio.NewReaderSize(conn, readAhead), preface: prefaceBytes,
		calls: map[uint32]*call{}, release: release,
	}
	// Subtract the connection from the number of open connections even if Close is never called: if gRPC fails before
	// it reads, it drops the connection without closing the net.Conn that the handshake returned.
	runtime.AddCleanup(m, func(release func()) { release() }, release)
	return m
}

// otherAddr is a copy of a net.Addr that is not a TCP address.
type otherAddr struct{ net.Addr }

// ownAddr returns a copy of an address, so that each connection has its own pointer.
func ownAddr(a net.Addr) net.Addr {
	if tcp, ok := a.(*net.TCPAddr); ok {
		c := *tcp
		return &c
	}
	return &otherAddr{a}
}

// RemoteAddr implements net.Conn. It returns the connection's own copy of the address, which is its key in
// Intake.meters.
func (m *meter) RemoteAddr() net.Addr { return m.remote }

// Read implements net.Conn. It returns bytes of at most one frame, and tracks the messages in them.
func (m *meter) Read(p []byte) (int, error) {
	if m.preface > 0 {
		n, err := m.in.Read(p[:min(len(p), m.preface)])
		m.preface -= n
		return n, err
	}
	if m.head == 0 && m.left == 0 {
		h, err := m.in.Peek(frameHeader)
		if err != nil {
			return 0, err
		}
		m.begin(h)
	}
	if m.head > 0 {
		n, err := m.in.Read(p[:min(len(p), m.head)])
		m.head -= n
		if m.head == 0 && m.left == 0 {
			m.end()
		}
		return n, err
	}
	n, err := m.in.Read(p[:min(len(p), m.left)])
	m.payload(p[:n])
	m.left -= n
	if n > 0 && m.left == 0 {
		m.end()
	}
	return n, err
}

// Close implements net.Conn. It also removes the connection from the Intake.
func (m *meter) Close() error {
	m.mu.Lock()
	m.closed = true
	clear(m.calls)
	m.mu.Unlock()
	m.intake.meters.Delete(m.remote)
	m.release()
	return m.Conn.Close()
}

// begin parses h, the header of a frame, before Read returns the header's bytes.
func (m *meter) begin(h []byte) {
	m.head, m.left = frameHeader, int(h[0])<<16|int(h[1])<<8|int(h[2])
	m.kind, m.flags, m.stream = h[3], h[4], binary.BigEndian.Uint32(h[5:])&(1<<31-1)
	m.current, m.padding = nil, 0
	switch m.kind {
	case frameData:
		m.current = m.find(m.stream)
		if m.flags&flagPadded != 0 {
			m.padding = -1
		}
	case frameHeaders:
		// Register the meter only when its first call arrives. gRPC may drop a connection without calls without closing
		// it, and it would then remain registered. Do not register it after Close: gRPC may still read buffered frames
		// then, but does not call Close again.
		m.mu.Lock()
		if !m.closed {
			m.intake.meters.LoadOrStore(m.remote, m)
		}
		m.mu.Unlock()
		m.last, m.ended = m.stream, m.flags&flagEndStream != 0
	}
}

// payload processes b, the next bytes of the frame's payload: it tracks the messages in them. Call it before len(b) is
// subtracted from m.left.
func (m *meter) payload(b []byte) {
	if m.current == nil || len(b) == 0 {
		return
	}
	left := m.left
	if m.padding < 0 {
		m.padding = int(b[0])
		b, left = b[1:], left-1
	}
	m.current.arrive(b[:max(min(len(b), left-m.padding), 0)])
}

// end is called at the end of a frame. If the frame resets its stream or ends the client's half of it, the meter stops
// tracking the call.
func (m *meter) end() {
	switch {
	case m.kind == frameReset:
		m.drop(m.stream)
	case (m.kind == frameData || m.kind == frameHeaders) && m.flags&flagEndStream != 0:
		if c := m.find(m.stream); c != nil {
			c.end()
			m.drop(m.stream)
		}
	}
	m.current = nil
}

func (m *meter) find(stream uint32) *call {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.calls[stream]
}

func (m *meter) drop(stream uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.calls, stream)
}

// open starts to track the call whose HEADERS frame was read last. It returns nil if the connection is closed, or if it
// already has twice as many calls as the server allows streams. Only a client that violates the protocol can reach that
// number.
func (m *meter) open() *call {
	c := &call{meter: m, stream: m.last, length: -1, ended: m.ended, changed: make(chan struct{}, 1)}
	if m.ended {
		return c
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || len(m.calls) >= 2*m.intake.streams {
		return nil
	}
	m.calls[m.last] = c
	return c
}

// prefixBytes is the size of the prefix of each gRPC message: one byte for compression, four for the length of the
// message.
const prefixBytes = 5

// call tracks which messages of one call have arrived. The server has not necessarily read them.
type call struct {
	meter  *meter
	stream uint32

	// The fields up to mu are used only by the goroutine that reads the connection:
	prefix [prefixBytes]byte
	have   int // bytes of prefix that have arrived
	left   int // bytes of the message that have not arrived

	mu      sync.Mutex
	whole   int           // messages that have arrived completely and that poll has not returned
	length  int           // announced length of the message that is arriving; -1 if there is none
	large   bool          // poll has already returned the message that is arriving
	ended   bool          // the client has ended its half of the stream
	changed chan struct{} // capacity 1: signals that one of the fields above has changed
}

// arrive tracks the messages in b, the next bytes that the client has sent on this call.
func (c *call) arrive(b []byte) {
	for len(b) > 0 {
		if c.have < prefixBytes {
			n := copy(c.prefix[c.have:], b)
			c.have, b = c.have+n, b[n:]
			if c.have < prefixBytes {
				return
			}
			c.left = int(binary.BigEndian.Uint32(c.prefix[1:]))
			if c.left > len(b) {
				c.announce(c.left)
			}
		}
		n := min(c.left, len(b))
		c.left, b = c.left-n, b[n:]
		if c.left == 0 {
			c.have = 0
			c.complete()
		}
	}
}

func (c *call) announce(length int) {
	c.mu.Lock()
	c.length = length
	c.mu.Unlock()
	c.signal()
}

func (c *call) complete() {
	c.mu.Lock()
	if !c.large {
		c.whole++
	}
	c.length, c.large = -1, false
	c.mu.Unlock()
	c.signal()
}

func (c *call) end() {
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	c.signal()
}

func (c *call) signal() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// forget stops tracking the call. Call it when the call has ended.
func (c *call) forget() { c.meter.drop(c.stream) }

// poll sets ready to true if the next message can be read now, and then counts that message as returned. length is the
// announced length of an incomplete message that is longer than the parameter small. It is 0 for a message that has
// arrived completely, and for the end of the client's messages. If many is false, a message counts as complete only
// when the client has ended its half of the stream, because gRPC waits for that too.
func (c *call) poll(small int, many bool) (length int, ready bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.whole > 0 && many:
		c.whole--
		return 0, true
	case c.length > small && !c.large:
		c.large = true
		return c.length, true
	case c.ended:
		return 0, true
	}
	return 0, false
}

// hasNext reports whether poll would return a complete message or the end of the client's messages. If many is false, a
// message counts as complete only when the client has ended its half of the stream.
func (c *call) hasNext(many bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended || many && c.whole > 0
}

// hasPart reports whether a message has begun to arrive and is incomplete.
func (c *call) hasPart() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.length >= 0
}
