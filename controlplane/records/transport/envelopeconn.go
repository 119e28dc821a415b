package transport

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// envelopeConn is an outgoing connection for raft messages (envelopes).
type envelopeConn struct {
	*tls.Conn
	out *nonblockingConn

	mu      sync.Mutex
	asked   bool
	answers time.Duration
}

// connect opens a connection for raft messages (envelopes) to the member of l.
func (m *Transport) connect(ctx context.Context, l *link) (*envelopeConn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", l.address)
	if err != nil {
		return nil, err
	}
	out, err := newNonblockingConn(conn, m.timeouts.response)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	config := mtls.Client(m.opts.Certificate, m.opts.Authority.Certificate(), func(other mtls.ID) error { return isMember(other, l.member) })
	config.NextProtos = []string{raftProtocol}
	config.DynamicRecordSizingDisabled = true
	t := tls.Client(out, config)
	if err := t.HandshakeContext(ctx); err != nil {
		t.Close()
		return nil, fmt.Errorf("greet member %d: %w", l.member, err)
	}
	if t.ConnectionState().NegotiatedProtocol != raftProtocol {
		t.Close()
		return nil, fault.New(fault.FailedPrecondition, "member %d does not speak %s: upgrade the older", l.member, raftProtocol)
	}
	out.startBuffering()
	return &envelopeConn{Conn: t, out: out, answers: m.timeouts.response}, nil
}

// Close closes the socket at once. Closing the TLS connection instead would first wait until a running write has ended.
func (w *envelopeConn) Close() error { return w.out.Conn.Close() }

// ask sends a ping, unless the response to the previous ping is still missing. Only the writer goroutine calls it.
func (w *envelopeConn) ask() error {
	w.mu.Lock()
	asked := w.asked
	w.mu.Unlock()
	if asked {
		return nil
	}
	if _, err := w.Write(make([]byte, headBytes)); err != nil {
		return err
	}
	w.mu.Lock()
	w.asked = true
	err := w.SetReadDeadline(time.Now().Add(w.answers))
	w.mu.Unlock()
	return errors.Join(err, w.out.flush(0))
}

func (w *envelopeConn) answered() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked = false
	return w.SetReadDeadline(time.Time{})
}

// errClosed is the error of a connection that the other member closed without sending a reason.
var errClosed = errors.New("the member closed the connection")

// listen reads responses to pings until the connection ends, or until the other member sends the reason why it closes
// the connection. It returns that reason or the read error, never nil.
func (w *envelopeConn) listen() error {
	in := bufio.NewReader(w)
	var head [headBytes]byte
	for {
		if _, err := io.ReadFull(in, head[:]); errors.Is(err, io.EOF) {
			return errClosed
		} else if err != nil {
			return err
		}
		n := binary.BigEndian.Uint32(head[:])
		if n == 0 {
			if err := w.answered(); err != nil {
				return err
			}
			continue
		}
		if n > mostRefusal {
			return fmt.Errorf("an answer of %d bytes, at most %d", n, mostRefusal)
		}
		reason := make([]byte, n)
		if _, err := io.ReadFull(in, reason); err != nil {
			return err
		}
		closed := &peerv1.RaftClosed{}
		if err := proto.Unmarshal(reason, closed); err != nil {
			return fmt.Errorf("decode why the member closed the connection: %w", err)
		}
		if err := decodeError(false, closed.GetFault(), ""); err != nil {
			return err
		}
		return errClosed
	}
}
