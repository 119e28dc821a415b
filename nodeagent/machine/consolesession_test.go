package machine

import (
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestOneConsoleWriter checks that only one session may write to the serial port of a VM, until it ends or another one
// takes over, and that sessions of other VMs do not matter.
func TestOneConsoleWriter(t *testing.T) {
	s := &MachineSet{writers: map[cloud.VMID]*consoleWriter{}}
	first, release, err := s.claimWriter(t.Context(), "a", false)
	require.NoError(t, err)
	_, releaseOther, err := s.claimWriter(t.Context(), "b", false)
	require.NoError(t, err)
	_, _, err = s.claimWriter(t.Context(), "a", false)
	require.ErrorIs(t, err, errConsoleInUse)
	require.NoError(t, first.Err())

	// A session that takes over waits until the first one has ended.
	waited := make(chan struct{})
	go func() {
		<-first.Done()
		close(waited)
		release()
	}()
	second, releaseSecond, err := s.claimWriter(t.Context(), "a", true)
	require.NoError(t, err)
	<-waited
	require.ErrorIs(t, context.Cause(first), errConsoleTakenOver)
	_, _, err = s.claimWriter(t.Context(), "a", false)
	require.ErrorIs(t, err, errConsoleInUse)
	require.NoError(t, second.Err())
	releaseSecond()
	releaseOther()
	require.Empty(t, s.writers)

	_, release, err = s.claimWriter(t.Context(), "a", false)
	require.NoError(t, err)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err = s.claimWriter(canceled, "a", true)
	require.ErrorIs(t, err, context.Canceled)
	release()
}

// fakePipe is a user who types what is sent to the channel typed, and does not read unless reads is true. It closes
// blocked when the session begins to wait for the user to read.
type fakePipe struct {
	typed   chan []byte
	reads   bool
	blocked chan struct{}
	unblock chan struct{}
}

func (p *fakePipe) Recv(ctx context.Context) ([]byte, error) {
	select {
	case data, more := <-p.typed:
		if !more {
			return nil, io.EOF
		}
		return data, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *fakePipe) Send([]byte, int64) error {
	if !p.reads {
		close(p.blocked)
		<-p.unblock
	}
	return nil
}

// newSerialSession returns a session of a serial port that has printed "login: ", and QEMU's end of the port.
func newSerialSession(t *testing.T, pipe console.Pipe) (*serialSession, net.Conn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "console")
	require.NoError(t, os.WriteFile(path, []byte("login: "), 0o600))
	port, qemu := net.Pipe()
	t.Cleanup(func() { qemu.Close() })
	return &serialSession{exited: make(chan struct{}), log: console.At(path, console.KeepConsole), port: port, release: func() {}, pipe: pipe}, qemu
}

// TestTakeOverFromStalledUser checks that a session can take over the port while the user of the earlier session does not
// read the output.
func TestTakeOverFromStalledUser(t *testing.T) {
	s := &MachineSet{writers: map[cloud.VMID]*consoleWriter{}}
	pipe := &fakePipe{blocked: make(chan struct{}), unblock: make(chan struct{})}
	first, _ := newSerialSession(t, pipe)
	ctx, release, err := s.claimWriter(t.Context(), "a", false)
	require.NoError(t, err)
	first.release = release
	ended := make(chan error, 1)
	go func() { ended <- first.run(ctx) }()
	<-pipe.blocked
	_, releaseSecond, err := s.claimWriter(t.Context(), "a", true)
	require.NoError(t, err)
	require.Empty(t, ended)
	close(pipe.unblock)
	require.Error(t, <-ended)
	require.ErrorIs(t, context.Cause(ctx), errConsoleTakenOver)
	release() // must not release the second session
	_, _, err = s.claimWriter(t.Context(), "a", false)
	require.ErrorIs(t, err, errConsoleInUse)
	releaseSecond()
}

// TestLostConsole checks that a session ends with errConsoleLost when QEMU closes the port without ending.
func TestLostConsole(t *testing.T) {
	s, qemu := newSerialSession(t, &fakePipe{reads: true})
	require.NoError(t, qemu.Close())
	require.ErrorIs(t, s.run(t.Context()), errConsoleLost)
}

// TestConsoleInputIsWritten checks that all input is written to the port before the session ends because the user has
// closed the console.
func TestConsoleInputIsWritten(t *testing.T) {
	pipe := &fakePipe{reads: true, typed: make(chan []byte, 2)}
	s, qemu := newSerialSession(t, pipe)
	pipe.typed <- []byte("root\n")
	pipe.typed <- []byte("secret\n")
	close(pipe.typed)
	ended := make(chan error, 1)
	go func() { ended <- s.run(t.Context()) }()
	got, err := io.ReadAll(qemu)
	require.NoError(t, err)
	require.Equal(t, "root\nsecret\n", string(got))
	require.ErrorIs(t, <-ended, errConsoleEnded)
}
