package tunnel

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mtls"
)

const command = "migration-tunnel"

// TestMain runs a tunnel process instead of the tests if the first argument requests it, as the agent's main does.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == command {
		os.Exit(Main())
	}
	os.Exit(m.Run())
}

// hosts contains the tunnels of two hosts. The process qemu takes the place of QEMU on both hosts.
type hosts struct {
	testing.TB
	authority      *mtls.Authority
	source, target Config
	qemu           *exec.Cmd
	pidfd          *os.File
	memory         *os.File // QEMU's end at the target
	disks          net.Listener
	channels       *net.UnixListener // of QEMU at the target, if there are Channels
}

func newHosts(t testing.TB) *hosts {
	t.Helper()
	h := &hosts{TB: t, qemu: exec.Command("sleep", "1000")}
	var err error
	h.authority, err = mtls.NewAuthority("11", make([]byte, ed25519.SeedSize))
	require.NoError(t, err)
	require.NoError(t, h.qemu.Start())
	t.Cleanup(func() { _ = h.qemu.Process.Kill(); _ = h.qemu.Wait() })
	fd, err := unix.PidfdOpen(h.qemu.Process.Pid, 0)
	require.NoError(t, err)
	h.pidfd = os.NewFile(uintptr(fd), "pidfd")
	t.Cleanup(func() { _ = h.pidfd.Close() })
	long := filepath.Join(t.TempDir(), strings.Repeat("a-long-directory-", 8))
	base := Config{VM: "vm", Attempt: 7}
	h.source, h.target = base, base
	h.source.Role, h.source.Peer, h.source.Dir, h.source.Identity = Source, "b", long+"/a", h.identity(h.authority, mtls.Node, "a")
	h.target.Role, h.target.Peer, h.target.Dir, h.target.Identity = Target, "a", long+"/b", h.identity(h.authority, mtls.Node, "b")
	h.target.Address, h.target.Disks = "127.0.0.1", []string{"root"}
	t.Cleanup(func() {
		require.NoError(t, Stop(h.source.Dir))
		require.NoError(t, Stop(h.target.Dir))
	})
	return h
}

func (h *hosts) identity(a *mtls.Authority, kind mtls.Kind, name string) Identity {
	own, err := a.IssueFor(kind, name, time.Now(), time.Hour)
	require.NoError(h, err)
	key, err := x509.MarshalPKCS8PrivateKey(own.PrivateKey)
	require.NoError(h, err)
	return Identity{Certificate: own.Certificate[0], Key: key, Authority: a.Certificate().Raw}
}

// start starts both processes.
func (h *hosts) start() {
	h.Helper()
	listener, err := Listen(h.target.Dir, DiskSocket)
	require.NoError(h, err)
	h.disks, err = net.FileListener(listener)
	require.NoError(h, err)
	require.NoError(h, listener.Close())
	h.Cleanup(func() { _ = h.disks.Close() })
	var other *os.File
	if h.target.Channels > 0 {
		h.channels, err = listenUnix(h.target.Dir, MemorySocket)
		require.NoError(h, err)
		h.Cleanup(func() { _ = h.channels.Close() })
	} else {
		h.memory, other, err = SocketPair()
		require.NoError(h, err)
		h.Cleanup(func() { _ = h.memory.Close() })
	}
	s, err := Start(h.Context(), []string{"/proc/self/exe", command}, h.target, other, h.pidfd)
	require.NoError(h, err)
	if other != nil {
		require.NoError(h, other.Close())
	}
	found, running, err := Find(h.target.Dir)
	require.NoError(h, err)
	require.True(h, running)
	require.Equal(h, s, found)
	h.source.Address = s.Address
	_, err = Start(h.Context(), []string{"/proc/self/exe", command}, h.source, nil, h.pidfd)
	require.NoError(h, err)
}

// TestStreams sends data in both directions through the streams of memory and of a disk. The end of one direction is
// passed on and does not end the other.
func TestStreams(t *testing.T) {
	h := newHosts(t)
	h.start()
	for _, stream := range []string{Memory, "root"} {
		near, err := Dial(t.Context(), h.source.Dir, stream)
		require.NoError(t, err)
		defer near.Close()
		far := h.memory
		if stream != Memory {
			conn, err := h.disks.Accept()
			require.NoError(t, err)
			far, err = conn.(*net.UnixConn).File()
			require.NoError(t, err)
			require.NoError(t, conn.Close())
			defer far.Close()
		}
		data := make([]byte, 3<<20)
		_, _ = rand.Read(data)
		for _, way := range [][2]*os.File{{near, far}, {far, near}} {
			var sending sync.WaitGroup
			sending.Go(func() {
				_, _ = io.Copy(way[0], bytes.NewReader(data))
				_ = unix.Shutdown(int(way[0].Fd()), unix.SHUT_WR)
			})
			got, err := io.ReadAll(way[1])
			sending.Wait()
			require.NoError(t, err)
			require.True(t, bytes.Equal(data, got), stream)
		}
	}
	_, err := Dial(t.Context(), h.source.Dir, "root")
	require.ErrorContains(t, err, "opened before")
	_, err = Dial(t.Context(), h.source.Dir, "other")
	require.ErrorContains(t, err, "expects no such stream")
}

// TestUnusedMemoryStream closes the stream of memory before the source has sent data. This happens if the source's
// agent ends. The target's QEMU must not read an end of the stream. The source must be able to open the stream again,
// even if the target has not noticed yet that the first connection was closed. After the first byte, the stream cannot
// be opened again.
func TestUnusedMemoryStream(t *testing.T) {
	h := newHosts(t)
	h.start()
	closed, err := Dial(t.Context(), h.source.Dir, Memory)
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	left, err := Dial(t.Context(), h.source.Dir, Memory)
	require.NoError(t, err)
	defer left.Close()
	near, err := Dial(t.Context(), h.source.Dir, Memory)
	require.NoError(t, err)
	defer near.Close()
	_, err = io.ReadAll(left) // The target has closed it.
	require.NoError(t, err)
	_, err = io.WriteString(near, "state")
	require.NoError(t, err)
	require.NoError(t, unix.Shutdown(int(near.Fd()), unix.SHUT_WR))
	got, err := io.ReadAll(h.memory)
	require.NoError(t, err)
	require.Equal(t, "state", string(got))
	_, err = Dial(t.Context(), h.source.Dir, Memory)
	require.ErrorContains(t, err, "opened before")
}

// TestAuthentication checks that the target accepts only the assigned peer, of the same cluster, for the same attempt,
// and that the source accepts only the assigned target.
func TestAuthentication(t *testing.T) {
	foreign, err := mtls.NewAuthority("12", bytes.Repeat([]byte{1}, ed25519.SeedSize))
	require.NoError(t, err)
	for name, change := range map[string]func(h *hosts){
		"another host":       func(h *hosts) { h.source.Identity = h.identity(h.authority, mtls.Node, "c") },
		"a member":           func(h *hosts) { h.source.Identity = h.identity(h.authority, mtls.Member, "a") },
		"another cluster":    func(h *hosts) { h.source.Identity = h.identity(foreign, mtls.Node, "a") },
		"another attempt":    func(h *hosts) { h.source.Attempt++ },
		"another VM":         func(h *hosts) { h.source.VM = "other" },
		"an expected host":   func(*hosts) {},
		"not the target":     func(h *hosts) { h.source.Peer = "c" },
		"no certificate":     nil,
		"an unencrypted one": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHosts(t)
			if change != nil {
				change(h)
			}
			h.start()
			switch name {
			case "no certificate":
				conn, err := tls.Dial("tcp", h.source.Address, &tls.Config{InsecureSkipVerify: true})
				if err == nil { // TLS 1.3 reports the refusal with the first read.
					_, err = readLine(conn)
				}
				require.Error(t, err)
			case "an unencrypted one":
				conn, err := net.Dial("tcp", h.source.Address)
				require.NoError(t, err)
				_, err = io.WriteString(conn, "trivet-migration/1 vm 7 root\n")
				require.NoError(t, err)
				answer, err := io.ReadAll(conn)
				require.NoError(t, err)
				require.NotContains(t, string(answer), accepted)
			default:
				near, err := Dial(t.Context(), h.source.Dir, "root")
				if name == "an expected host" {
					require.NoError(t, err)
					require.NoError(t, near.Close())
					return
				}
				require.Error(t, err)
			}
		})
	}
}

// TestEnds checks that a tunnel process ends when QEMU ends and by Stop, and that its streams are then closed.
func TestEnds(t *testing.T) {
	h := newHosts(t)
	h.start()
	near, err := Dial(t.Context(), h.source.Dir, Memory)
	require.NoError(t, err)
	defer near.Close()
	_, err = io.WriteString(near, "state")
	require.NoError(t, err)
	got := make([]byte, len("state"))
	_, err = io.ReadFull(h.memory, got)
	require.NoError(t, err)
	require.NoError(t, Stop(h.source.Dir))
	_, running, err := Find(h.source.Dir)
	require.NoError(t, err)
	require.False(t, running)
	got, err = io.ReadAll(h.memory)
	require.NoError(t, err)
	require.Empty(t, got)
	require.NoError(t, h.qemu.Process.Kill())
	require.Eventually(t, func() bool {
		_, running, err := Find(h.target.Dir)
		return err == nil && !running
	}, 20*time.Second, 10*time.Millisecond)
	_, err = Dial(context.Background(), h.source.Dir, Memory)
	require.Error(t, err)
}

// TestEndOfPeer kills the source's tunnel process while data is on the way. QEMU at the target must see that the stream
// is closed, although the target's own tunnel process runs on.
func TestEndOfPeer(t *testing.T) {
	h := newHosts(t)
	h.start()
	near, err := Dial(t.Context(), h.source.Dir, Memory)
	require.NoError(t, err)
	defer near.Close()
	_, err = io.WriteString(near, "state")
	require.NoError(t, err)
	got := make([]byte, len("state"))
	_, err = io.ReadFull(h.memory, got)
	require.NoError(t, err)
	s, _, err := Find(h.source.Dir)
	require.NoError(t, err)
	fd := int(h.memory.Fd())
	require.NoError(t, unix.SetNonblock(fd, true))
	data := make([]byte, 64<<10)
	for err == nil { // until all buffers are full: nothing reads near
		if _, err = unix.Write(fd, data); err == unix.EAGAIN {
			var n int
			n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 500)
			if err == nil && n == 0 {
				break
			}
		}
		if err == unix.EINTR { // a signal of Go's scheduler
			err = nil
		}
	}
	require.NoError(t, err)
	require.NoError(t, unix.Kill(s.PID, unix.SIGKILL))
	require.Eventually(t, func() bool {
		_, err := unix.Write(fd, data)
		return err == unix.EPIPE || err == unix.ECONNRESET
	}, 20*time.Second, 10*time.Millisecond)
	_, running, err := Find(h.target.Dir)
	require.NoError(t, err)
	require.True(t, running)
}

// TestSilentConnections opens more connections to the target than it has handshakes at a time. They must not keep the
// source from connecting.
func TestSilentConnections(t *testing.T) {
	h := newHosts(t)
	h.start()
	for range 2 * maxHandshakes {
		conn, err := net.Dial("tcp", h.source.Address)
		require.NoError(t, err)
		defer conn.Close()
	}
	ctx, cancel := context.WithTimeout(t.Context(), openTimeout/2)
	defer cancel()
	near, err := Dial(ctx, h.source.Dir, "root")
	require.NoError(t, err)
	require.NoError(t, near.Close())
}

// TestStartFails checks that Start reports why a process cannot listen.
func TestStartFails(t *testing.T) {
	h := newHosts(t)
	h.target.Address = "192.0.2.1"
	_, other, err := SocketPair()
	require.NoError(t, err)
	defer other.Close()
	_, err = Start(t.Context(), []string{"/proc/self/exe", command}, h.target, other, h.pidfd)
	require.ErrorContains(t, err, "listen for the source")
	_, running, err := Find(h.target.Dir)
	require.NoError(t, err)
	require.False(t, running)
}
