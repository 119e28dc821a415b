// Package session is what every command of `trivet` stands on: the streams and the environment it was started with, the
// flags that all commands share, the connection, and how things are printed and failures told.
//
// It knows no noun: package vm, image and so on hold the commands. Decisions:
//
//   - Nothing is global. A [Shell] is all that the program sees of the world, so a test runs the whole of it in memory.
//   - A command line that cannot be right ends with 2, everything else that goes wrong with 1. What was wrong with the
//     line is a [Usage] error.
//   - Standard output has the result and nothing else; notes, progress and errors go to standard error.
package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/explain"
	"github.com/trivet-cloud/trivet/cli/show"
)

// Shell is the world as a command sees it. All fields are required but where it says otherwise.
type Shell struct {
	Args   []string
	Env    func(string) string
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	// Ask asks the person at the terminal; nil when there is nobody.
	Ask func(ctx context.Context, question string, secret bool) (string, error)
	// Progress is the terminal for a line that says what is being waited for; nil for none.
	Progress io.Writer
	Now      func() time.Time
	// Dialer replaces TCP; optional.
	Dialer func(ctx context.Context, endpoint string) (net.Conn, error)
}

// Session is one run of the program.
type Session struct {
	Shell
	// Form of what is printed.
	Form  show.Form
	flags flags
	facts explain.Facts
	// scope is the login whose org and project calls act for, unless others are named.
	scope *account.Login
	// choosing is set if the calls of the connection name the tenant that Tenant returns.
	choosing bool
	given    func(flag string) bool
	fresh    bool
	// secret is what a call without a token tells; empty for nothing.
	secret string
	// secrets that were read, which no message may show.
	secrets []account.Secret
	// began is set when a command's own code was reached: the command line was understood until there.
	began bool
}

// New makes a session and gives root the flags that all commands share.
func New(sh Shell, root *cobra.Command) *Session {
	s := &Session{Shell: sh, Form: show.Table}
	s.flags.add(root, &s.Form)
	s.given = func(flag string) bool { return root.PersistentFlags().Changed(flag) }
	// This fails only for a flag that there is not.
	_ = root.RegisterFlagCompletionFunc("context", s.Contexts())
	root.SetArgs(sh.Args)
	root.SetIn(sh.Stdin)
	root.SetOut(sh.Stdout)
	root.SetErr(sh.Stderr)
	return s
}

// Usage is an error of the command line.
type Usage struct{ Message string }

func (e *Usage) Error() string { return e.Message }

// Usagef makes a Usage error.
func Usagef(format string, args ...any) error { return &Usage{fmt.Sprintf(format, args...)} }

// Run makes the body of a command that calls the cluster. It takes limit at most, or what --timeout says; 0 is no limit.
func (s *Session) Run(limit time.Duration, body func(ctx context.Context, conn *dial.Conn, args []string) error) func(*cobra.Command, []string) error {
	return s.Local(func(ctx context.Context, args []string) error {
		conn, err := s.Connect()
		if err != nil {
			return err
		}
		defer conn.Close()
		ctx, cancel := s.Limit(ctx, limit)
		defer cancel()
		return body(ctx, conn, args)
	})
}

// Local makes the body of a command that sees to its connection itself, or needs none.
func (s *Session) Local(body func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		s.began = true
		return body(cmd.Context(), args)
	}
}

// Limit bounds a context as --timeout says, or else by limit; 0 is no bound.
func (s *Session) Limit(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if s.flags.timeout > 0 {
		limit = s.flags.timeout
	}
	if limit <= 0 {
		return context.WithCancel(ctx)
	}
	s.facts.Timeout = limit
	return context.WithTimeout(ctx, limit)
}

// Wait shows what is being waited for while body runs.
func (s *Session) Wait(text string, body func(say func(string)) error) error {
	p := show.Start(s.Progress, text)
	defer p.End()
	return body(p.Say)
}

// Note tells a person something that is not the result.
func (s *Session) Note(format string, args ...any) {
	fmt.Fprintln(s.Stderr, "trivet: "+s.scrubbed(show.Text(fmt.Sprintf(format, args...))))
}

// Print prints a result in the form that was asked for.
func (s *Session) Print(m proto.Message, names []string, table func(io.Writer) error) error {
	switch s.Form {
	case show.JSON:
		return show.Object(s.Stdout, m)
	case show.Name:
		for _, n := range names {
			if _, err := fmt.Fprintln(s.Stdout, show.Text(n)); err != nil {
				return err
			}
		}
		return nil
	}
	return table(s.Stdout)
}

// PrintValue is Print for what is no message.
func (s *Session) PrintValue(v any, names []string, table func(io.Writer) error) error {
	if s.Form != show.JSON {
		return s.Print(nil, names, table)
	}
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("print JSON: %w", err)
	}
	_, err = fmt.Fprintln(s.Stdout, string(text))
	return err
}

// Done prints that something without an object happened, such as a delete.
func (s *Session) Done(name, what string) error {
	return s.Print(&emptypb.Empty{}, []string{name}, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, show.Text(name+" "+what))
		return err
	})
}

// Exit tells what went wrong, if anything did, and gives the program's exit code.
func (s *Session) Exit(cmd *cobra.Command, err error) int {
	if err == nil {
		return 0
	}
	var usage *Usage
	if !s.began || errors.As(err, &usage) {
		// cobra's suggestions are on lines of their own, after a tab.
		text := strings.ReplaceAll(err.Error(), "\t", "  ")
		for line := range strings.SplitSeq(text, "\n") {
			if line != "" {
				fmt.Fprintln(s.Stderr, s.scrubbed("trivet: "+show.Text(line)))
			}
		}
		fmt.Fprintf(s.Stderr, "run `%s --help`\n", cmd.CommandPath())
		return 2
	}
	fmt.Fprintln(s.Stderr, s.scrubbed("trivet: "+explain.Error(err, s.facts)))
	return 1
}

// Keep remembers a secret, so that no message shows it.
func (s *Session) Keep(secret account.Secret) { s.secrets = append(s.secrets, secret) }

// shortest is the length in bytes below which a secret is not looked for: it may be a word of the message, and to take
// that out would give it away. Tokens are longer.
const shortest = 12

func (s *Session) scrubbed(text string) string {
	for _, secret := range s.secrets {
		if len(secret) >= shortest {
			text = strings.ReplaceAll(text, string(secret), secret.String())
		}
	}
	return text
}
