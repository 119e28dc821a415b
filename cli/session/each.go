package session

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

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
// deadline without --timeout is limit for each argument; --timeout is the deadline of the whole command.
func (s *Session) RunEach(limit time.Duration, body func(ctx context.Context, conn *dial.Conn, arg string) error) func(*cobra.Command, []string) error {
	return s.runEach(limit, false, body)
}

// ShowEach is like RunEach for a command that prints several lines about each argument. It prints an empty line between
// them in tables.
func (s *Session) ShowEach(limit time.Duration, body func(ctx context.Context, conn *dial.Conn, arg string) error) func(*cobra.Command, []string) error {
	return s.runEach(limit, true, body)
}

func (s *Session) runEach(limit time.Duration, apart bool, body func(ctx context.Context, conn *dial.Conn, arg string) error) func(*cobra.Command, []string) error {
	return s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		shown := false
		return s.Each(ctx, limit, args, func(ctx context.Context, arg string) error {
			if shown && s.Form == show.YAML {
				fmt.Fprintln(s.Stdout, "---")
			} else if shown && apart && s.Form.ForPeople() {
				fmt.Fprintln(s.Stdout)
			}
			shown = true
			return body(ctx, conn, arg)
		})
	})
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
		return s.locating(func() error { return body(ctx, arg) })
	}
	first := 0
	for _, arg := range args {
		err := one(arg)
		if err == nil {
			continue
		}
		if len(args) == 1 || ctx.Err() != nil {
			return err
		}
		if code := s.Report(err); first == 0 {
			first = code
		}
	}
	if first != 0 {
		return &Coded{Code: first}
	}
	return nil
}
