package nettest

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// StreamPort is the UDP port that receives streams.
const StreamPort = 4500

// patience is the longest time that the package waits for something. It elapses only if the test fails.
const patience = 60 * time.Second

// Path is the way of a stream between two namespaces.
type Path struct {
	From, To string     // names of namespaces
	Address  netip.Addr // of the receiver
}

// Streams sends numbered datagrams on several paths, and records which of them arrive.
type Streams struct {
	t       *testing.T
	streams []*stream
	stop    chan struct{}
	done    sync.WaitGroup // the sender and the receivers
	ended   bool
}

type stream struct {
	path     Path
	from, to *net.UDPConn
	sent     atomic.Uint64 // number of the newest datagram
	received atomic.Uint64 // number of datagrams that have arrived
	last     atomic.Uint64 // highest number that has arrived
	refused  atomic.Uint64 // datagrams that the sender's kernel did not accept
}

// StartStreams sends datagrams on all paths, one on each path and then a pause, until the streams end. It returns when
// a datagram has arrived on each path. Datagrams before this one may have been lost and do not count.
func StartStreams(t *testing.T, pause time.Duration, paths ...Path) *Streams {
	t.Helper()
	s := &Streams{t: t, stop: make(chan struct{})}
	t.Cleanup(func() { s.end() })
	for _, p := range paths {
		one, err := openStream(p)
		require.NoError(t, err)
		s.streams = append(s.streams, one)
		s.done.Go(one.receive)
		one.establish(t)
	}
	s.done.Go(func() {
		tick := time.NewTicker(pause)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-s.stop:
				return
			}
			for _, one := range s.streams {
				one.send()
			}
		}
	})
	return s
}

func openStream(p Path) (*stream, error) {
	s := &stream{path: p}
	to := &net.UDPAddr{IP: p.Address.AsSlice(), Port: StreamPort}
	err := nsthread.InNamed(p.To, func() (err error) { s.to, err = net.ListenUDP("udp", to); return err })
	if err != nil {
		return nil, fmt.Errorf("receive a stream: %w", err)
	}
	// A receiver that gets no processor for a while must not lose datagrams.
	raw, err := s.to.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1<<20) })
	}
	if err != nil {
		return nil, err
	}
	err = nsthread.InNamed(p.From, func() (err error) { s.from, err = net.DialUDP("udp", nil, to); return err })
	if err != nil {
		return nil, fmt.Errorf("send a stream: %w", err)
	}
	return s, nil
}

// establish sends datagrams with the number 0 until one arrives.
func (s *stream) establish(t *testing.T) {
	t.Helper()
	zero := make([]byte, 8)
	arrives := func() bool { _, _ = s.from.Write(zero); return s.received.Load() > 0 }
	require.Eventually(t, arrives, patience, time.Millisecond, "nothing arrives from %s at %s", s.path.From, s.path.To)
}

func (s *stream) send() {
	if _, err := s.from.Write(binary.BigEndian.AppendUint64(nil, s.sent.Add(1))); err != nil {
		s.refused.Add(1)
	}
}

// receive counts datagrams until the socket is closed.
func (s *stream) receive() {
	buffer := make([]byte, 100)
	established := false
	for {
		n, err := s.to.Read(buffer)
		if err != nil {
			return
		}
		number := binary.BigEndian.Uint64(buffer[:max(n, 8)])
		switch {
		case number > 0:
			s.received.Add(1)
			s.last.Store(max(s.last.Load(), number))
		case !established:
			established = true
			s.received.Add(1) // the datagram that ends establish
		}
	}
}

// lost returns the number of datagrams that have not arrived.
func (s *stream) lost() uint64 { return s.sent.Load() + 1 - s.received.Load() }

// Sent returns the number of datagrams that were sent on all paths.
func (s *Streams) Sent() (sum uint64) {
	for _, one := range s.streams {
		sum += one.sent.Load()
	}
	return sum
}

// Flow waits until a datagram that is sent after the call has arrived on each path. It fails the test if none arrives
// on a path within 60 seconds.
func (s *Streams) Flow() {
	s.t.Helper()
	for _, one := range s.streams {
		now := one.sent.Load()
		require.Eventually(s.t, func() bool { return one.last.Load() > now }, patience, time.Millisecond,
			"nothing arrives any more from %s at %s", one.path.From, one.path.To)
	}
}

// RequireComplete stops the streams and requires that every datagram has arrived.
func (s *Streams) RequireComplete() {
	s.t.Helper()
	close(s.stop)
	s.ended = true
	// The last datagrams may still be on their way.
	missing := func() (text string) {
		for _, one := range s.streams {
			if n := one.lost(); n > 0 {
				text += fmt.Sprintf("%d of %d datagrams from %s to %s were lost, and %d refused\n",
					n, one.sent.Load(), one.path.From, one.path.To, one.refused.Load())
			}
		}
		return text
	}
	assertEventually(func() bool { return missing() == "" })
	require.Empty(s.t, missing())
	s.close()
}

// assertEventually waits until ok returns true, for at most five seconds.
func assertEventually(ok func() bool) {
	for deadline := time.Now().Add(5 * time.Second); !ok() && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
}

func (s *Streams) end() {
	if !s.ended {
		close(s.stop)
		s.ended = true
	}
	s.close()
}

func (s *Streams) close() {
	for _, one := range s.streams {
		one.to.Close()
		one.from.Close()
	}
	s.done.Wait()
}
