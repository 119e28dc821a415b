package rpc

import (
	"bufio"
	"encoding/binary"
	"net"
	"runtime"
	"sync"
)

// A Read never returns bytes of two frames. So when the server's tap handle runs, the last HEADERS frame that was read
// belongs to the call that the tap handle is called for.
type meter struct {
	net.Conn
	// remote is a copy of the client's address that only this connection uses: the pointer is its key in Intake.meters.
	remote net.Addr
	intake *Intake
	in     *bufio.Reader

	// Only the goroutine that reads uses the fields up to mu.
	preface int    // bytes left of the client's preface
	head    int    // bytes left of the frame's header
	left    int    // bytes left of the frame's payload
	kind    byte   // type of the frame
	flags   byte   // flags of the frame
	stream  uint32 // stream of the frame
	padding int    // bytes at the end of the payload that are padding; -1 until the length of the padding was read
	current *call  // whose data the frame carries
	last    uint32 // stream of the last HEADERS frame
	ended   bool   // whether that frame ends the client's half of the stream

	mu     sync.Mutex
	calls  map[uint32]*call
	closed bool

	release func() // gives the connection back to the intake's count, once
}

// Frame types and flags of HTTP/2 that a meter evaluates.
const (
	frameHeader = 9

	frameData    = 0
	frameHeaders = 1
	frameReset   = 3

	flagEndStream = 1
	flagPadded    = 8
)

// prefaceBytes is the length of the client connection preface (RFC 9113, section 3.4).
const prefaceBytes = len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

// readAhead is the size of a meter's buffer in bytes. gRPC uses no read buffer of its own with a meter.
const readAhead = 16 << 10

func newMeter(conn net.Conn, intake *Intake, release func()) *meter {
	m := &meter{
		Conn: conn, remote: ownAddr(conn.RemoteAddr()), intake: intake, in: bufio.NewReaderSize(conn, readAhead), preface: prefaceBytes,
		calls: map[uint32]*call{}, release: release,
	}
	// If gRPC fails before it reads, it drops the connection without closing the net.Conn that the handshake returned.
	runtime.AddCleanup(m, func(release func()) { release() }, release)
	return m
}

// otherAddr is a copy of an address of a network other than TCP.
type otherAddr struct{ net.Addr }

// ownAddr returns a copy of an address, so that no two connections share a pointer.
func ownAddr(a net.Addr) net.Addr {
	if tcp, ok := a.(*net.TCPAddr); ok {
		c := *tcp
		return &c
	}
	return &otherAddr{a}
}

// RemoteAddr implements net.Conn.
func (m *meter) RemoteAddr() net.Addr { return m.remote }

// Read implements net.Conn.
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

// Close implements net.Conn.
func (m *meter) Close() error {
	m.mu.Lock()
	m.closed = true
	clear(m.calls)
	m.mu.Unlock()
	m.intake.meters.Delete(m.remote)
	m.release()
	return m.Conn.Close()
}

// begin processes the header of a frame.
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
		// Register the meter at its first call, because gRPC reliably closes a connection only once it has had a call.
		// Do not register it after Close: gRPC goes on reading buffered frames, and may not call Close again.
		m.mu.Lock()
		if !m.closed {
			m.intake.meters.LoadOrStore(m.remote, m)
		}
		m.mu.Unlock()
		m.last, m.ended = m.stream, m.flags&flagEndStream != 0
	}
}

// payload processes bytes of the payload, before they are subtracted from left.
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

// end processes the end of a frame.
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

// open starts to track the call whose headers were read last. It returns nil if the connection has twice as many calls
// as it may have streams, which only a client that violates the protocol reaches.
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

// prefixBytes is the size of the prefix of each gRPC message: a flag and the length of the message.
const prefixBytes = 5

// call tracks the messages of one call as they arrive.
type call struct {
	meter  *meter
	stream uint32

	// Only the goroutine that reads uses the fields up to mu.
	prefix [prefixBytes]byte
	have   int // bytes of the prefix
	left   int // bytes of the message that have not arrived

	mu      sync.Mutex
	whole   int           // messages that have arrived and were not taken
	length  int           // announced length of the message that is arriving; -1 when there is none
	large   bool          // the message that is arriving was taken already
	ended   bool          // the client sends no more
	changed chan struct{} // holds a token when one of the above has changed
}

// arrive processes bytes of the client's messages.
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

// forget stops tracking the call.
func (c *call) forget() { c.meter.drop(c.stream) }

// poll takes the next message if it can be read now, and reports in ready whether it can. length is 0 for a message
// that has arrived completely and for the end of the client's messages, and the announced length for an incomplete
// message longer than small. Without many, a message counts as complete only once the client has ended its half of the
// stream, which gRPC also waits for.
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

// hasNext reports whether poll would return a message that has arrived as a whole, or the end.
func (c *call) hasNext(many bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended || many && c.whole > 0
}

// hasPart reports whether part of a message has arrived.
func (c *call) hasPart() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.length >= 0
}
