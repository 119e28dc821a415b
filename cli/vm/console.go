package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/terminal"
	consolev1 "github.com/trivet-cloud/trivet/protos/console/v1"
)

const (
	// detachKey is Ctrl-].
	detachKey = 0x1d
	// consoleTail is how much of the earlier output is shown first, in bytes, without --tail.
	consoleTail = 2 << 10
	// movedTail is how much of the output on a new host is shown after the VM has moved there, in bytes.
	movedTail = 64 << 10
	// consolePatience is the time for which a console whose connection broke is opened again and again. It is long enough
	// for the restart of an agent and for an election.
	consolePatience = time.Minute
	// consolePause is the time between two attempts.
	consolePause = 500 * time.Millisecond
	// maxInput is the maximum size of a message with input, in bytes.
	maxInput = 4 << 10
)

func consoleCommand(s *session.Session) *cobra.Command {
	var readOnly, force bool
	var tail uint64
	c := vmArgCommand(s, "console VM", "Connect the terminal to a VM's serial console")
	c.Long = `Connect the terminal to the serial console of a running VM. Every key goes to the guest, also Ctrl-C. Ctrl-] detaches;
the VM keeps running. If the connection breaks, for example because the agent of the host restarts, the command connects
again and continues the output where it ended. Keys that were typed while the connection was broken can be lost.

Several users may watch a console at a time, but only one may write. With --read-only, the host ignores the keys. With
--force, the command takes the console over from the user who writes to it now.

If standard input is not a terminal, it is sent to the guest, and the command detaches at its end.`
	c.Flags().BoolVar(&readOnly, "read-only", false, "watch the console without writing to it")
	c.Flags().BoolVar(&force, "force", false, "take the console over from another user")
	c.Flags().Uint64Var(&tail, "tail", consoleTail, "show this many bytes of the earlier output first")
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		if readOnly && force {
			return session.Usagef("--read-only cannot be used with --force")
		}
		t, err := find(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		console := &serialConsole{s: s, conn: conn, name: args[0], now: time.Now, first: &consolev1.AttachConsoleRequest{
			OrgId: t.org, ProjectId: t.project, VmId: t.id, Kind: consolev1.ConsoleKind_CONSOLE_KIND_SERIAL,
			ReadOnly: readOnly, TakeOver: force, TailBytes: tail,
		}}
		return session.Interruptible(ctx, console.run(ctx))
	})
	return c
}

// errDetached means that the user has detached from the console.
var errDetached = errors.New("detached")

// serialConsole connects the terminal to a serial console.
type serialConsole struct {
	s     *session.Session
	conn  *dial.Conn
	name  string // of the VM, as the user gave it
	first *consolev1.AttachConsoleRequest
	now   func() time.Time
	// opened is true if the last attempt opened the console, and openedOnce if any attempt did. lastOpen is when the
	// console was open last.
	opened, openedOnce bool
	lastOpen           time.Time
	raw                bool // the terminal is in raw mode
}

// run reads keys and serves the console until the user detaches or the VM stops.
func (c *serialConsole) run(ctx context.Context) (result error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if in, ok := c.s.Stdin.(*os.File); ok && terminal.Is(in) {
		restore, err := terminal.Raw(in)
		if err != nil {
			return err
		}
		c.raw = true
		defer func() {
			if restoreErr := restore(); restoreErr != nil {
				result = errors.Join(result, restoreErr)
			}
		}()
	}
	input := make(chan []byte, maxTyped)
	detaching, detach := context.WithCancel(ctx)
	defer detach()
	go c.readKeys(ctx, input, detach)
	for {
		err := c.attach(ctx, detaching, input)
		switch {
		case errors.Is(err, errDetached), detaching.Err() != nil && ctx.Err() == nil:
			c.note("detached from %s", c.name)
			return nil
		case err == nil:
			c.note("VM %s has stopped", c.name)
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		}
		wasOpen := c.opened
		if !c.retry(err) {
			return err
		}
		if wasOpen {
			c.note("the connection to the console broke, connecting again: %s", status.Convert(err).Message())
		}
		c.conn.Next()
		if err := dial.Sleep(detaching, consolePause); err != nil && ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// note prints a message. In raw mode it is on a line of its own, and a line feed alone does not return to the first
// column.
func (c *serialConsole) note(format string, args ...any) {
	if c.raw {
		fmt.Fprint(c.s.Stderr, "\r\n")
		defer fmt.Fprint(c.s.Stderr, "\r")
	}
	c.s.Note(format, args...)
}

// retry reports whether the console may be opened again after an attempt that ended with err. The time of
// consolePatience begins at the end of the last attempt that opened the console, however long the guest has printed
// nothing. A member may still have this user's own broken session, so that for some time the console seems to be in
// use.
func (c *serialConsole) retry(err error) bool {
	wasOpen := c.opened
	if wasOpen {
		c.opened, c.openedOnce, c.lastOpen = false, true, c.now()
	}
	if !c.openedOnce || c.now().Sub(c.lastOpen) > consolePatience {
		return false
	}
	return status.Code(err) == codes.Unavailable || !wasOpen && hasReason(err, "CONSOLE_IN_USE")
}

// maxTyped is the maximum number of reads of standard input whose bytes are kept until they can be sent.
const maxTyped = 256

// readKeys sends what the user types to the channel input, and closes it when the user has typed detachKey or the input
// has ended. If the user of a terminal has typed detachKey, readKeys calls detach, because the console may not be open,
// or its guest may not read.
func (c *serialConsole) readKeys(ctx context.Context, input chan<- []byte, detach func()) {
	defer close(input)
	in, isFile := c.s.Stdin.(*os.File)
	for {
		buf := make([]byte, maxInput)
		var n int
		var err error
		if isFile {
			n, err = terminal.Read(ctx, in, buf)
		} else {
			n, err = c.s.Stdin.Read(buf)
		}
		data, _, detached := bytes.Cut(buf[:n], []byte{detachKey})
		if len(data) > 0 && !c.queue(ctx, input, data) {
			return
		}
		if detached && c.raw {
			detach()
		}
		if err != nil || detached {
			return
		}
	}
}

// queue sends data to the channel input, and returns false if ctx has ended. If the channel is full, the keys of a
// terminal are dropped and the bell rings, so that readKeys can read detachKey. Other input waits.
func (c *serialConsole) queue(ctx context.Context, input chan<- []byte, data []byte) bool {
	select {
	case input <- data:
		return true
	default:
	}
	if c.raw {
		fmt.Fprint(c.s.Stderr, "\a")
		return true
	}
	select {
	case input <- data:
		return true
	case <-ctx.Done():
		return false
	}
}

// attach opens the console once and copies data until the user detaches or the stream ends. It returns nil if the VM
// has stopped. The context detaching ends when the user has typed detachKey. If the console is not open then, attach
// ends at once; otherwise it sends what was typed before.
func (c *serialConsole) attach(ctx, detaching context.Context, input <-chan []byte) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	opened := make(chan struct{})
	defer context.AfterFunc(detaching, func() {
		select {
		case <-opened:
			time.AfterFunc(detachTime, cancel)
		default:
			cancel()
		}
	})()
	stream, err := consolev1.NewConsoleServiceClient(c.conn).AttachConsole(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(c.first); err != nil && !errors.Is(err, io.EOF) { // after io.EOF, Recv returns the reason
		return err
	}
	output := make(chan error, 1)
	go func() { output <- c.copyOutput(stream, opened) }()
	isOpen := (<-chan struct{})(opened)
	keys := (<-chan []byte)(nil) // no keys are read before the console is open
	for {
		select {
		case err := <-output:
			return err
		case <-isOpen:
			isOpen, keys = nil, input
		case data, more := <-keys:
			if !more {
				return closeInput(stream, output, cancel)
			}
			if err := stream.Send(&consolev1.AttachConsoleRequest{Data: data}); err != nil {
				return <-output
			}
		}
	}
}

const (
	// detachTime is the maximum time between detachKey and the end of the command.
	detachTime = 2 * time.Second
	// drainTime is the maximum time after the end of the input in which the host writes the rest of the input to the
	// serial port. The server has a shorter limit of its own.
	drainTime = 20 * time.Second
)

// closeInput half-closes the stream, and waits until the input has been written to the serial port and the output that
// was sent before the end has been printed. It returns errDetached, or the error that ended the stream.
func closeInput(stream consolev1.ConsoleService_AttachConsoleClient, output <-chan error, cancel context.CancelFunc) error {
	late := time.AfterFunc(drainTime, cancel)
	defer late.Stop()
	if err := stream.CloseSend(); err != nil {
		cancel()
	}
	if err := <-output; err != nil {
		return err
	}
	return errDetached
}

// copyOutput writes the output of the console to standard output. It closes opened when the console is open.
func (c *serialConsole) copyOutput(stream consolev1.ConsoleService_AttachConsoleClient, opened chan<- struct{}) error {
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if m.GetOpened() {
			if !c.openedOnce {
				c.note("connected to %s: Ctrl-] detaches", c.name)
			} else {
				c.note("connected again")
			}
			c.opened = true
			// If the connection breaks, the output continues. Only the first connection takes the console over.
			// The tail is only for a VM that has moved to another host, whose log has the output since then.
			c.first.TakeOver, c.first.TailBytes = false, movedTail
			close(opened)
		}
		if m.GetLog() != "" {
			c.first.FromOffset, c.first.FromLog = new(m.GetOffset()), m.GetLog()
		}
		if _, err := c.s.Stdout.Write(m.GetData()); err != nil {
			return fmt.Errorf("write the output: %w", err)
		}
	}
}
