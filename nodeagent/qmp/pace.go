package qmp

import (
	"net"
	"time"

	"golang.org/x/time/rate"
)

// Limits of the rate at which a connection is read. A compromised QEMU can send events without pause, and reading them
// all would use a core of the host. A normal QEMU sends most events at most once a second.
const (
	// messageRate (per second) and messageBurst (at once) limit the messages that reply to no command: events, and
	// unexpected replies.
	messageRate, messageBurst = 1000, 4000
	// byteRate (bytes per second) and byteBurst (bytes at once) limit all input. The burst is larger than the longest
	// message.
	byteRate, byteBurst = 1 << 20, MaxLine + 1<<20
	// minPause is the shortest pause. Shorter ones are skipped, because a timer for each message would cost more than
	// the message.
	minPause = 20 * time.Millisecond
)

// pacedReader reads a connection at a limited rate. Unread data stays in the socket and in QEMU. The reply to a command
// is read after all earlier messages, so the command's deadline includes the time to read these.
type pacedReader struct {
	nc              net.Conn
	messages, bytes *rate.Limiter
	// closing is closed when the connection is about to end. Reads do not pause after that.
	closing <-chan struct{}
}

func newPacedReader(nc net.Conn, closing <-chan struct{}) *pacedReader {
	return &pacedReader{
		nc: nc, messages: rate.NewLimiter(messageRate, messageBurst), bytes: rate.NewLimiter(byteRate, byteBurst), closing: closing,
	}
}

// Read reads from the connection. It then pauses as long as needed to keep the average at byteRate bytes per second.
func (r *pacedReader) Read(p []byte) (int, error) {
	n, err := r.nc.Read(p)
	if n > 0 {
		r.spend(r.bytes, n)
	}
	return n, err
}

// unasked must be called after each message that replies to no command. It pauses if there are more than messageRate of
// them per second.
func (r *pacedReader) unasked() { r.spend(r.messages, 1) }

// spend takes n tokens from the limiter l, and pauses until they are available. It does not pause if that would take
// less than minPause.
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
	case <-r.closing:
	}
}
