package rbd

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// maxLine is the maximum length, in bytes, of a line of the helper's standard error. The rest of a longer line is
// discarded.
const maxLine = 1024

// helper is a process of trivet-rbd and the gRPC connection to it.
type helper struct {
	cmd    *exec.Cmd
	conn   *grpc.ClientConn
	broken atomic.Bool   // whether reading the socket has failed
	exited chan struct{} // closed when the process has ended and its output was read
}

// start starts the program.
func start(o Options) (*helper, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	stderr, write, err := os.Pipe()
	if err != nil {
		return nil, errorAndClose(err, ours)
	}
	cmd := exec.Command(o.Program)
	cmd.Env = []string{} // so that librbd reads neither CEPH_CONF nor CEPH_ARGS
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = write
	if o.UID != 0 || o.GID != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: o.UID, Gid: o.GID}}
	}
	err = cmd.Start()
	_ = write.Close()
	if err != nil {
		return nil, errorAndClose(err, ours, stderr)
	}
	h := &helper{cmd: cmd, exited: make(chan struct{})}
	go func() {
		defer close(h.exited)
		defer stderr.Close()
		logLines(stderr, o.Log.With("pid", cmd.Process.Pid))
		_ = cmd.Wait()
	}()
	if h.conn, err = dial(&watchedConn{ours, &h.broken}); err != nil {
		_ = ours.Close()
		h.end()
		return nil, err
	}
	return h, nil
}

// errorAndClose closes the files and returns err.
func errorAndClose(err error, files ...io.Closer) error {
	for _, f := range files {
		_ = f.Close()
	}
	return err
}

// socketPair returns the two ends of a socket pair.
func socketPair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "trivet-rbd")
	file := os.NewFile(uintptr(fds[0]), "trivet-rbd")
	defer file.Close() // net.FileConn copies it
	ours, err = net.FileConn(file)
	if err != nil {
		_ = theirs.Close()
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	return ours, theirs, nil
}

// watchedConn is a connection that sets broken when a read fails.
type watchedConn struct {
	net.Conn
	broken *atomic.Bool
}

func (c *watchedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		c.broken.Store(true)
	}
	return n, err
}

// dial returns a gRPC connection over conn. The gRPC connection never reconnects, because a helper with a broken socket
// is replaced.
func dial(conn net.Conn) (*grpc.ClientConn, error) {
	var used atomic.Bool
	return grpc.NewClient("passthrough:trivet-rbd",
		grpc.WithTransportCredentials(insecure.NewCredentials()), // a socket pair: no other process has access
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			if used.Swap(true) {
				return nil, fmt.Errorf("trivet-rbd has ended")
			}
			return conn, nil
		}),
		grpc.WithIdleTimeout(0),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(8<<20)))
}

// logLines writes each line of the helper's standard error to the log.
func logLines(r io.Reader, log *slog.Logger) {
	lines := bufio.NewReaderSize(r, maxLine)
	for {
		line, rest, err := lines.ReadLine()
		if len(line) > 0 {
			log.Warn("trivet-rbd", "line", string(line))
		}
		for rest && err == nil {
			_, rest, err = lines.ReadLine()
		}
		if err != nil {
			return
		}
	}
}

// ended reports whether the process has ended, or its socket is broken because it is about to end.
func (h *helper) ended() bool {
	select {
	case <-h.exited:
		return true
	default:
	}
	return h.broken.Load()
}

func (h *helper) pid() int { return h.cmd.Process.Pid }

// end kills the process and waits for its end.
func (h *helper) end() {
	_ = h.cmd.Process.Kill()
	if h.conn != nil {
		_ = h.conn.Close()
	}
	<-h.exited
}
