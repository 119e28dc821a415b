package transport

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// raftProtocol is the ALPN protocol (RFC 7301) of connections for envelopes. The number is the version of the framing.
const raftProtocol = "trivet-raft/1"

const (
	// queue is how many envelopes may wait for one member.
	queue = 8192
	// frameBytes is how many bytes of waiting envelopes are encoded before they are written. The last envelope may
	// exceed it by its own size.
	frameBytes = 256 << 10
	// lightBytes is the largest payload, in bytes, that the sending goroutine encodes and writes itself.
	lightBytes = 16 << 10
	// headBytes is the size of the length that precedes each frame.
	headBytes = 4
	// burst is the interval after an envelope in which further ones are left to the writer goroutine, which combines
	// them into one write.
	burst = 20 * time.Microsecond
	// mostRefusal is the largest frame, in bytes, that a member may send in response.
	mostRefusal = 64 << 10
	// connectTime is the timeout of a connection attempt. shortestWait and longestWait bound the time between two
	// attempts.
	connectTime  = 2 * time.Second
	shortestWait = 50 * time.Millisecond
	longestWait  = time.Second
)

// timeouts holds the timeouts of connections for envelopes.
type timeouts struct {
	pingInterval time.Duration // interval between two pings
	response     time.Duration // timeout of the response to a ping, and of a write to the socket
	idle         time.Duration // after this time without a ping or much data the receiver closes the connection
}

// peerConn sends envelopes to one member, in order. The sending goroutine writes a light envelope itself if no other
// write is in progress, as far as the socket accepts it without blocking. Other envelopes, and those of a burst, wait
// for the connection's writer goroutine. So send never blocks on the network, and a single envelope costs no goroutine
// switch.
type peerConn struct {
	wake chan struct{} // capacity 1: an envelope waits or is partly written

	mu      sync.Mutex
	waiting []message.Envelope // at most queue
	wire    *envelopeConn      // nil without a connection
	busy    bool               // only the writer goroutine may use the wire
	last    time.Time          // time of the last send
	frame   []byte             // buffer for the envelopes that send encodes
}

func newPeerConn() *peerConn { return &peerConn{wake: make(chan struct{}, 1)} }

func (l *peerConn) wakeWriter() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// send sends or queues an envelope, and drops it if the queue is full; raft sends again. It never blocks on the
// network. It returns an error only if the envelope cannot be encoded.
func (l *peerConn) send(e *message.Envelope) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	soon := now.Sub(l.last) < burst
	l.last = now
	if l.wire == nil || l.busy || soon || len(l.waiting) > 0 || !isLight(e) {
		if len(l.waiting) < queue {
			l.waiting = append(l.waiting, *e)
		}
		if l.wire != nil {
			l.wakeWriter()
		}
		return nil
	}
	var err error
	if l.frame, err = appendFrame(l.frame[:0], e); err != nil {
		return err
	}
	_, err = l.wire.Write(l.frame)
	empty := false
	if err == nil {
		empty, err = l.wire.out.try()
	}
	if err != nil || !empty {
		l.busy = true // the writer goroutine waits for the socket; a write error occurs there again
		l.wakeWriter()
	}
	return nil
}

// isLight reports whether an envelope is small enough for the sending goroutine to write it.
func isLight(e *message.Envelope) bool {
	if len(e.Raft.GetEntries())+len(e.Payloads)+len(e.Heartbeats) > 256 {
		return false
	}
	size := 0
	for _, entry := range e.Raft.GetEntries() {
		size += len(entry.GetData())
	}
	for _, p := range e.Payloads {
		size += len(p)
	}
	return size <= lightBytes
}

// appendFrame appends the length of an envelope and the envelope to buf. On an error it returns buf unchanged.
func appendFrame(buf []byte, e *message.Envelope) ([]byte, error) {
	start := len(buf)
	out, err := e.AppendTo(append(buf, make([]byte, headBytes)...))
	if err != nil {
		return buf, err
	}
	binary.BigEndian.PutUint32(out[start:], uint32(len(out)-start-headBytes))
	return out, nil
}

// open makes the peerConn write to a new connection.
func (l *peerConn) open(w *envelopeConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wire, l.busy = w, false
	l.wakeWriter()
}

// close detaches the connection and drops the waiting envelopes, which would be outdated on the next connection.
func (l *peerConn) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wire, l.waiting = nil, nil
}

// take returns and removes the waiting envelopes. If there are any, only the writer goroutine may use the wire until a
// later take finds none.
func (l *peerConn) take() []message.Envelope {
	l.mu.Lock()
	defer l.mu.Unlock()
	batch := l.waiting
	l.waiting = nil
	l.busy = len(batch) > 0
	return batch
}

// claim reserves the wire for the writer goroutine until the next take.
func (l *peerConn) claim() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busy = true
}

// keepConnected keeps a connection for envelopes to one member open until ctx ends.
func (m *Transport) keepConnected(ctx context.Context, l *link) {
	logged, wait := "", shortestWait
	for ctx.Err() == nil {
		began := time.Now()
		err := m.stream(ctx, l)
		if ctx.Err() != nil {
			return
		}
		// Log a failure once, until a connection has lasted a while, but log each new refusal.
		if time.Since(began) > 10*time.Second {
			logged, wait = "", shortestWait
		}
		if isRemoved(err) && m.opts.Removed != nil {
			m.opts.Removed()
		}
		switch _, refused := fault.From(err); {
		case refused && err.Error() != logged:
			m.opts.Log.Warn("member refuses envelopes", "member", l.member, "err", err)
		case logged == "":
			m.opts.Log.Info("member cannot be reached", "member", l.member, "err", err)
		}
		logged = err.Error()
		m.runner.ReportUnreachable(l.member)
		l.peerConn.close()
		select {
		case <-time.After(wait + rand.N(wait/4)):
			wait = min(wait*8/5, longestWait)
		case <-l.called:
			wait = shortestWait
		case <-ctx.Done():
		}
	}
}

// stream connects and sends envelopes until an error, which is never nil. If the member cannot be reached stream
// returns at once, so that envelopes to it are dropped meanwhile instead of queued until it is back.
func (m *Transport) stream(ctx context.Context, l *link) error {
	select {
	case <-l.called: // this attempt responds to the signal
	default:
	}
	w, err := m.connect(ctx, l)
	if err != nil {
		return err
	}
	over := make(chan error, 1)
	go func() { over <- w.listen() }()
	stopClosing := context.AfterFunc(ctx, func() { w.Close() })
	l.peerConn.open(w)
	err = m.write(l, w, over)
	stopClosing()
	l.peerConn.close()
	return err
}

// write sends the queued envelopes and the pings until an error. over receives the error of listen; write has read it
// when it returns.
func (m *Transport) write(l *link, w *envelopeConn, over <-chan error) error {
	ask := time.NewTicker(m.timeouts.pingInterval)
	defer ask.Stop()
	defer w.Close()
	for {
		var err error
		select {
		case err := <-over:
			return err
		case <-ask.C:
			l.peerConn.claim()
			err = w.ask()
			l.peerConn.wakeWriter()
		case <-l.peerConn.wake:
			err = m.drain(l, w)
		}
		if err == nil {
			continue
		}
		// Prefer the reason that the other member may have sent before it closed the connection.
		enough := time.AfterFunc(farewellTime, func() { w.Close() })
		defer enough.Stop()
		if closeReason := <-over; isFault(closeReason) {
			return closeReason
		}
		return err
	}
}

func isFault(err error) bool { _, ok := fault.From(err); return ok }

// drain writes all waiting envelopes. It logs and drops those that cannot be encoded.
func (m *Transport) drain(l *link, w *envelopeConn) error {
	// Write the rest of a partly written frame first; claim keeps senders from writing meanwhile.
	l.peerConn.claim()
	if err := w.out.flush(0); err != nil {
		return err
	}
	batch := l.peerConn.take()
	if len(batch) == 0 {
		return nil
	}
	var buf []byte
	for i := range batch {
		var err error
		if buf, err = appendFrame(buf, &batch[i]); err != nil {
			m.logLost(l, err)
		}
		batch[i] = message.Envelope{}
		if len(buf) < frameBytes && i < len(batch)-1 {
			continue
		}
		// Write in pieces, to bound the size of the data that is encrypted but not yet written.
		for left := buf; len(left) > 0; {
			n := min(len(left), maxBuffered)
			if _, err := w.Write(left[:n]); err != nil {
				return err
			}
			if err := w.out.flush(maxBuffered); err != nil {
				return err
			}
			left = left[n:]
		}
		if buf = buf[:0]; cap(buf) > 2*frameBytes {
			buf = nil
		}
	}
	l.peerConn.wakeWriter() // drain runs again, because only a take that finds nothing releases the wire
	return w.out.flush(0)
}

func (m *Transport) logLost(l *link, err error) {
	m.opts.Log.Error("envelope lost", "member", l.member, "err", err)
}
