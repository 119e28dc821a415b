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

// raftProtocol is what connections for envelopes are chosen by in the TLS handshake (ALPN, RFC 7301), with the major
// version of how they are framed.
const raftProtocol = "trivet-raft/1"

const (
	// queue is how many envelopes wait for one member.
	queue = 8192
	// frameBytes is about how much of them is encoded before it is written; the last one may exceed it by its own size.
	frameBytes = 256 << 10
	// lightBytes is the largest payload that whoever sends it encodes and writes itself.
	lightBytes = 16 << 10
	// headBytes is the length before a frame.
	headBytes = 4
	// burst is how soon after another an envelope is left to the writer, who makes one write of many.
	burst = 20 * time.Microsecond
	// mostRefusal is the largest frame that a member may answer with.
	mostRefusal = 64 << 10
	// connectTime bounds how long a connection takes to come about, shortestWait and longestWait the time between two.
	connectTime  = 2 * time.Second
	shortestWait = 50 * time.Millisecond
	longestWait  = time.Second
)

// patience is how long a connection for envelopes is believed in.
type patience struct {
	ask    time.Duration // how often the other side is asked whether it is there
	answer time.Duration // how long it may take to answer, or to take some of what is written
	quiet  time.Duration // how long the receiver waits without being asked, or getting much
}

// lane takes envelopes to one member, in order. Whoever sends a light one writes it itself when nothing else is under way,
// as far as the socket takes it; all else, and what comes in bursts, is left to the lane's writer. So nobody who sends
// waits, and what is sent alone costs no change of goroutines.
type lane struct {
	wake chan struct{} // capacity 1: something waits, or is half written

	mu      sync.Mutex
	waiting []message.Envelope // at most queue
	wire    *wire              // nil without a connection
	busy    bool               // the wire is the writer's alone
	last    time.Time          // when something was sent
	frame   []byte             // encoded by who sends
}

func newLane() *lane { return &lane{wake: make(chan struct{}, 1)} }

func (l *lane) ring() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// send takes an envelope, or forgets it when too many wait: raft sends again. It does not wait for the network. The error
// is that of an envelope that cannot be encoded.
func (l *lane) send(e *message.Envelope) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	soon := now.Sub(l.last) < burst
	l.last = now
	if l.wire == nil || l.busy || soon || len(l.waiting) > 0 || !light(e) {
		if len(l.waiting) < queue {
			l.waiting = append(l.waiting, *e)
		}
		if l.wire != nil {
			l.ring()
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
		l.busy = true // the writer waits for the socket, and meets the error again if there is one
		l.ring()
	}
	return nil
}

// light says whether an envelope is small enough to be written by who sends it.
func light(e *message.Envelope) bool {
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

// appendFrame appends an envelope and its length. buf stays as it was when it cannot be encoded.
func appendFrame(buf []byte, e *message.Envelope) ([]byte, error) {
	start := len(buf)
	out, err := e.AppendTo(append(buf, make([]byte, headBytes)...))
	if err != nil {
		return buf, err
	}
	binary.BigEndian.PutUint32(out[start:], uint32(len(out)-start-headBytes))
	return out, nil
}

// open makes the lane write to a connection.
func (l *lane) open(w *wire) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wire, l.busy = w, false
	l.ring()
}

// close ends that, and forgets what waits: it is old by the time a connection is there again.
func (l *lane) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wire, l.waiting = nil, nil
}

// take is what waits; the wire is the writer's until there is nothing more.
func (l *lane) take() []message.Envelope {
	l.mu.Lock()
	defer l.mu.Unlock()
	batch := l.waiting
	l.waiting = nil
	l.busy = len(batch) > 0
	return batch
}

// claim keeps those who send from writing until the next take.
func (l *lane) claim() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busy = true
}

// pump keeps a connection for envelopes to one member.
func (m *Mesh) pump(ctx context.Context, l *link) {
	said, wait := "", shortestWait
	for ctx.Err() == nil {
		began := time.Now()
		err := m.stream(ctx, l)
		if ctx.Err() != nil {
			return
		}
		// Once is enough for whoever reads the log, until it has worked for a while; a refusal also when it is another.
		if time.Since(began) > 10*time.Second {
			said, wait = "", shortestWait
		}
		if saysRemoved(err) && m.opts.Removed != nil {
			m.opts.Removed()
		}
		switch _, refused := fault.From(err); {
		case refused && err.Error() != said:
			m.opts.Log.Warn("member does not take envelopes", "member", l.member, "err", err)
		case said == "":
			m.opts.Log.Info("member cannot be reached", "member", l.member, "err", err)
		}
		said = err.Error()
		m.runner.ReportUnreachable(l.member)
		l.lane.close()
		select {
		case <-time.After(wait + rand.N(wait/4)):
			wait = min(wait*8/5, longestWait)
		case <-l.called:
			wait = shortestWait
		case <-ctx.Done():
		}
	}
}

// stream sends envelopes until something fails; the error is never nil. It does not wait for a member that cannot be
// reached, so that what is sent to it meanwhile is dropped and not kept until it is back.
func (m *Mesh) stream(ctx context.Context, l *link) error {
	select {
	case <-l.called: // it is about to be
	default:
	}
	w, err := m.connect(ctx, l)
	if err != nil {
		return err
	}
	over := make(chan error, 1)
	go func() { over <- w.listen() }()
	hangUp := context.AfterFunc(ctx, func() { w.Close() })
	l.lane.open(w)
	err = m.write(l, w, over)
	hangUp()
	l.lane.close()
	return err
}

// write writes what those who send leave to it, until something fails. over is how listening ended, and has been read
// when it returns.
func (m *Mesh) write(l *link, w *wire, over <-chan error) error {
	ask := time.NewTicker(m.patience.ask)
	defer ask.Stop()
	defer w.Close()
	for {
		var err error
		select {
		case err := <-over:
			return err
		case <-ask.C:
			l.lane.claim()
			err = w.ask()
			l.lane.ring()
		case <-l.lane.wake:
			err = m.drain(l, w)
		}
		if err == nil {
			continue
		}
		// The other side may have said why, which is worth more.
		enough := time.AfterFunc(farewellTime, func() { w.Close() })
		defer enough.Stop()
		if said := <-over; isFault(said) {
			return said
		}
		return err
	}
}

func isFault(err error) bool { _, ok := fault.From(err); return ok }

// drain writes what waits. What cannot be encoded is lost like anything else that cannot be sent.
func (m *Mesh) drain(l *link, w *wire) error {
	// What was half written comes first, and nobody else writes meanwhile.
	l.lane.claim()
	if err := w.out.flush(0); err != nil {
		return err
	}
	batch := l.lane.take()
	if len(batch) == 0 {
		return nil
	}
	var buf []byte
	for i := range batch {
		var err error
		if buf, err = appendFrame(buf, &batch[i]); err != nil {
			m.lost(l, err)
		}
		batch[i] = message.Envelope{}
		if len(buf) < frameBytes && i < len(batch)-1 {
			continue
		}
		// In pieces, so that what is encrypted and not written yet stays small.
		for left := buf; len(left) > 0; {
			n := min(len(left), mostKept)
			if _, err := w.Write(left[:n]); err != nil {
				return err
			}
			if err := w.out.flush(mostKept); err != nil {
				return err
			}
			left = left[n:]
		}
		if buf = buf[:0]; cap(buf) > 2*frameBytes {
			buf = nil
		}
	}
	l.lane.ring() // the wire is the writer's until it has found nothing more
	return w.out.flush(0)
}

func (m *Mesh) lost(l *link, err error) {
	m.opts.Log.Error("envelope lost", "member", l.member, "err", err)
}
