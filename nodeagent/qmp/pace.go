package qmp

import (
	"net"
	"time"

	"golang.org/x/time/rate"
)

// How fast a connection is read, at most. A QEMU that somebody has broken into can send events without pause; reading
// them all would take a core of the host. QEMU itself sends most events at most once a second.
const (
	// messageRate and messageBurst bound the messages that answer no command: events, and replies to nothing.
	messageRate, messageBurst = 1000, 4000
	// byteRate and byteBurst bound all that is read, in bytes. The burst holds the longest message.
	byteRate, byteBurst = 1 << 20, MaxLine + 1<<20
	// minPause is the shortest pause: a timer for each message would cost more than the message.
	minPause = 20 * time.Millisecond
)

// pacedReader reads a connection no faster than its limits. What is not read waits in QEMU. An answer that a command waits
// for comes after what QEMU sent before it, so the command's deadline bounds that wait.
type pacedReader struct {
	nc              net.Conn
	messages, bytes *rate.Limiter
	// hurry ends pauses, and lets there be no more, when the connection is about to end.
	hurry <-chan struct{}
}

func newPacedReader(nc net.Conn, hurry <-chan struct{}) *pacedReader {
	return &pacedReader{
		nc: nc, messages: rate.NewLimiter(messageRate, messageBurst), bytes: rate.NewLimiter(byteRate, byteBurst), hurry: hurry,
	}
}

// Read implements io.Reader.
func (r *pacedReader) Read(p []byte) (int, error) {
	n, err := r.nc.Read(p)
	if n > 0 {
		r.spend(r.bytes, n)
	}
	return n, err
}

// unasked is to be called after each message that answers no command.
func (r *pacedReader) unasked() { r.spend(r.messages, 1) }

// spend takes n from a limiter, and pauses until the limiter has had them, when that is worth a pause.
func (r *pacedReader) spend(l *rate.Limiter, n int) {
	now := time.Now()
	pause := l.ReserveN(now, n).DelayFrom(now)
	if pause < minPause {
		return
	}
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-t.C:
	case <-r.hurry:
	}
}
