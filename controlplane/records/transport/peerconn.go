package transport

import (
	"context"
	"encoding/binary"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/retry"
)

// raftProtocol is the ALPN protocol (RFC 7301) of connections for raft messages (envelopes). The number 1 is the
// version of the framing.
const raftProtocol = "trivet-raft/1"

const (
	// queue is the maximum number of envelopes (raft messages) that may wait to be sent to one member.
	queue = 8192
	// frameBytes is how many bytes of encoded envelopes (raft messages) are collected before they are written. The last
	// envelope may exceed this limit.
	frameBytes = 256 << 10
	// lightBytes is the largest payload, in bytes, of an envelope (raft message) that the sending goroutine encodes and
	// writes itself.
	lightBytes = 16 << 10
	// headBytes is the size, in bytes, of the length that precedes each frame.
	headBytes = 4
	// burst is the interval after an envelope (raft message) in which further envelopes are left to the writer
	// goroutine, which sends several of them in one write.
	burst = 20 * time.Microsecond
	// mostRefusal is the maximum size in bytes of the frame in which the receiver of envelopes (raft messages) states
	// why it closes the connection.
	mostRefusal = 64 << 10
	// connectTime is the timeout of an attempt to connect to another member, including the TLS handshake.
	connectTime = 2 * time.Second
)

// reconnectPauses configures the pauses between two attempts to connect to a member.
var reconnectPauses = retry.Pauses{First: 50 * time.Millisecond, Last: time.Second, Factor: 1.6, Jitter: 0.2}

// timeouts holds the timeouts of connections for raft messages (envelopes).
type timeouts struct {
	pingInterval time.Duration // interval between two pings
	response     time.Duration // timeout of the response to a ping, and of each write to the socket
	idle         time.Duration // time without a ping or much data after which the receiver closes the connection
}

// peerConn sends envelopes (raft messages) to one member, in order. The goroutine that calls send writes a light
// envelope (isLight) itself, as far as the socket accepts it without blocking, if no other write is in progress. Other
// envelopes, and those of a burst, are queued for the connection's writer goroutine. So send never blocks on the
// network, and a single envelope costs no goroutine switch.
type peerConn struct {
	wake chan struct{} // capacity 1: signals that an envelope waits or is partly written

	mu      sync.Mutex
	waiting []message.Envelope // queued envelopes, at most queue
	wire    *envelopeConn      // the connection; nil while there is none
	busy    bool               // only the writer goroutine may use wire
	last    time.Time          // time of the last call of send
	frame   []byte             // reused buffer in which send encodes
}

func newPeerConn() *peerConn { return &peerConn{wake: make(chan struct{}, 1)} }

func (l *peerConn) wakeWriter() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// send writes or queues an envelope. It drops the envelope if the queue is full, because raft repeats lost messages. It
// never blocks on the network, and returns an error only if the envelope cannot be encoded.
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
		l.busy = true // the writer goroutine waits for the socket, where a write error occurs again
		l.wakeWriter()
	}
	return nil
}

// isLight reports whether an envelope is small enough for the sending goroutine to encode and write it itself.
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

// appendFrame appends a frame to buf: the length of the encoded envelope, then the envelope. On an error it returns buf
// unchanged.
func appendFrame(buf []byte, e *message.Envelope) ([]byte, error) {
	start := len(buf)
	out, err := e.AppendTo(append(buf, make([]byte, headBytes)...))
	if err != nil {
		return buf, err
	}
	binary.BigEndian.PutUint32(out[start:], uint32(len(out)-start-headBytes))
	return out, nil
}

// open makes w the connection on which the peerConn sends.
func (l *peerConn) open(w *envelopeConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wire, l.busy = w, false
	l.wakeWriter()
}

// close removes the connection and drops the queued envelopes (raft messages), which would be outdated on the next
// connection.
func (l *peerConn) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wire, l.waiting = nil, nil
}

// take removes and returns the queued envelopes (raft messages). If there are any, only the writer goroutine may use
// the connection until a later call of take finds none.
func (l *peerConn) take() []message.Envelope {
	l.mu.Lock()
	defer l.mu.Unlock()
	batch := l.waiting
	l.waiting = nil
	l.busy = len(batch) > 0
	return batch
}

// claim makes the connection exclusive to the writer goroutine until a later call of take finds no envelopes.
func (l *peerConn) claim() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busy = true
}

// keepConnected connects to one member for envelopes, and reconnects after each failure, until ctx ends.
func (m *Transport) keepConnected(ctx context.Context, l *link) {
	logged, pauses := "", reconnectPauses.Start()
	for ctx.Err() == nil {
		began := time.Now()
		err := m.stream(ctx, l)
		if ctx.Err() != nil {
			return
		}
		// Log a failure only once until a connection has lasted 10 seconds. Log a refusal also if its text is new.
		if time.Since(began) > 10*time.Second {
			logged = ""
			pauses.Reset()
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
		case <-time.After(pauses.NextBackOff()):
		case <-l.called:
			pauses.Reset()
		case <-ctx.Done():
		}
	}
}

// stream connects to a member and sends envelopes (raft messages) until an error, which it returns; the error is never
// nil. If the member cannot be reached, stream returns at once. The caller then drops the queued envelopes.
func (m *Transport) stream(ctx context.Context, l *link) error {
	select {
	case <-l.called: // discard the signal, because this attempt connects anyway
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

// write sends the queued envelopes (raft messages) and the pings on w until an error. The channel over receives the
// error with which w.listen ends; write always reads it before it returns.
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
		// The other member may have sent a reason before it closed the connection; return that instead of the write
		// error.
		enough := time.AfterFunc(farewellTime, func() { w.Close() })
		defer enough.Stop()
		if closeReason := <-over; isFault(closeReason) {
			return closeReason
		}
		return err
	}
}

func isFault(err error) bool { _, ok := fault.From(err); return ok }

// drain writes all queued envelopes (raft messages) to w. It logs and drops those that cannot be encoded.
func (m *Transport) drain(l *link, w *envelopeConn) error {
	// Write the rest of a partly written frame first. After claim, senders queue their envelopes instead of writing
	// them.
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
		// Write in pieces of maxBuffered, to bound the amount of encrypted data in memory.
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
	l.peerConn.wakeWriter() // drain must run again, because wire is released only by a take that finds no envelopes
	return w.out.flush(0)
}

func (m *Transport) logLost(l *link, err error) {
	m.opts.Log.Error("envelope lost", "member", l.member, "err", err)
}
