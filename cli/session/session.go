// Package session holds what all commands of `trivet` share: the standard streams and environment, the global flags,
// the connection to the control plane, output, error messages and exit codes. The commands are in other packages (vm,
// image and so on). Decisions:
//
//   - There is no global state. The program reaches its environment only through a [Shell], so tests run it in memory.
//   - The exit code is 2 for an invalid command line, which is a [Usage] error, and 1 for every other failure.
//   - Standard output contains only the result. Notes, progress and errors go to standard error.
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

// Shell is the environment of the program. Fields are required unless documented as optional.
type Shell struct {
	Args   []string
	Env    func(string) string
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	// Ask reads an answer from the terminal, without echo if secret is set; nil unless standard
	// input and standard error are terminals.
	Ask func(ctx context.Context, question string, secret bool) (string, error)
	// Progress is the terminal on which long waits are shown; nil for none.
	Progress io.Writer
	Now      func() time.Time
	// Dialer replaces TCP; optional.
	Dialer func(ctx context.Context, endpoint string) (net.Conn, error)
}

// Session is one run of the program.
type Session struct {
	Shell
	// Form is the output format.
	Form  show.Form
	flags flags
	facts explain.Facts
	// scope is the saved login whose org and project are used unless the flags or the environment name others; may be
	// nil.
	scope *account.Login
	// choosing is set if the calls of the connection name the tenant that Tenant returns.
	choosing bool
	given    func(flag string) bool
	fresh    bool
	// secret describes the secret in calls without a token, for error messages; empty for none.
	secret string
	// secrets are removed from all messages.
	secrets []account.Secret
	// began is set when the body of a command starts, that is, when cobra accepted the command line.
	began bool
}

// New returns a session and adds the global flags to root.
func New(sh Shell, root *cobra.Command) *Session {
	s := &Session{Shell: sh, Form: show.Table}
	s.flags.add(root, &s.Form)
	s.given = func(flag string) bool { return root.PersistentFlags().Changed(flag) }
	// This fails only for an unknown flag.
	_ = root.RegisterFlagCompletionFunc("context", s.Contexts())
	root.SetArgs(sh.Args)
	root.SetIn(sh.Stdin)
	root.SetOut(sh.Stdout)
	root.SetErr(sh.Stderr)
	return s
}

// Usage is the error for an invalid command line.
type Usage struct{ Message string }

func (e *Usage) Error() string { return e.Message }

// Usagef returns a Usage error.
func Usagef(format string, args ...any) error { return &Usage{fmt.Sprintf(format, args...)} }

// Run returns a command body that gets a connection. limit is its deadline unless --timeout is given; 0 means none.
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

// Local returns a command body that opens its own connection or needs none.
func (s *Session) Local(body func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		s.began = true
		return body(cmd.Context(), args)
	}
}

// Limit adds the deadline of --timeout, or else limit, to a context; 0 means none.
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

// Wait runs body and shows text as progress meanwhile. body can replace the text with say.
func (s *Session) Wait(text string, body func(say func(string)) error) error {
	p := show.Start(s.Progress, text)
	defer p.End()
	return body(p.Say)
}

// Note prints a message to standard error.
func (s *Session) Note(format string, args ...any) {
	fmt.Fprintln(s.Stderr, "trivet: "+s.scrubbed(show.Text(fmt.Sprintf(format, args...))))
}

// Print prints a result in the format of --output: m for JSON, names, or the table.
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

// PrintValue does the same as Print for a value that is not a protobuf message.
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

// Done prints the success of a command that returns no object, such as a delete.
func (s *Session) Done(name, what string) error {
	return s.Print(&emptypb.Empty{}, []string{name}, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, show.Text(name+" "+what))
		return err
	})
}

// Exit prints err, if there is one, and returns the exit code of the program.
func (s *Session) Exit(cmd *cobra.Command, err error) int {
	if err == nil {
		return 0
	}
	var usage *Usage
	if !s.began || errors.As(err, &usage) {
		// cobra prints its suggestions on indented lines.
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

// Keep removes secret from all later messages.
func (s *Session) Keep(secret account.Secret) { s.secrets = append(s.secrets, secret) }

// shortest is the minimum length in bytes of a secret that is removed from messages. A shorter password may equal a
// common word of a message, and removing the word would reveal the password. Tokens are always longer.
const shortest = 12

func (s *Session) scrubbed(text string) string {
	for _, secret := range s.secrets {
		if len(secret) >= shortest {
			text = strings.ReplaceAll(text, string(secret), secret.String())
		}
	}
	return text
}
