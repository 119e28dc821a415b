package vm

import (
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/console"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/cli/terminal"
	guestv1 "github.com/trivet-cloud/trivet/protos/guest/v1"
)

const (
	// maxExecInput is the maximum number of bytes of standard input for a program in a guest.
	maxExecInput = 64 << 10
	// defaultExecTime and maxExecTime are the default and the maximum of --time-limit.
	defaultExecTime = 30 * time.Second
	maxExecTime     = 5 * time.Minute
	// otherExitCode is the exit code of trivet for an exit code that is not 0 to 255, as Windows has them.
	otherExitCode = 255
)

func execCommand(s *session.Session) *cobra.Command {
	var stdin bool
	limit := defaultExecTime
	c := vmArgCommand(s, "exec VM -- COMMAND [ARG...]", "Run a program in the guest of a VM")
	c.Args = session.AtLeast("VM", "COMMAND")
	c.Flags().SetInterspersed(false) // flags after VM belong to the program
	c.Long = `Run a program in the guest of a VM, as the user of QEMU's guest agent, which is usually root, and wait for its end.
No shell interprets the arguments. The VM needs the package qemu-guest-agent in its guest, and the metadata
trivet/guest-exec=allowed.

The output of the program is printed when the program has ended: the first 768 KiB of standard output and of standard
error. On a terminal, control sequences are removed from it. The exit code is that of the program, or 128 and the number
of the signal that ended it. If trivet fails, it prints a message that begins with "trivet:" and a code, and the exit
code is that of the error.

A program that has not ended within --time-limit, or when you interrupt trivet, runs on in the guest.`
	c.Example = `  trivet vm exec web -- uname -a
  trivet vm exec web -- sh -c 'df -h; uptime'
  trivet vm exec -i web -- tee /etc/motd <motd`
	c.Flags().BoolVarP(&stdin, "stdin", "i", false, "pass standard input to the program, at most 64 KiB")
	c.Flags().DurationVar(&limit, "time-limit", limit, "maximum time of the program, 1s to 5m")
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		name, command := args[0], args[1:]
		if command[0] == "--" {
			command = command[1:]
		}
		switch {
		case len(command) == 0:
			return session.Usagef("COMMAND is missing")
		case limit < time.Second || limit > maxExecTime:
			return session.Usagef("--time-limit %v: want 1s to %v", limit, maxExecTime)
		}
		req := &guestv1.RunGuestCommandRequest{Command: command, TimeoutSeconds: uint32(math.Ceil(limit.Seconds()))}
		if stdin {
			var err error
			if req.Stdin, err = io.ReadAll(io.LimitReader(s.Stdin, maxExecInput+1)); err != nil {
				return fmt.Errorf("read standard input: %w", err)
			}
			if len(req.Stdin) > maxExecInput {
				return session.Usagef("standard input has more than %d bytes", maxExecInput)
			}
		}
		ctx, cancel := s.Limit(ctx, limit+waitMargin)
		defer cancel()
		t, err := find(ctx, s, conn, name)
		if err != nil {
			return err
		}
		req.OrgId, req.ProjectId, req.VmId = t.org, t.project, t.id
		var out *guestv1.RunGuestCommandResponse
		goesOn := session.Ongoing{What: "the program may run on in the guest"}
		err = s.WaitOngoing("running "+command[0]+" in "+name, goesOn, func(func(string)) error {
			out, err = guestv1.NewGuestServiceClient(conn).RunGuestCommand(ctx, req)
			return err
		})
		if err != nil {
			return err
		}
		return printExit(s, out)
	})
	return c
}

// printExit prints the output of a program, and returns an error that has its exit code.
func printExit(s *session.Session, out *guestv1.RunGuestCommandResponse) error {
	if !s.Form.ForPeople() && s.Form != show.Name {
		if err := s.Print(out, nil, nil); err != nil {
			return err
		}
	} else {
		for _, p := range []struct {
			to   io.Writer
			data []byte
		}{{s.Stdout, out.GetStdout()}, {s.Stderr, out.GetStderr()}} {
			if err := printOutput(p.to, p.data); err != nil {
				return err
			}
		}
		if out.GetStdoutTruncated() {
			s.Note("the output was longer: the rest is missing")
		}
		if out.GetStderrTruncated() {
			s.Note("the error output was longer: the rest is missing")
		}
	}
	code := int(out.GetExitCode())
	switch {
	case out.GetSignal() > 0 && out.GetSignal() < 128:
		s.Note("signal %d ended the program", out.GetSignal())
		code = 128 + int(out.GetSignal())
	case out.GetSignal() != 0:
		s.Note("the exception %#x ended the program", uint32(out.GetSignal()))
		code = otherExitCode
	case code < 0 || code > otherExitCode:
		s.Note("the program ended with the exit code %d", code)
		code = otherExitCode
	}
	if code == 0 {
		return nil
	}
	return &session.Coded{Code: code}
}

// printOutput writes output of a guest to w. If w is a terminal, it removes control sequences, because the guest may be
// hostile.
func printOutput(w io.Writer, data []byte) error {
	if f, ok := w.(*os.File); ok && terminal.Is(f) {
		filter := console.NewFilter(w)
		if _, err := filter.Write(data); err != nil {
			return err
		}
		return filter.Close()
	}
	_, err := w.Write(data)
	return err
}
