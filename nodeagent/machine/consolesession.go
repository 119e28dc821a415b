package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

var (
	errConsoleStopped   = &console.Refusal{Text: "the VM is not running: start it first"}
	errAgentStarting    = &console.Refusal{Reason: "AGENT_STARTING", Text: "the agent has just restarted and has not reattached to the VM's QEMU: try again in a few seconds"}
	errConsoleInUse     = &console.Refusal{Reason: "CONSOLE_IN_USE", Text: "another session writes to the serial port of the VM: open it read-only, or take it over"}
	errConsoleTakenOver = &console.Refusal{Reason: "CONSOLE_TAKEN_OVER", Text: "another session has taken over the serial port of the VM"}
	errConsoleLost      = &console.Refusal{Reason: "CONSOLE_LOST", Text: "QEMU has closed the serial port: open the console again"}
	errConsoleEnded     = errors.New("the console has ended") // the user has closed it, or QEMU has ended
)

const (
	// consoleOpenWithin is the maximum time for the connection to a console of QEMU.
	consoleOpenWithin = 15 * time.Second
	// qemuExitWithin is the maximum time between the end of the connection to the serial port and the end of QEMU, if the
	// connection ends because QEMU ends.
	qemuExitWithin = 5 * time.Second
	// portDrainPoll is the interval at which the agent checks whether QEMU has read the input.
	portDrainPoll = 20 * time.Millisecond
)

// OpenConsole serves the console of a VM that r requests over pipe. It returns nil when the user has closed the console,
// or QEMU has ended. The error is a [*console.Refusal] if users may know the reason. Any number of sessions can read
// the output of a serial port, but only one can write.
func (s *MachineSet) OpenConsole(ctx context.Context, r *agentv1.OpenConsoleRequest, pipe console.Pipe) error {
	process, err := s.process(cloud.VMID(r.GetVmId()))
	if err != nil {
		return err
	}
	switch r.GetKind() {
	case agentv1.ConsoleKind_CONSOLE_KIND_SERIAL:
		err = s.serveSerial(ctx, process, r, pipe)
	case agentv1.ConsoleKind_CONSOLE_KIND_VNC:
		err = serveVNC(ctx, process, pipe)
	case agentv1.ConsoleKind_CONSOLE_KIND_SCREENSHOT:
		err = sendScreenshot(ctx, process, pipe)
	default:
		err = &console.Refusal{Text: "the agent of this host does not serve this kind of console: upgrade the agent"}
	}
	switch {
	case errors.Is(err, errConsoleEnded):
		return nil
	case errors.Is(err, qemu.ErrNoDisplay):
		return &console.Refusal{Reason: "NO_DISPLAY", Text: qemu.ErrNoDisplay.Error()}
	case errors.Is(err, qemu.ErrExited):
		return errConsoleStopped
	}
	return err
}

// process returns the running process of a VM. The error is errConsoleStopped if there is none, and errAgentStarting if
// the VM was not observed since the agent started.
func (s *MachineSet) process(id cloud.VMID) (*qemu.Process, error) {
	s.mu.Lock()
	v := s.open[id]
	s.mu.Unlock()
	if v == nil {
		return nil, errAgentStarting
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case v.process == nil && v.seen.VM == "":
		return nil, errAgentStarting
	case v.process == nil:
		return nil, errConsoleStopped
	}
	select {
	case <-v.process.Exited():
		return nil, errConsoleStopped
	default:
		return v.process, nil
	}
}

// consoleWriter is the session that may write to the serial port of a VM.
type consoleWriter struct {
	end   context.CancelCauseFunc
	ended chan struct{} // closed when the session no longer writes
}

// claimWriter makes the caller the only session that may write to the serial port of a VM. If another session holds the
// port, the error is errConsoleInUse, unless takeOver is true: claimWriter then ends that session and waits until it no
// longer writes. It does not wait until that session's user has read the rest of the output. The returned context ends
// with ctx, and when a later session takes over. The caller must call release when it no longer writes. Further calls of
// release do nothing.
func (s *MachineSet) claimWriter(ctx context.Context, id cloud.VMID, takeOver bool) (_ context.Context, release func(), err error) {
	ctx, end := context.WithCancelCause(ctx)
	mine := &consoleWriter{end: end, ended: make(chan struct{})}
	for {
		s.mu.Lock()
		other := s.writers[id]
		if other == nil || mutant.On(mutant.TwoConsoleWriters) {
			s.writers[id] = mine
			s.mu.Unlock()
			return ctx, sync.OnceFunc(func() {
				s.mu.Lock()
				if s.writers[id] == mine {
					delete(s.writers, id)
				}
				s.mu.Unlock()
				close(mine.ended)
			}), nil
		}
		s.mu.Unlock()
		if !takeOver {
			end(nil)
			return nil, nil, errConsoleInUse
		}
		other.end(errConsoleTakenOver)
		select {
		case <-other.ended:
		case <-ctx.Done():
			end(nil)
			return nil, nil, ctx.Err()
		}
	}
}

// serveSerial sends the output of the serial port, which it reads from the port's log. Unless r is read-only, it writes
// the bytes of the user to the port.
func (s *MachineSet) serveSerial(ctx context.Context, process *qemu.Process, r *agentv1.OpenConsoleRequest, pipe console.Pipe) error {
	home, err := s.o.Homes.Open(r.GetVmId())
	if err != nil {
		return errNoConsole
	}
	log := home.Console()
	length, err := log.Length()
	if err != nil {
		return err
	}
	from := r.GetFromOffset()
	if r.FromOffset == nil {
		from = length - min(length, int64(min(r.GetTailBytes(), console.KeepConsole)))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var port net.Conn
	release := func() {}
	if !r.GetReadOnly() {
		if ctx, release, err = s.claimWriter(ctx, cloud.VMID(r.GetVmId()), r.GetTakeOver()); err != nil {
			return err
		}
		defer release()
		bounded, cancel := context.WithTimeout(ctx, consoleOpenWithin)
		defer cancel()
		if port, err = process.DialSerial(bounded); err != nil {
			return err
		}
		defer port.Close()
	}
	// The empty message says that the console is open.
	if err := pipe.Send(nil, from); err != nil {
		return err
	}
	session := &serialSession{exited: process.Exited(), exitWithin: qemuExitWithin, log: log, from: from, port: port, release: release, pipe: pipe}
	err = session.run(ctx)
	if cause := context.Cause(ctx); errors.Is(cause, errConsoleTakenOver) {
		return cause
	}
	return err
}

// serialSession is an open serial port.
type serialSession struct {
	exited     <-chan struct{} // closed when QEMU has ended
	exitWithin time.Duration   // see qemuExitWithin
	log        *console.Log
	from       int64    // offset in log of the first byte that is sent
	port       net.Conn // nil for a user that only reads
	// release is called when the session no longer writes to the port. Its output may still wait for the user to read.
	release func()
	pipe    console.Pipe
}

// run copies between the serial port and the user until QEMU ends, the user closes the console, or ctx ends.
func (s *serialSession) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	output := &serialOutput{pipe: s.pipe, next: s.from}
	wake := make(chan struct{}, 1)
	following, stop := context.WithCancel(ctx)
	group.Go(func() error {
		err := s.log.FollowFrom(following, s.from, wake, output.send)
		if ctx.Err() == nil && following.Err() != nil { // QEMU has ended: send what it wrote last
			output.rest(s.log)
			return errConsoleEnded
		}
		if errors.Is(err, fs.ErrNotExist) {
			return errConsoleEnded
		}
		return err
	})
	group.Go(func() error {
		select {
		case <-s.exited:
		case <-ctx.Done():
		}
		stop()
		return nil
	})
	if s.port == nil {
		group.Go(func() error { return copyInput(ctx, nil, s.pipe) })
		return group.Wait()
	}
	defer context.AfterFunc(ctx, func() { _ = s.port.Close() })()
	group.Go(func() error {
		defer s.release()
		defer s.port.Close()
		err := copyInput(ctx, s.port, s.pipe)
		if errors.Is(err, errConsoleEnded) {
			drainPort(ctx, s.port)
		}
		return err
	})
	group.Go(func() error { return s.readPort(ctx, wake) })
	return group.Wait()
}

// readPort reads the output of the port and drops it, because it is in the log too. It writes to wake after each read. It
// returns errConsoleLost if the connection ends although QEMU still runs.
func (s *serialSession) readPort(ctx context.Context, wake chan<- struct{}) error {
	buf := make([]byte, 4<<10)
	for {
		if _, err := s.port.Read(buf); err != nil {
			break
		}
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	late := time.NewTimer(s.exitWithin)
	defer late.Stop()
	select {
	case <-s.exited:
		return nil // the goroutine that follows the log sends the rest and ends the session
	case <-ctx.Done():
		return nil
	case <-late.C:
		return errConsoleLost
	}
}

// drainPort waits until QEMU has read what was written to the port, or ctx ends. QEMU may drop what it has not read when
// the connection ends.
func drainPort(ctx context.Context, port net.Conn) {
	raw, ok := port.(*net.UnixConn)
	if !ok {
		return
	}
	socket, err := raw.SyscallConn()
	if err != nil {
		return
	}
	again := time.NewTicker(portDrainPoll)
	defer again.Stop()
	for {
		unread := 0
		controlErr := socket.Control(func(fd uintptr) { unread, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
		if err != nil || controlErr != nil || unread == 0 {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return
		}
	}
}

// copyInput writes the bytes of the user to w. It drops them if w is nil. It returns errConsoleEnded when the user has
// closed the console.
func copyInput(ctx context.Context, w net.Conn, pipe console.Pipe) error {
	for {
		data, err := pipe.Recv(ctx)
		if errors.Is(err, io.EOF) {
			return errConsoleEnded
		}
		if err != nil {
			return err
		}
		if w == nil {
			continue
		}
		if _, err := w.Write(data); err != nil {
			return nil // QEMU has closed its end, or ctx has ended: the goroutine that reads from QEMU ends the session
		}
	}
}

// serialOutput sends the output of a serial port to a user.
type serialOutput struct {
	pipe console.Pipe
	next int64 // offset of the first byte that was not sent
}

func (o *serialOutput) send(c console.Chunk) error {
	if c.Skipped > 0 {
		if err := o.pipe.Send(fmt.Appendf(nil, "\r\n[%d bytes are missing here]\r\n", c.Skipped), c.End-int64(len(c.Data))); err != nil {
			return err
		}
	}
	o.next = c.End
	return o.pipe.Send(c.Data, c.End)
}

// rest sends what was written to the log after the last call of send.
func (o *serialOutput) rest(log *console.Log) {
	length, err := log.Length()
	if err != nil || length <= o.next {
		return
	}
	data, err := log.Tail(length - o.next)
	if err == nil && len(data) > 0 {
		_ = o.pipe.Send(data, length) // if the user is gone, nobody needs the rest
	}
}

// serveVNC connects the user to QEMU's VNC server.
func serveVNC(ctx context.Context, process *qemu.Process, pipe console.Pipe) error {
	bounded, cancel := context.WithTimeout(ctx, consoleOpenWithin)
	defer cancel()
	screen, err := process.OpenVNC(bounded)
	if err != nil {
		return err
	}
	defer screen.Close()
	if err := pipe.Send(nil, 0); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(ctx, func() { _ = screen.Close() })()
	group.Go(func() error { return copyInput(ctx, screen, pipe) })
	group.Go(func() error {
		buf := make([]byte, 32<<10)
		for {
			n, err := screen.Read(buf)
			if n > 0 {
				if err := pipe.Send(buf[:n], 0); err != nil {
					return err
				}
			}
			if err != nil { // QEMU has ended, or has closed the connection because of an invalid message
				return errConsoleEnded
			}
		}
	})
	return group.Wait()
}

// sendScreenshot sends a picture of the display.
func sendScreenshot(ctx context.Context, process *qemu.Process, pipe console.Pipe) error {
	picture, err := process.Screenshot(ctx)
	if err != nil {
		return err
	}
	return pipe.Send(picture, 0)
}
