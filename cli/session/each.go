package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/explain"
	"github.com/trivet-cloud/trivet/cli/show"
)

// Many makes a command with one argument accept several. The body of the command must then be one of RunEach or ShowEach.
func Many(c *cobra.Command) *cobra.Command {
	c.Args = AtLeast(c.Use[strings.LastIndexByte(c.Use, ' ')+1:])
	c.Use += "..."
	if first := c.ValidArgsFunction; first != nil {
		c.ValidArgsFunction = AnyArg(func(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
			return first(cmd, nil, prefix)
		})
	}
	return c
}

// RunEach is like Run for a command that does the same to each of its arguments, one after the other. If body fails for
// an argument, RunEach prints the error and goes on with the next one; the exit code is that of the first error. The
// deadline without --timeout is limit for each argument; --timeout is the deadline of the whole command. When it passes,
// RunEach prints an error for each argument that is left, and the exit code is that of a timeout.
func (s *Session) RunEach(limit time.Duration, body func(ctx context.Context, conn *dial.Conn, arg string) error) func(*cobra.Command, []string) error {
	return s.runEach(limit, false, body)
}

// ShowEach is like RunEach for a command that prints several lines about each argument. It prints an empty line between
// them in tables. In JSON and the other formats of documents, it prints the document of a list if there are several
// arguments.
func (s *Session) ShowEach(limit time.Duration, body func(ctx context.Context, conn *dial.Conn, arg string) error) func(*cobra.Command, []string) error {
	return s.runEach(limit, true, body)
}

func (s *Session) runEach(limit time.Duration, apart bool, body func(ctx context.Context, conn *dial.Conn, arg string) error) func(*cobra.Command, []string) error {
	return s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if apart && len(args) > 1 && !s.Form.ForPeople() && s.Form != show.Name && s.Form != show.CSV {
			return s.showTogether(ctx, limit, args, func(ctx context.Context, arg string) error { return body(ctx, conn, arg) })
		}
		shown := false
		return s.Each(ctx, limit, args, func(ctx context.Context, arg string) error {
			out := &separatedWriter{w: s.Stdout}
			switch {
			case shown && s.Form == show.YAML:
				out.separator = "---\n"
			case shown && apart && s.Form.ForPeople():
				out.separator = "\n"
			}
			s.Stdout = out
			defer func() { s.Stdout, shown = out.w, shown || out.wrote }()
			return body(ctx, conn, arg)
		})
	})
}

// separatedWriter writes a separator before the first write, so that there is none before an argument that fails.
type separatedWriter struct {
	w         io.Writer
	separator string
	wrote     bool
}

func (s *separatedWriter) Write(p []byte) (int, error) {
	if !s.wrote {
		if _, err := io.WriteString(s.w, s.separator); err != nil {
			return 0, err
		}
		s.wrote = true
	}
	return s.w.Write(p)
}

// showTogether calls body for each argument, and then prints the documents that body has printed as one list.
func (s *Session) showTogether(ctx context.Context, limit time.Duration, args []string, body func(ctx context.Context, arg string) error) error {
	s.collected = &[]any{}
	err := s.Each(ctx, limit, args, body)
	items := *s.collected
	s.collected = nil
	if errors.Is(ctx.Err(), context.Canceled) {
		return err
	}
	if printErr := s.PrintValue(show.Documents(items, ""), nil, nil); printErr != nil {
		return printErr
	}
	return err
}

// Each calls body for each argument, as RunEach does.
func (s *Session) Each(ctx context.Context, limit time.Duration, args []string, body func(ctx context.Context, arg string) error) error {
	if s.flags.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = s.Limit(ctx, 0)
		defer cancel()
		limit = 0
	}
	one := func(arg string) error {
		ctx, cancel := context.WithCancel(ctx)
		if limit > 0 {
			ctx, cancel = s.Limit(ctx, limit)
		}
		defer cancel()
		s.facts.Ongoing = explain.Ongoing{}
		return s.inTenant(ctx, func() error { return body(ctx, arg) })
	}
	late := func() bool { return errors.Is(ctx.Err(), context.DeadlineExceeded) }
	deadline, _ := ctx.Deadline() // the zero time without a deadline
	first := 0
	for i, arg := range args {
		var err error
		if i > 0 && late() {
			err = Errorf(codes.DeadlineExceeded, "", "%s was not attempted: the deadline of the command had passed", arg)
		} else {
			err = one(arg)
		}
		if err == nil {
			continue
		}
		if deadlinePassed(err) && !deadline.IsZero() && time.Until(deadline) < deadlineSkew {
			<-ctx.Done()
		}
		if len(args) == 1 || errors.Is(ctx.Err(), context.Canceled) {
			return err
		}
		if code := s.Report(s.named(arg, err)); first == 0 {
			first = code
		}
	}
	switch {
	case first == 0:
		return nil
	case late():
		first = explain.ExitTimeout
	}
	return &Coded{Code: first}
}

// deadlineSkew is the maximum time by which a member, whose clock measures the deadline of a call too, reports that it has
// passed before the context of the call ends.
const deadlineSkew = 100 * time.Millisecond

func deadlinePassed(err error) bool {
	var problem *Problem
	if errors.As(err, &problem) {
		return problem.Code == codes.DeadlineExceeded
	}
	return status.Code(err) == codes.DeadlineExceeded || errors.Is(err, context.DeadlineExceeded)
}

// named puts arg before the error for a deadline, which otherwise does not say for which of several arguments it passed.
// The report of an ongoing operation says that already, and some commands put arg before their errors themselves.
func (s *Session) named(arg string, err error) error {
	var problem *Problem
	if !deadlinePassed(err) || errors.As(err, &problem) || s.facts.Ongoing.What != "" || strings.HasPrefix(err.Error(), arg+": ") {
		return err
	}
	return fmt.Errorf("%s: %w", arg, err)
}

// ReportAll prints the errors of operations on several objects. It returns nil if there are none, the error itself if
// there is one, and else an error that prints nothing and has the exit code of the first.
func (s *Session) ReportAll(errs ...error) error {
	switch len(errs) {
	case 0:
		return nil
	case 1:
		return errs[0]
	}
	first := 0
	for _, err := range errs {
		if code := s.Report(err); first == 0 {
			first = code
		}
	}
	return &Coded{Code: first}
}
