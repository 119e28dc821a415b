package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

var (
	errConsoleStopped   = &console.Refusal{Text: "the VM is not running: start it first"}
	errAgentStarting    = &console.Refusal{Reason: "AGENT_STARTING", Text: "the agent of the host has not found the VM yet: try again"}
	errConsoleInUse     = &console.Refusal{Reason: "CONSOLE_IN_USE", Text: "another session writes to the serial port of the VM: open it read-only, or take it over"}
	errConsoleTakenOver = &console.Refusal{Reason: "CONSOLE_TAKEN_OVER", Text: "another session has taken over the serial port of the VM"}
	errConsoleClosed    = errors.New("the user has closed the console")
)

// consoleOpenWithin is the maximum time for the connection to a console of QEMU.
const consoleOpenWithin = 15 * time.Second

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
	case errors.Is(err, errConsoleClosed):
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

// claimWriter makes the caller the only session that may write to the serial port of a VM. If another session is, the
// error is errConsoleInUse, unless takeOver is true: claimWriter then ends that session and waits for its end. The
// returned context ends when a later session takes over. The caller must call release.
func (s *MachineSet) claimWriter(ctx context.Context, id cloud.VMID, takeOver bool) (_ context.Context, release func(), err error) {
	ctx, end := context.WithCancelCause(ctx)
	mine := &consoleWriter{end: end, ended: make(chan struct{})}
	for {
		s.mu.Lock()
		other := s.writers[id]
		if other == nil || mutant.On(mutant.TwoConsoleWriters) {
			s.writers[id] = mine
			s.mu.Unlock()
			return ctx, func() {
				s.mu.Lock()
				if s.writers[id] == mine {
					delete(s.writers, id)
				}
				s.mu.Unlock()
				close(mine.ended)
				end(nil)
			}, nil
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
	if from == 0 {
		from = length - min(length, int64(min(r.GetTailBytes(), console.KeepConsole)))
	}
	var port net.Conn
	if !r.GetReadOnly() {
		var release func()
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
	err = copySerial(ctx, process, log, from, port, pipe)
	if cause := context.Cause(ctx); errors.Is(cause, errConsoleTakenOver) {
		return cause
	}
	return err
}

// copySerial copies between the serial port and the user until QEMU ends, the user closes the console, or ctx ends. The
// parameter port is nil for a user that only reads.
func copySerial(ctx context.Context, process *qemu.Process, log *console.Log, from int64, port net.Conn, pipe console.Pipe) error {
	group, ctx := errgroup.WithContext(ctx)
	output := &serialOutput{pipe: pipe, next: from}
	wake := make(chan struct{}, 1)
	following, stop := context.WithCancel(ctx)
	group.Go(func() error {
		err := log.FollowFrom(following, from, wake, output.send)
		if ctx.Err() == nil && following.Err() != nil { // QEMU has ended: send what it wrote last
			output.rest(log)
			return errConsoleClosed
		}
		if errors.Is(err, fs.ErrNotExist) {
			return errConsoleClosed
		}
		return err
	})
	group.Go(func() error {
		select {
		case <-process.Exited():
		case <-ctx.Done():
		}
		stop()
		return nil
	})
	group.Go(func() error { return copyInput(ctx, port, pipe) })
	if port != nil {
		defer context.AfterFunc(ctx, func() { _ = port.Close() })()
		group.Go(func() error {
			// The output is read and dropped, because it is in the log too.
			buf := make([]byte, 4<<10)
			for {
				if _, err := port.Read(buf); err != nil {
					return nil // QEMU has closed the port: Exited, or the next write of copyInput, ends the session
				}
				select {
				case wake <- struct{}{}:
				default:
				}
			}
		})
	}
	return group.Wait()
}

// copyInput writes the bytes of the user to w. It drops them if w is nil. It returns errConsoleClosed when the user has
// closed the console.
func copyInput(ctx context.Context, w net.Conn, pipe console.Pipe) error {
	for {
		data, err := pipe.Recv(ctx)
		if errors.Is(err, io.EOF) {
			return errConsoleClosed
		}
		if err != nil {
			return err
		}
		if w == nil {
			continue
		}
		if _, err := w.Write(data); err != nil {
			return nil // QEMU has closed its end, or ctx has ended; the goroutine that reads from QEMU ends the session
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
				return errConsoleClosed
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
