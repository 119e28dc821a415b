// Package tunnel carries the streams of a live migration between two hosts. The streams contain the guest's memory, the
// state of its devices, and the content of its local disks. Each host of a migration runs one tunnel process. The two
// processes authenticate each other with the hosts' certificates, and encrypt the streams with TLS 1.3. QEMU, which is
// confined, therefore needs no keys and no network.
//
// The process runs the agent's own program. [Start] starts it with a hidden command that calls [Main]. The process
// survives the agent, so a restart of the agent does not interrupt a migration. It ends when the VM's QEMU ends, when
// the agent calls [Stop], or after [maxLife].
//
//   - The process of the target listens at a TCP port of the host. It accepts only the peer and the attempt of its
//     [Config]. It connects a stream of memory to a socket that it has inherited and whose other end QEMU has. It
//     connects a stream of a disk to QEMU's NBD server. It accepts each stream only once. The stream of memory is
//     accepted when its first byte arrives: before that, the source can open the stream again.
//   - The process of the source listens at a unix socket in its directory. [Dial] connects to this socket and names a
//     stream. The process then connects to the target. The caller of Dial passes the connection to QEMU.
//   - If [Config].Channels is not 0, QEMU sends the memory over several connections (multifd), which it opens itself. The
//     process of the source then also listens at the socket [MemorySocket], and opens one stream for each connection of
//     QEMU. At the target, QEMU listens at MemorySocket, and the process connects to it for each memory stream.
//
// # Decisions
//
//   - The private key is sent to the process over a pipe, so that it is not stored in a second file. A process keeps
//     the certificate with which it was started, because a certificate is needed only while streams are opened.
//   - The process locks the file tunnel.json in its directory while it runs. The file contains the pid and the address.
//     A later agent therefore finds the process, and does not mistake another process for it.
//   - QEMU 7.2 takes the first of several memory connections for the main one. The source gives the name of the stream
//     Memory to the first connection of QEMU, and the target connects this stream to QEMU before all others, in
//     whichever order they arrive.
//   - If one of several memory streams fails, QEMU must see only that the main connection ends (see sender). The process
//     of the target ends then.
//   - A connection whose peer does not acknowledge data for [userTimeout] is closed. QEMU has no such timeout.
package tunnel

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/filelock"
)

const (
	// maxLife is the longest time for which a tunnel process runs.
	maxLife = 24 * time.Hour
	// startTimeout is the maximum time until a new process has started to listen.
	startTimeout = 20 * time.Second
	// stopTimeout is the maximum time from SIGKILL to the end of a process.
	stopTimeout = 5 * time.Second
	// openTimeout is the maximum time to open one stream, with all handshakes.
	openTimeout = 15 * time.Second
)

// Names of the files in the directory of a tunnel.
const (
	stateFile    = "tunnel.json"
	sourceSocket = "tunnel.sock"
	// DiskSocket is the name of the socket at which the NBD server of the target's QEMU listens.
	DiskSocket = "disks.sock"
)

// Role is the side of a migration.
type Role string

const (
	Source Role = "source"
	Target Role = "target"
)

// Memory is the stream of the guest's memory and devices. Further memory streams have the names memory/1, memory/2 and so
// on (see Config.Channels). All other streams are ids of disks.
const Memory = "memory"

// Identity contains the certificate of a host, its private key in PKCS #8, and the authority of its cluster. All are in
// DER.
type Identity struct {
	Certificate, Key, Authority []byte
}

// Config describes one tunnel process.
type Config struct {
	Role    Role
	VM      string
	Attempt uint64
	// Peer is the ID of the other host.
	Peer     string
	Identity Identity
	// Dir is the directory of the tunnel's files. Start creates it.
	Dir string
	// For the target, Address is the IP address at which it listens, and FirstPort and LastPort are the first and the
	// last port that it tries. For the source, Address is host:port of the target.
	Address             string
	FirstPort, LastPort uint16
	// Channels is the number of further memory streams, over which QEMU sends most of the memory (QEMU's multifd). 0 means
	// that only the stream Memory has memory. QEMU then reads or writes a connected socket. If Channels is not 0, QEMU
	// connects to, or listens at, MemorySocket.
	Channels int
	// For a source with Channels, Sockets is an existing directory in which QEMU can connect to a socket that belongs to
	// the user UID. The process creates MemorySocket there.
	Sockets string
	UID     int
	// Disks are the names of the copied disks, and of the NVRAM, for which the target accepts a stream.
	Disks []string
}

// State is the content of the file that a running tunnel process has written.
type State struct {
	Role    Role   `json:"role"`
	VM      string `json:"vm"`
	Attempt uint64 `json:"attempt"`
	PID     int    `json:"pid"`
	// Address is host:port at which the process of a target listens. It is empty for a source.
	Address string `json:"address,omitempty"`
	// Channels is Config.Channels.
	Channels int `json:"channels,omitempty"`
}

// Start starts a tunnel process by command, which must call Main, and returns when the process listens. It first ends
// the process that already runs for the directory. The file memory is the socket for the stream Memory whose other end
// QEMU has. It is nil for a source, and if Config.Channels is not 0. The tunnel process ends when the process of pidfd ends. After Start has returned,
// the caller may close both files. Start waits at most startTimeout, and stopTimeout for an earlier process.
func Start(ctx context.Context, command []string, c Config, memory, pidfd *os.File) (State, error) {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return State{}, fmt.Errorf("start tunnel: %w", err)
	}
	if err := Stop(c.Dir); err != nil {
		return State{}, fmt.Errorf("start tunnel: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	s, err := start(ctx, command, c, memory, pidfd)
	if err != nil {
		return State{}, fmt.Errorf("start tunnel: %w", err)
	}
	return s, nil
}

func start(ctx context.Context, command []string, c Config, memory, pidfd *os.File) (State, error) {
	text, err := json.Marshal(c)
	if err != nil {
		return State{}, err
	}
	process := exec.Command(command[0], command[1:]...)
	process.Env = []string{}
	process.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	process.ExtraFiles = []*os.File{pidfd}
	if memory != nil {
		process.ExtraFiles = append(process.ExtraFiles, memory)
	}
	in, err := process.StdinPipe()
	if err != nil {
		return State{}, err
	}
	// Not StdoutPipe, which Wait closes while the answer is read.
	out, theirs, err := os.Pipe()
	if err != nil {
		return State{}, err
	}
	defer out.Close()
	process.Stdout = theirs
	err = process.Start()
	_ = theirs.Close()
	if err != nil {
		return State{}, err
	}
	ended := make(chan struct{})
	go func() { _ = process.Wait(); close(ended) }()
	stop := context.AfterFunc(ctx, func() { _ = process.Process.Kill() })
	defer stop()
	_, err = in.Write(text)
	_ = in.Close()
	answer, readErr := io.ReadAll(io.LimitReader(out, 4096))
	var s State
	if err = errors.Join(err, readErr); err == nil {
		if err = json.Unmarshal(answer, &s); err != nil {
			err = fmt.Errorf("the tunnel process failed: %q", strings.TrimSpace(string(answer)))
		}
	}
	if err != nil {
		_ = process.Process.Kill()
		<-ended
		return State{}, errors.Join(err, ctx.Err())
	}
	return s, nil
}

// Find returns the state of the tunnel process of a directory. It returns false if no such process runs.
func Find(dir string) (State, bool, error) {
	s, running, err := find(dir)
	if err != nil {
		return State{}, false, fmt.Errorf("find tunnel: %w", err)
	}
	return s, running, nil
}

func find(dir string) (State, bool, error) {
	f, err := os.Open(filepath.Join(dir, stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, false, nil
	}
	if err != nil {
		return State{}, false, err
	}
	defer f.Close()
	err = filelock.Lock(f, 0)
	if err == nil { // No process has locked the file.
		return State{}, false, nil
	}
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return State{}, false, err
	}
	var s State
	err = json.NewDecoder(f).Decode(&s)
	if errors.Is(err, io.EOF) { // The process has just been started.
		return State{}, false, nil
	}
	return s, err == nil, err
}

// Stop kills the tunnel process of a directory, which closes all its streams, and removes its files. It returns nil if
// no process runs. It waits at most stopTimeout.
func Stop(dir string) error {
	end := time.Now().Add(stopTimeout)
	for {
		s, running, err := find(dir)
		if err != nil {
			return fmt.Errorf("stop tunnel: %w", err)
		}
		if !running {
			break
		}
		if err := sendSignal(dir, s, unix.SIGKILL); err != nil {
			return fmt.Errorf("stop tunnel: %w", err)
		}
		if time.Now().After(end) {
			return fmt.Errorf("stop tunnel: process %d does not end", s.PID)
		}
		time.Sleep(5 * time.Millisecond)
	}
	for _, name := range []string{sourceSocket, stateFile} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("stop tunnel: %w", err)
		}
	}
	return nil
}

// sendSignal sends a signal to the process of the state s. It does so only if the file is still locked by this process,
// because otherwise the pid may belong to another process now.
func sendSignal(dir string, s State, signal unix.Signal) error {
	pidfd, err := unix.PidfdOpen(s.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return os.NewSyscallError("pidfd_open", err)
	}
	defer unix.Close(pidfd)
	if now, running, err := find(dir); err != nil || !running || now.PID != s.PID {
		return err
	}
	err = unix.PidfdSendSignal(pidfd, signal, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return os.NewSyscallError("pidfd_send_signal", err)
}

// Dial opens a stream through the tunnel process of a source. It returns a socket that is connected to the target's
// QEMU. The caller must close the socket. Dial waits at most openTimeout.
func Dial(ctx context.Context, dir, stream string) (*os.File, error) {
	f, err := dial(ctx, dir, stream)
	if err != nil {
		return nil, fmt.Errorf("open stream %s to the target: %w", stream, err)
	}
	return f, nil
}

func dial(ctx context.Context, dir, stream string) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	conn, err := dialUnix(ctx, dir, sourceSocket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if _, err := io.WriteString(conn, stream+"\n"); err != nil {
		return nil, err
	}
	answer, err := readLine(conn)
	if err != nil {
		return nil, errors.Join(err, ctx.Err())
	}
	if answer != accepted {
		return nil, errors.New(answer)
	}
	return conn.File()
}

// dialUnix connects to the socket of the given name in dir. It uses a path in /proc/self/fd, because the path of dir
// can be too long for a socket address.
func dialUnix(ctx context.Context, dir, name string) (*net.UnixConn, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), name))
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// Listen returns a listening unix socket of the given name in dir, for example DiskSocket for QEMU's NBD server. It
// replaces an existing socket.
func Listen(dir, name string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("listen at %s: %w", name, err)
	}
	l, err := listenUnix(dir, name)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", name, err)
	}
	defer l.Close()
	return l.File()
}

func listenUnix(dir, name string) (*net.UnixListener, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	path := fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), name)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	return l, nil
}

// SocketPair returns the two ends of a connected unix socket: one for QEMU, and one for the tunnel process of a target.
func SocketPair() (one, other *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), "memory"), os.NewFile(uintptr(fds[1]), "memory"), nil
}

// accepted is the answer to a request after the stream was opened. Any other answer is an error text.
const accepted = "ok"

// maxLine is the maximum length of a request for a stream, and of an answer.
const maxLine = 512

// readLine reads one line. It reads byte by byte, because the data of the stream follows the line.
func readLine(r io.Reader) (string, error) {
	line := make([]byte, 0, 64)
	b := make([]byte, 1)
	for len(line) < maxLine {
		if _, err := io.ReadFull(r, b); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		line = append(line, b[0])
	}
	return "", errors.New("the line is too long")
}
