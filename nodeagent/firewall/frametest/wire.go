package frametest

import (
	"bytes"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// allProtocols is ETH_P_ALL in network byte order, as packet(7) expects it.
const allProtocols = unix.ETH_P_ALL << 8

// Wire sends and receives raw frames on a device.
type Wire struct {
	fd    int
	index int
	mu    sync.Mutex
	seen  [][]byte
}

// OpenWire opens a device of a network namespace and records all frames that the device receives, until the test
// ends.
func OpenWire(t *testing.T, ns netns.NsHandle, device string) *Wire {
	t.Helper()
	w := &Wire{}
	require.NoError(t, nsthread.In(ns, func() (err error) {
		if w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, allProtocols); err != nil {
			return err
		}
		request, err := unix.NewIfreq(device)
		if err != nil {
			return err
		}
		if err := unix.IoctlIfreq(w.fd, unix.SIOCGIFINDEX, request); err != nil {
			return err
		}
		w.index = int(request.Uint32())
		if err := unix.SetsockoptInt(w.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
			return err
		}
		tick := unix.NsecToTimeval(int64(50 * time.Millisecond))
		if err := unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tick); err != nil {
			return err
		}
		return unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: allProtocols, Ifindex: w.index})
	}))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		w.receive(stop)
	}()
	t.Cleanup(func() {
		close(stop)
		<-stopped
		unix.Close(w.fd)
	})
	return w
}

func (w *Wire) receive(stop chan struct{}) {
	buffer := make([]byte, 65536)
	for {
		select {
		case <-stop:
			return
		default:
		}
		n, from, err := unix.Recvfrom(w.fd, buffer, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return
		}
		if link, ok := from.(*unix.SockaddrLinklayer); !ok || link.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		w.mu.Lock()
		w.seen = append(w.seen, bytes.Clone(buffer[:n]))
		w.mu.Unlock()
	}
}

// Saw reports whether a frame that contains the text has arrived.
func (w *Wire) Saw(text string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, frame := range w.seen {
		if bytes.Contains(frame, []byte(text)) {
			return true
		}
	}
	return false
}

// Count returns the number of frames that have arrived and for which f returns true.
func (w *Wire) Count(f func(frame []byte) bool) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, frame := range w.seen {
		if f(frame) {
			n++
		}
	}
	return n
}

// Send sends a frame from the device.
func (w *Wire) Send(t *testing.T, frame []byte) {
	t.Helper()
	require.NoError(t, unix.Sendto(w.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: w.index, Halen: 6}))
}
