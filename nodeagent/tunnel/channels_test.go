package tunnel

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// within is the maximum time for something that must happen.
const within = 20 * time.Second

// newChannels returns hosts whose QEMU has the given number of channels.
func newChannels(t *testing.T, channels int) *hosts {
	h := newHosts(t)
	h.source.Channels, h.target.Channels = channels, channels
	h.source.Sockets, h.source.UID = t.TempDir(), os.Getuid()
	return h
}

// connect opens a connection of the source's QEMU, and sends data on it.
func (h *hosts) connect(data string) *net.UnixConn {
	h.Helper()
	conn, err := dialUnix(h.Context(), h.source.Sockets, MemorySocket)
	require.NoError(h, err)
	h.Cleanup(func() { _ = conn.Close() })
	_, err = io.WriteString(conn, data)
	require.NoError(h, err)
	return conn
}

// accept accepts a connection at the target's QEMU, and reads n bytes from it.
func (h *hosts) accept(n int) (*net.UnixConn, string) {
	h.Helper()
	require.NoError(h, h.channels.SetDeadline(time.Now().Add(within)))
	conn, err := h.channels.Accept()
	require.NoError(h, err)
	h.Cleanup(func() { _ = conn.Close() })
	data := make([]byte, n)
	_, err = io.ReadFull(conn, data)
	require.NoError(h, err)
	return conn.(*net.UnixConn), string(data)
}

// request opens a stream as the source's tunnel process does, and sends data on it. It closes the connection if the data
// is empty.
func (h *hosts) request(name, data string) (*tls.Conn, error) {
	h.Helper()
	p := &process{Config: h.source}
	var err error
	p.tls, err = p.tlsConfig()
	require.NoError(h, err)
	ctx, cancel := context.WithTimeout(h.Context(), within)
	defer cancel()
	conn, err := p.dialTarget(ctx, name)
	if err != nil {
		return nil, err
	}
	if data == "" {
		return nil, conn.Close()
	}
	h.Cleanup(func() { _ = conn.Close() })
	_, err = io.WriteString(conn, data)
	return conn, err
}

// noneAccepted checks that the target's QEMU gets no connection for some time.
func (h *hosts) noneAccepted() {
	h.Helper()
	require.NoError(h, h.channels.SetDeadline(time.Now().Add(300*time.Millisecond)))
	_, err := h.channels.Accept()
	require.ErrorIs(h, err, os.ErrDeadlineExceeded)
}

// TestChannels sends data over several connections. QEMU at the target gets the first connection of QEMU at the source
// first. QEMU cannot open more connections than it has channels.
func TestChannels(t *testing.T) {
	h := newChannels(t, 3)
	h.start()
	near := []*net.UnixConn{h.connect("main")}
	for i := range 3 {
		near = append(near, h.connect(fmt.Sprintf("no %d", i)))
	}
	far := map[string]*net.UnixConn{}
	first, name := h.accept(4)
	require.Equal(t, "main", name)
	far[name] = first
	for range 3 {
		conn, name := h.accept(4)
		far[name] = conn
	}
	require.Len(t, far, 4)
	data := make([]byte, 3<<20)
	_, _ = rand.Read(data)
	for i, name := range []string{"main", "no 0", "no 1", "no 2"} {
		go func() {
			_, _ = near[i].Write(data)
			_ = near[i].CloseWrite()
		}()
		got, err := io.ReadAll(far[name])
		require.NoError(t, err)
		require.True(t, bytes.Equal(data, got), name)
	}
	_, err := far["main"].Write([]byte("answer"))
	require.NoError(t, err)
	got := make([]byte, len("answer"))
	_, err = io.ReadFull(near[0], got)
	require.NoError(t, err)
	require.Equal(t, "answer", string(got))
	require.Eventually(t, func() bool {
		conn, err := dialUnix(t.Context(), h.source.Sockets, MemorySocket)
		if err == nil {
			_ = conn.Close()
		}
		return errors.Is(err, unix.ECONNREFUSED)
	}, within, 10*time.Millisecond)
}

// TestChannelOrder requests the memory streams in another order than QEMU has opened its connections. The target's QEMU
// must get the main connection first. Each stream is accepted once, but a stream on which no byte has arrived can be
// requested again.
func TestChannelOrder(t *testing.T) {
	h := newChannels(t, 2)
	h.start()
	_, err := h.request("memory/3", "c")
	require.ErrorContains(t, err, "expects no such stream")
	_, err = h.request("memory/2", "b")
	require.NoError(t, err)
	_, err = h.request("memory/1", "")
	require.NoError(t, err)
	_, err = h.request(Memory, "")
	require.NoError(t, err)
	h.noneAccepted()
	_, err = h.request(Memory, "m")
	require.NoError(t, err)
	_, data := h.accept(1)
	require.Equal(t, "m", data)
	_, data = h.accept(1)
	require.Equal(t, "b", data)
	h.noneAccepted()
	_, err = h.request("memory/1", "a")
	require.NoError(t, err)
	_, data = h.accept(1)
	require.Equal(t, "a", data)
	for _, name := range memoryStreams(2) {
		_, err = h.request(name, "x")
		require.ErrorContains(t, err, "opened before")
	}
	h.noneAccepted()
}

// TestChannelFails ends one of several connections to the target, or all of them. QEMU at the source must see only that
// the main connection ends: it does not end a migration reliably if a write to another one fails. The target's process
// must end.
func TestChannelFails(t *testing.T) {
	for _, victim := range []string{"channel of QEMU at the target", "main connection of QEMU at the target", "tunnel of the target", "QEMU's listener"} {
		t.Run(victim, func(t *testing.T) {
			h := newChannels(t, 2)
			h.start()
			main := h.connect("m")
			var far []*net.UnixConn
			if victim == "QEMU's listener" {
				require.NoError(t, h.channels.Close())
			} else {
				conn, _ := h.accept(1)
				far = append(far, conn)
			}
			near := []*net.UnixConn{h.connect("a"), h.connect("b")}
			switch victim {
			case "channel of QEMU at the target":
				conn, _ := h.accept(1)
				require.NoError(t, conn.Close())
			case "main connection of QEMU at the target":
				require.NoError(t, far[0].Close())
			case "tunnel of the target":
				require.NoError(t, Stop(h.target.Dir))
			}
			ended := make(chan error, 1)
			go func() {
				data := make([]byte, 64<<10)
				for {
					if _, err := main.Write(data); err != nil {
						ended <- err
						return
					}
					for _, conn := range near {
						if _, err := conn.Write(data); err != nil {
							ended <- fmt.Errorf("a channel has failed: %w", err)
							return
						}
					}
				}
			}()
			select {
			case err := <-ended:
				require.NotContains(t, err.Error(), "a channel")
			case <-time.After(within):
				t.Fatal("the main connection does not end")
			}
			for _, conn := range near {
				_, err := conn.Write(make([]byte, 4<<20))
				require.NoError(t, err)
			}
			require.Eventually(t, func() bool {
				_, running, err := Find(h.target.Dir)
				return err == nil && !running
			}, within, 10*time.Millisecond)
		})
	}
}

// TestMainChannelEnds ends the main connection of QEMU at the source, as QEMU does when a migration is cancelled, while
// nothing reads at the target. The other connections must not keep QEMU waiting.
func TestMainChannelEnds(t *testing.T) {
	h := newChannels(t, 1)
	h.start()
	main, near := h.connect("m"), h.connect("a")
	h.accept(1)
	h.accept(1)
	go func() { time.Sleep(200 * time.Millisecond); _ = main.Close() }()
	require.NoError(t, near.SetDeadline(time.Now().Add(within)))
	_, err := near.Write(make([]byte, 64<<20))
	require.NoError(t, err)
}

// TestFailMemory fails the memory streams of a source while the target accepts no more data. QEMU at the source must see
// that the main connection ends, and only this.
func TestFailMemory(t *testing.T) {
	h := newChannels(t, 1)
	require.NoError(t, FailMemory(h.source.Dir), "no process runs")
	h.start()
	main, near := h.connect("m"), h.connect("a")
	h.accept(1)
	h.accept(1)
	require.NoError(t, main.SetWriteDeadline(time.Now().Add(time.Second)))
	_, err := main.Write(make([]byte, 64<<20))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded, "the target must not read")
	require.NoError(t, FailMemory(h.source.Dir))
	require.NoError(t, main.SetDeadline(time.Now().Add(within)))
	_, err = main.Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, near.SetDeadline(time.Now().Add(within)))
	_, err = near.Write(make([]byte, 64<<20))
	require.NoError(t, err)
}

// TestSourceDies kills the tunnel process of the source. The process of the target must end, because QEMU may wait for
// one of its channels for ever.
func TestSourceDies(t *testing.T) {
	h := newChannels(t, 1)
	h.start()
	h.connect("m")
	h.connect("a")
	h.accept(1)
	h.accept(1)
	require.NoError(t, Stop(h.source.Dir))
	require.Eventually(t, func() bool {
		_, running, err := Find(h.target.Dir)
		return err == nil && !running
	}, within, 10*time.Millisecond)
}
