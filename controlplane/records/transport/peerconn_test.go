package transport

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/message"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// numbered returns an envelope that package consensus ignores. With payload bytes above lightBytes it is one that the
// writer goroutine must write.
func numbered(from, to, number uint64, payload int) message.Envelope {
	e := message.Envelope{From: from, To: to, Kind: message.KindForward, Group: 99, Number: number}
	if payload > 0 {
		e.Payloads = [][]byte{make([]byte, payload)}
	}
	return e
}

// frames returns each of bodies as a frame: its length, then the body.
func frames(bodies ...[]byte) []byte {
	var out []byte
	for _, b := range bodies {
		out = append(binary.BigEndian.AppendUint32(out, uint32(len(b))), b...)
	}
	return out
}

// readEnvelope reads one frame and returns the envelope in it.
func readEnvelope(t *testing.T, from io.Reader) message.Envelope {
	t.Helper()
	var head [headBytes]byte
	_, err := io.ReadFull(from, head[:])
	require.NoError(t, err)
	body := make([]byte, binary.BigEndian.Uint32(head[:]))
	_, err = io.ReadFull(from, body)
	require.NoError(t, err)
	e, err := message.Parse(body)
	require.NoError(t, err)
	return e
}

// registerIncoming opens a connection for raft messages (envelopes) to the member to, with the certificate own and the
// given ALPN protocol.
func (w *testCluster) registerIncoming(to uint64, own mtls.Source, protocol string) (*tls.Conn, error) {
	config := mtls.Client(own, w.authority.Certificate(), mtls.OnlyKind(mtls.Member))
	config.NextProtos = []string{protocol}
	dialer := tls.Dialer{Config: config}
	conn, err := dialer.DialContext(limited(w.t), "tcp", w.addresses[to])
	if err != nil {
		return nil, err
	}
	w.t.Cleanup(func() { conn.Close() })
	return conn.(*tls.Conn), nil
}

// sendBytes sends bytes on a new connection to the member to. It returns the reason with which the member closes the
// connection, or errClosed if it sends no reason.
func (w *testCluster) sendBytes(to uint64, own mtls.Source, protocol string, bytes []byte) error {
	conn, err := w.registerIncoming(to, own, protocol)
	if err != nil {
		return err
	}
	if _, err := conn.Write(bytes); err != nil {
		return err
	}
	return (&envelopeConn{Conn: conn}).listen()
}

// TestEnvelopesAreChecked checks that a connection accepts only envelopes from the certified member to this one, in
// valid frames of the known version. Otherwise the sender must get the reason.
func TestEnvelopesAreChecked(t *testing.T) {
	heard := make(chan message.Envelope, 100)
	hear := func(e message.Envelope) bool { heard <- e; return true }
	w := newTestClusterWith(t, map[uint64]func(message.Envelope) bool{1: hear}, 3, 2, 3)
	frame := func(e message.Envelope) []byte {
		b, err := e.AppendTo(nil)
		require.NoError(t, err)
		return b
	}
	good := frame(message.Envelope{From: 2, To: 1, Kind: message.KindDirIDRequest})
	future := append([]byte{9}, good[1:]...)
	for name, c := range map[string]struct {
		bytes []byte
		kind  fault.Kind
		says  string
	}{
		"for another":    {frames(frame(message.Envelope{From: 3, To: 1, Kind: message.KindDirIDRequest})), fault.PermissionDenied, "may not send from 3"},
		"for us":         {frames(frame(message.Envelope{From: 1, To: 1, Kind: message.KindDirIDRequest})), fault.PermissionDenied, "may not send from 1"},
		"to another":     {frames(frame(message.Envelope{From: 2, To: 3, Kind: message.KindDirIDRequest})), fault.PermissionDenied, "to 3 here"},
		"garbage":        {frames([]byte("garbage")), fault.InvalidArgument, "envelope"},
		"cut short":      {frames(good[:5]), fault.InvalidArgument, "envelope"},
		"another future": {frames(future), fault.InvalidArgument, "the peer speaks version 9"},
		"too large":      {binary.BigEndian.AppendUint32(nil, message.MaxBytes+1), fault.InvalidArgument, "are more than"},
		"no frames":      {[]byte("GET / HTTP/1.1\r\n\r\n"), fault.InvalidArgument, "are more than"},
	} {
		err := w.sendBytes(1, w.as("2"), raftProtocol, append(frames(good), c.bytes...))
		require.True(t, fault.Is(err, c.kind), "%s: %v", name, err)
		require.ErrorContains(t, err, c.says, name)
		require.Equal(t, message.KindDirIDRequest, (<-heard).Kind, "%s: what came before was good", name)
		require.Empty(t, heard, name)
	}
	_, err := w.registerIncoming(1, w.as("2"), "trivet-raft/2")
	require.ErrorContains(t, err, "no application protocol")

	// Pings must be responded to between frames, and a second connection of the same member must replace the first one.
	first, err := w.registerIncoming(1, w.as("2"), raftProtocol)
	require.NoError(t, err)
	_, err = first.Write(frames(nil, good, nil))
	require.NoError(t, err)
	answers := make([]byte, 2*headBytes)
	_, err = io.ReadFull(first, answers)
	require.NoError(t, err)
	require.Equal(t, frames(nil, nil), answers)
	<-heard
	second, err := w.registerIncoming(1, w.as("2"), raftProtocol)
	require.NoError(t, err)
	_, err = second.Write(frames(good))
	require.NoError(t, err)
	<-heard
	_, err = io.ReadAll(first)
	require.NoError(t, err, "closed")
	// A connection that ends within a frame must not deliver that frame.
	_, err = second.Write(frames(good)[:10])
	require.NoError(t, err)
	require.NoError(t, second.Close())
	require.NoError(t, w.sendThenPing(good))
	require.Len(t, heard, 1)
	require.NoError(t, w.servers[1].runner.Err())
}

// sendThenPing sends the encoded envelope good and a ping on a new connection to member 1, and waits for the response
// to the ping.
func (w *testCluster) sendThenPing(good []byte) error {
	conn, err := w.registerIncoming(1, w.as("2"), raftProtocol)
	if err != nil {
		return err
	}
	if _, err = conn.Write(frames(good, nil)); err != nil {
		return err
	}
	_, err = io.ReadFull(conn, make([]byte, headBytes))
	return err
}

// deliveryLog stores the numbers of the test's envelopes (raft messages) that a member receives.
type deliveryLog struct {
	mu      sync.Mutex
	numbers []uint64
}

func (s *deliveryLog) receive(e message.Envelope) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.Group == 99 {
		s.numbers = append(s.numbers, e.Number)
	}
	return true
}

func (s *deliveryLog) received(number uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.numbers, number)
}

// beyond reports whether the number of the last received envelope (raft message) is greater than the given one.
func (s *deliveryLog) beyond(number uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.numbers) > 0 && s.numbers[len(s.numbers)-1] > number
}

// TestOrder sends small and large envelopes (raft messages) from concurrent senders. They must arrive once and in
// order, also after the receiver was restarted.
func TestOrder(t *testing.T) {
	two := &deliveryLog{}
	w := newTestClusterWith(t, map[uint64]func(message.Envelope) bool{2: two.receive}, 2)
	one := w.servers[1].mesh
	for round := range uint64(2) {
		base := round * 1_000_000
		probe := base
		require.Eventually(t, func() bool { probe++; one.Send(numbered(1, 2, probe, 0)); return two.beyond(base) }, 20*time.Second, 5*time.Millisecond)
		const many = queue / 2
		var order sync.Mutex
		next := base + 500_000
		var senders sync.WaitGroup
		for range 4 {
			senders.Go(func() {
				for range many / 4 {
					order.Lock()
					next++
					payload := 0
					switch {
					case next%500 == 0:
						payload = 600 << 10
					case next%50 == 0:
						payload = lightBytes + 1
					case next%3 == 0:
						payload = 1000
					}
					one.Send(numbered(1, 2, next, payload))
					order.Unlock()
				}
			})
		}
		senders.Wait()
		require.Eventually(t, func() bool { return two.received(next) }, 20*time.Second, 5*time.Millisecond)
		two.mu.Lock()
		got := slices.DeleteFunc(slices.Clone(two.numbers), func(n uint64) bool { return n <= base+500_000 })
		require.True(t, slices.IsSorted(two.numbers))
		two.mu.Unlock()
		require.Len(t, got, many)
		require.Equal(t, many, len(slices.Compact(got)))

		w.servers[2].stopServing()
		l, err := net.Listen("tcp", w.addresses[2])
		require.NoError(t, err)
		w.servers[2].serve(l)
	}
}

// fakePeer is a Transport of member 1. The test itself acts as member 2, with the connections that next returns.
type fakePeer struct {
	*Transport
	came chan *tls.Conn
}

func newFakePeer(t *testing.T, p timeouts) *fakePeer {
	w := newTestCluster(t, 1)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	config := mtls.Server(w.as("2"), w.authority.Certificate(), mtls.OnlyKind(mtls.Member))
	config.NextProtos = []string{raftProtocol}
	came := make(chan *tls.Conn, 100)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if s := tls.Server(conn, config); s.HandshakeContext(t.Context()) == nil {
				came <- s
			} else {
				conn.Close()
			}
		}
	}()
	m, err := New(Options{
		Self: 1, Members: map[uint64]string{2: l.Addr().String()}, Certificate: w.as("1"), Authority: w.authority, Log: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	m.Attach(w.servers[1].runner, w.servers[1].commands, nil)
	m.timeouts = p
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); m.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return &fakePeer{m, came}
}

func (b *fakePeer) next(t *testing.T) *tls.Conn {
	select {
	case conn := <-b.came:
		t.Cleanup(func() { conn.NetConn().Close() })
		return conn
	case <-limited(t).Done():
		t.Fatal("nobody came")
		return nil
	}
}

func (b *fakePeer) waiting() (n int, open bool) {
	l := b.link(2).peerConn
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.waiting), l.wire != nil
}

// TestSlowReader checks that Send does not block if a member does not read. The queue for the member must be limited,
// and must arrive in order when the member reads again.
func TestSlowReader(t *testing.T) {
	b := newFakePeer(t, timeouts{pingInterval: time.Hour, response: time.Hour, idle: time.Hour})
	conn := b.next(t)
	require.Eventually(t, func() bool { _, open := b.waiting(); return open }, 20*time.Second, time.Millisecond)
	e := numbered(1, 2, 0, 10_000)
	for e.Number = 1; e.Number <= 3*queue; e.Number++ { // the loop must end although the other member does not read
		b.Send(e)
		n, _ := b.waiting()
		require.LessOrEqual(t, n, queue)
	}
	last := uint64(0)
	for range queue {
		e := readEnvelope(t, conn)
		require.Greater(t, e.Number, last)
		last = e.Number
	}
}

// TestHalfOpenConnections checks that a connection whose other end no longer responds is closed by the side that
// notices first: the writer by the write timeout, the pinging side by the missing response, or the receiver by the
// missing ping.
func TestHalfOpenConnections(t *testing.T) {
	t.Run("peer does not read", func(t *testing.T) {
		b := newFakePeer(t, timeouts{pingInterval: time.Hour, response: 50 * time.Millisecond, idle: time.Hour})
		b.next(t)
		e := numbered(1, 2, 1, 1<<20)
		for range 100 {
			b.Send(e)
		}
		b.next(t)
	})
	t.Run("peer does not respond", func(t *testing.T) {
		b := newFakePeer(t, timeouts{pingInterval: 10 * time.Millisecond, response: 50 * time.Millisecond, idle: time.Hour})
		go io.Copy(io.Discard, b.next(t))
		b.next(t)
	})
	t.Run("peer does not ping", func(t *testing.T) {
		w := newTestCluster(t, 2, 2)
		s := w.servers[1]
		s.mesh.mu.Lock()
		s.mesh.timeouts.idle = 50 * time.Millisecond // no member has connected yet
		s.mesh.mu.Unlock()
		conn, err := w.registerIncoming(1, w.as("2"), raftProtocol)
		require.NoError(t, err)
		_, err = io.ReadAll(conn)
		require.NoError(t, err, "closed")
	})
	t.Run("peer responds", func(t *testing.T) {
		b := newFakePeer(t, timeouts{pingInterval: 5 * time.Millisecond, response: 10 * time.Second, idle: time.Hour})
		conn := b.next(t)
		for range 10 {
			var head [headBytes]byte
			_, err := io.ReadFull(conn, head[:])
			require.NoError(t, err)
			require.Zero(t, head)
			_, err = conn.Write(head[:])
			require.NoError(t, err)
		}
		require.Empty(t, b.came)
	})
}

// TestInvalidResponses checks that an invalid response to a ping makes the transport close the connection and
// reconnect.
func TestInvalidResponses(t *testing.T) {
	b := newFakePeer(t, timeouts{pingInterval: time.Hour, response: time.Second, idle: time.Hour})
	for _, bad := range [][]byte{frames([]byte("garbage")), {0xff, 0xff, 0xff, 0xff}, frames([]byte{10, 1, 'x'}), {0, 0}} {
		conn := b.next(t)
		_, err := conn.Write(bad)
		require.NoError(t, err)
		require.NoError(t, conn.CloseWrite())
	}
	b.next(t)
}

// TestQueueIsDroppedWithoutConnection checks that envelopes (raft messages) to a member that cannot be reached are
// dropped, so that it gets no outdated ones later.
func TestQueueIsDroppedWithoutConnection(t *testing.T) {
	w := newTestCluster(t, 2, 2)
	l := w.servers[1].mesh.link(2).peerConn
	for range 2 * queue {
		w.servers[1].mesh.Send(message.Envelope{From: 1, To: 2, Kind: message.KindDirIDRequest})
	}
	require.Eventually(t, func() bool { l.mu.Lock(); defer l.mu.Unlock(); return len(l.waiting) < queue/2 }, 10*time.Second, time.Millisecond)
	w.servers[1].mesh.Send(message.Envelope{From: 1, To: 9}) // must not panic; envelopes to unknown members are dropped
}

// TestUnencodableEnvelopes sends envelopes (raft messages) that cannot be encoded between valid ones. Only the valid
// ones must arrive, in order, whether the sending or the writer goroutine encodes them.
func TestUnencodableEnvelopes(t *testing.T) {
	b := newFakePeer(t, timeouts{pingInterval: time.Hour, response: time.Second, idle: time.Hour})
	conn := b.next(t)
	bad := message.Envelope{From: 1, To: 2, Kind: 99}
	heavy := message.Envelope{From: 1, To: 2, Kind: 99, Payloads: [][]byte{make([]byte, lightBytes+1)}}
	for _, e := range []message.Envelope{bad, heavy} {
		_, err := e.AppendTo(nil)
		require.Error(t, err)
	}
	for _, e := range []message.Envelope{bad, numbered(1, 2, 1, 0), heavy, bad, numbered(1, 2, 2, 0), heavy, numbered(1, 2, 3, 0)} {
		b.Send(e)
	}
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(20*time.Second)))
	for number := range uint64(3) {
		require.Equal(t, numbered(1, 2, number+1, 0), readEnvelope(t, conn))
	}
}

// TestPartialWrites checks that data that the socket accepts only in part is written completely by a later flush.
func TestPartialWrites(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	far, err := l.Accept()
	require.NoError(t, err)
	defer far.Close()
	o, err := newNonblockingConn(conn, time.Minute)
	require.NoError(t, err)
	o.startBuffering()
	var want bytes.Buffer
	line := bytes.Repeat([]byte("0123456789"), 5000)
	for empty := true; empty; {
		line[0]++
		want.Write(line)
		_, err := o.Write(line)
		require.NoError(t, err)
		empty, err = o.try()
		require.NoError(t, err)
	}
	empty, err := o.try()
	require.NoError(t, err)
	require.False(t, empty)
	got := make([]byte, want.Len())
	read := make(chan error, 1)
	go func() { _, err := io.ReadFull(far, got); read <- err }()
	require.NoError(t, o.flush(len(line)*2), "little enough is left alone")
	require.NoError(t, o.flush(0))
	require.NoError(t, <-read)
	require.True(t, bytes.Equal(want.Bytes(), got))
	empty, err = o.try()
	require.NoError(t, err)
	require.True(t, empty)
	require.NoError(t, conn.Close())
	_, err = o.Write(line)
	require.NoError(t, err, "kept")
	_, err = o.try()
	require.Error(t, err)
	require.Error(t, o.flush(0))
	_, err = newNonblockingConn(struct{ net.Conn }{far}, time.Minute)
	require.ErrorContains(t, err, "no socket")
}
