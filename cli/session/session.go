// Package session holds what all commands of `trivet` share: standard streams and environment, global flags, the
// connection to the control plane, output, error messages and exit codes. The commands themselves are in other packages
// (vm, image and so on). Decisions:
//
//   - There is no global state. The program reaches its environment only through a [Shell], so tests run it in memory.
//   - All errors have one form, and the exit code depends on the code of the error (package explain).
//   - [Session.Finish] gives all commands what is common to them: aliases, suggestions for typing errors, units of
//     durations. A new command gets this without code of its own.
//   - Standard output contains only the result. Notes, progress and errors go to standard error.
package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/explain"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Shell is the environment of the program: its arguments, environment variables, standard streams and clock. Fields are
// required unless their comment says otherwise.
type Shell struct {
	Args   []string
	Env    func(string) string
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	// Ask prints a question on the terminal and returns the line that the user types. If secret is true, the line is
	// not echoed. Ask is nil if standard input or standard error is not a terminal.
	Ask func(ctx context.Context, question string, secret bool) (string, error)
	// Edit opens a file in the user's editor and waits for its end. It is nil without a terminal.
	Edit func(ctx context.Context, path string) error
	// Progress is the terminal on which a status line is shown during long waits; nil for no status line.
	Progress io.Writer
	Now      func() time.Time
	// Dialer makes connections instead of a TCP dialer. Optional.
	Dialer func(ctx context.Context, endpoint string) (net.Conn, error)
	// HTTP makes requests to publishers of images instead of http.DefaultClient. Optional.
	HTTP *http.Client
}

// Session is one run of the program: it holds the Shell, the values of the global flags and the state of the command.
type Session struct {
	Shell
	// Form is the kind of the output format that --output selects.
	Form show.Form
	// format is the output format with its expression.
	format show.Format
	flags  flags
	facts  explain.Facts
	// scope is the saved login that is in use, or nil. Tenant returns its org and project if the flags and the
	// environment name neither.
	scope *account.Login
	// choosing is true if calls send the org and project that Tenant returns, in their metadata.
	choosing bool
	// found is the tenant that inTenant has found, and lookUp the function that LookUpByID has registered, or nil.
	found  struct{ org, project string }
	lookUp func() (org, project string, err error)
	given  func(flag string) bool
	fresh  bool
	// secret describes the secret that calls contain besides the token, such as "the password", for error messages;
	// empty for none.
	secret string
	// secrets lists the values that are removed from all messages; see Keep.
	secrets []account.Secret
	// collected holds the documents that a command prints together at its end. It is nil if they are printed one by one.
	collected *[]any
	// conn is the connection of the command, or nil.
	conn *dial.Conn
	// began is true once the body of a command has started. An error before that means that the command line is
	// invalid.
	began bool
}

// New returns a session for the command line in sh, and adds the global flags to root.
func New(sh Shell, root *cobra.Command) *Session {
	s := &Session{Shell: sh, Form: show.Table, format: show.Format{Form: show.Table}}
	s.flags.add(root, s)
	s.given = func(flag string) bool { return root.PersistentFlags().Changed(flag) }
	// The error is ignored: RegisterFlagCompletionFunc fails only if the flag does not exist or already has a
	// completion.
	_ = root.RegisterFlagCompletionFunc("context", s.Contexts())
	root.SetArgs(sh.Args)
	root.SetIn(sh.Stdin)
	root.SetOut(sh.Stdout)
	root.SetErr(sh.Stderr)
	return s
}

// Run returns a function for cobra's RunE that connects to the control plane and calls body. The context of body ends
// after --timeout or, without that flag, after limit; a limit of 0 means no deadline.
func (s *Session) Run(limit time.Duration, body func(ctx context.Context, conn *dial.Conn, args []string) error) func(*cobra.Command, []string) error {
	return s.Local(func(ctx context.Context, args []string) error {
		conn, err := s.Connect()
		if err != nil {
			return err
		}
		defer conn.Close()
		ctx, cancel := s.Limit(ctx, limit)
		defer cancel()
		return s.inTenant(ctx, func() error { return body(ctx, conn, args) })
	})
}

// Local returns a function for cobra's RunE that calls body without a connection and without a deadline.
func (s *Session) Local(body func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		s.began = true
		s.describe(cmd)
		if err := s.checkNamed(); err != nil {
			return err
		}
		return body(cmd.Context(), args)
	}
}

// Limit returns a context that ends after --timeout or, without that flag, after limit; a limit of 0 means no deadline.
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

// printTime is the time that a command has for the calls that it makes to print its result, after its deadline.
const printTime = 2 * time.Second

// PrintContext returns a context for the calls that a command makes to print its result, such as the one for the names of
// hosts. If the deadline of ctx has passed, the context has 2 more seconds: a command for several objects then prints
// what it has reached for them.
func (s *Session) PrintContext(ctx context.Context) (context.Context, context.CancelFunc) {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(context.WithoutCancel(ctx), printTime)
}

// Wait runs body and shows text in the status line meanwhile. body can change the text by calling say.
func (s *Session) Wait(text string, body func(say func(string)) error) error {
	p := show.Start(s.Progress, text)
	defer p.End()
	return body(p.Say)
}

// Ongoing is an operation that goes on in the control plane after a command has ended.
type Ongoing = explain.Ongoing

// WaitOngoing is like Wait for a call whose operation the control plane carries out even if the command is interrupted
// or its deadline passes. The error then says what goes on.
func (s *Session) WaitOngoing(text string, o Ongoing, body func(say func(string)) error) error {
	s.facts.Ongoing = o
	err := s.Wait(text, body)
	if err == nil {
		s.facts.Ongoing = Ongoing{}
	}
	return err
}

// Confirm asks the user whether to go on, with a question that ends without a question mark. Without a terminal it
// returns a *Usage error that asks for --yes.
func (s *Session) Confirm(ctx context.Context, question string) error {
	if s.Ask == nil {
		return Usagef("cannot ask without a terminal whether to %s: give --yes", question)
	}
	answer, err := s.Ask(ctx, question+"? [y/N] ", false)
	if err != nil {
		return err
	}
	if a := strings.ToLower(strings.TrimSpace(answer)); a != "y" && a != "yes" && !mutant.On(mutant.ActUnasked) {
		return Errorf(codes.Canceled, "", "nothing was changed")
	}
	return nil
}

// Note prints a message to standard error, with known secrets removed.
func (s *Session) Note(format string, args ...any) {
	fmt.Fprintln(s.Stderr, "trivet: "+s.scrubbed(show.Text(fmt.Sprintf(format, args...))))
}

// Keep makes Note and Exit replace secret by "[secret]" in all later messages.
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
