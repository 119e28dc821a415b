package transport

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"strconv"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"

	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

const (
	// mostInbound is the maximum number of open incoming connections for raft messages (envelopes).
	mostInbound = 256
	// farewellTime is the time that a refused member has to read the reason before the connection is closed.
	farewellTime = time.Second
	// grain is the number of bytes by which the buffer of a frame grows as data arrives. An announced length alone
	// allocates no memory.
	grain = 1 << 20
)

// Credentials returns the credentials for the gRPC server of port 2380, from a config that mtls.Server returned.
// Connections whose ALPN protocol is raftProtocol are served by the Transport instead of by gRPC.
func (m *Transport) Credentials(config *tls.Config) credentials.TransportCredentials {
	config = config.Clone()
	config.NextProtos = []string{"h2", raftProtocol}
	return protocolSwitch{credentials.NewTLS(config), m}
}

type protocolSwitch struct {
	credentials.TransportCredentials
	m *Transport
}

// ServerHandshake implements credentials.TransportCredentials. After the handshake, it moves a connection for raft
// messages (envelopes) to the Transport and returns ErrConnDispatched to gRPC.
func (s protocolSwitch) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := s.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	if t, ok := info.(credentials.TLSInfo); ok && t.State.NegotiatedProtocol == raftProtocol {
		s.m.take(conn, t.State)
		return nil, nil, credentials.ErrConnDispatched
	}
	return conn, info, nil
}

// Clone implements credentials.TransportCredentials.
func (s protocolSwitch) Clone() credentials.TransportCredentials {
	return protocolSwitch{s.TransportCredentials.Clone(), s.m}
}

// take serves an incoming connection for raft messages (envelopes) until it ends, in a goroutine that Run waits for. If
// mostInbound connections are already open, take closes the new one.
func (m *Transport) take(conn net.Conn, state tls.ConnectionState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over || len(m.inbound) >= mostInbound {
		conn.Close()
		return
	}
	m.inbound[conn] = 0
	m.receiving.Go(func() {
		err := m.receive(conn, state)
		if f, ok := fault.From(err); ok {
			m.refuse(conn, f)
		}
		conn.Close()
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.inbound, conn)
	})
}

// closeIncoming closes all incoming connections for raft messages (envelopes).
func (m *Transport) closeIncoming() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for conn := range m.inbound {
		conn.Close()
	}
}

// receive delivers the envelopes (raft messages) of an incoming connection until an error, which it returns. It accepts
// an envelope only if it is addressed to this member and its sender is the member in the certificate. If the error is a
// fault.Fault, the caller must send it to that member.
func (m *Transport) receive(conn net.Conn, state tls.ConnectionState) error {
	// Remove the deadline, and detect silence by a timer instead. A deadline would not be reliable, because gRPC sets
	// and resets the deadline for its handshake, possibly later than this line.
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	quiet := time.AfterFunc(m.timeouts.idle, func() { conn.Close() })
	defer quiet.Stop()
	from, err := memberOf(state)
	if err == nil {
		from, err = m.known(from)
	}
	if err != nil {
		return err
	}
	m.registerIncoming(conn, from)
	in := bufio.NewReaderSize(conn, 64<<10)
	var frame []byte
	for unheard := 0; ; {
		var head [headBytes]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return err
		}
		n := binary.BigEndian.Uint32(head[:])
		if n == 0 {
			quiet.Reset(m.timeouts.idle)
			if err := m.answer(conn); err != nil {
				return err
			}
			continue
		}
		if n > message.MaxBytes {
			return fault.New(fault.InvalidArgument, "envelope: %d bytes are more than %d", n, message.MaxBytes)
		}
		if frame, err = readFrame(in, frame[:0], int(n), func() { quiet.Reset(m.timeouts.idle) }); err != nil {
			return err
		}
		e, err := m.accept(frame, from)
		if err != nil {
			return err
		}
		m.deliver(e)
		// Restart the silence timer, because data also shows that the member is alive. On a slow connection with much
		// data, pings arrive late.
		if unheard += len(frame); unheard >= grain/4 {
			quiet.Reset(m.timeouts.idle)
			unheard = 0
		}
		if cap(frame) > grain {
			frame = nil
		}
	}
}

// readFrame reads n bytes into frame, and grows frame as the bytes arrive. It calls progress before each piece after
// the first, so that a large frame does not time out.
func readFrame(in io.Reader, frame []byte, n int, progress func()) ([]byte, error) {
	for len(frame) < n {
		start, more := len(frame), min(n-len(frame), grain)
		if start > 0 {
			progress()
		}
		if cap(frame) < start+more {
			frame = append(frame, make([]byte, more)...)
		} else {
			frame = frame[:start+more]
		}
		if _, err := io.ReadFull(in, frame[start:]); err != nil {
			return nil, err
		}
	}
	return frame, nil
}

// registerIncoming registers conn as the incoming connection of the member with the ID from. It closes earlier
// connections of that member, which may be dead without having been detected. It also makes keepConnected reconnect to
// that member at once.
func (m *Transport) registerIncoming(conn net.Conn, from uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for other, member := range m.inbound {
		if member == from && other != conn {
			other.Close()
		}
	}
	m.inbound[conn] = from
	if l := m.links[from]; l != nil {
		select {
		case l.called <- struct{}{}:
		default:
		}
	}
}

// answer sends the response to a ping.
func (m *Transport) answer(conn net.Conn) error {
	if err := conn.SetWriteDeadline(time.Now().Add(m.timeouts.response)); err != nil {
		return err
	}
	_, err := conn.Write(make([]byte, headBytes))
	return err
}

// refuse sends the fault f as the reason why the connection ends. It then reads and discards data until the member
// closes the connection or farewellTime has passed: closing with unread data would make the kernel reset the
// connection, and the reason would be lost.
func (m *Transport) refuse(conn net.Conn, f *fault.Fault) {
	_, encoded, _ := encodeError(f)
	body, err := proto.Marshal(&peerv1.RaftClosed{Fault: encoded})
	if err != nil || len(body) > mostRefusal {
		return
	}
	enough := time.AfterFunc(farewellTime, func() { conn.Close() })
	defer enough.Stop()
	if _, err := conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)); err == nil {
		_, _ = io.Copy(io.Discard, conn)
	}
}

func (m *Transport) accept(frame []byte, from uint64) (message.Envelope, error) {
	e, err := message.Parse(frame)
	if err != nil {
		return e, fault.New(fault.InvalidArgument, "envelope: %v", err)
	}
	if e.From != from || e.To != m.opts.Self {
		return e, fault.New(fault.PermissionDenied, "member %d may not send from %d to %d here", from, e.From, e.To)
	}
	return e, nil
}

// memberOf returns the ID of the member at the other end of a connection, from its certificate. The ID is 0 for a
// member that has none yet.
func memberOf(state tls.ConnectionState) (uint64, error) {
	id, ok := mtls.PeerID(state)
	if !ok || id.Kind != mtls.Member {
		return 0, fault.New(fault.Unauthenticated, "not the certificate of a member")
	}
	member, err := strconv.ParseUint(id.Name, 10, 64)
	if err != nil {
		return 0, fault.New(fault.PermissionDenied, "%s names no member", id)
	}
	return member, nil
}
