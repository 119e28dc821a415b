package session

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/explain"
	"github.com/trivet-cloud/trivet/cli/show"
)

// Usage is the error for an invalid command line.
type Usage = explain.Usage

// Problem is an error that a command finds itself, with its code.
type Problem = explain.Problem

// Usagef returns a *Usage error with a formatted message.
func Usagef(format string, args ...any) error { return &Usage{Message: fmt.Sprintf(format, args...)} }

// Errorf returns an error with a code, a hint and a formatted message. The hint may be empty.
func Errorf(code codes.Code, hint, format string, args ...any) error {
	return &Problem{Code: code, Message: fmt.Sprintf(format, args...), Hint: hint}
}

// NotFound returns a NOT_FOUND error for an object that the last response does not contain.
func NotFound(hint, format string, args ...any) error {
	return &Problem{Code: codes.NotFound, Message: fmt.Sprintf(format, args...), Hint: hint, Responded: true}
}

// Coded is an error with an exit code of its own, for a command whose exit code is a result. Its message is printed
// without a code; without a Message, nothing is printed.
type Coded struct {
	Code    int
	Message string
}

func (e *Coded) Error() string { return e.Message }

// Interruptible returns err or, if the user has interrupted the command, an error that prints nothing and has the exit
// code 130. It is for commands that run until they are interrupted.
func Interruptible(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return &Coded{Code: explain.ExitInterrupted}
	}
	return err
}

// Exit prints err to standard error, unless it is nil, and returns the exit code of the program. cmd is the command
// that returned err.
func (s *Session) Exit(cmd *cobra.Command, err error) int {
	if err == nil {
		return 0
	}
	s.describe(cmd)
	var coded *Coded
	if errors.As(err, &coded) {
		if coded.Message != "" {
			s.Note("%s", coded.Message)
		}
		return coded.Code
	}
	var problem *Problem
	if !s.began && !errors.As(err, &problem) {
		err = &Usage{Message: err.Error()} // an error of cobra
	}
	return s.Report(err)
}

// describe puts what error messages need to know about the command into s.facts.
func (s *Session) describe(cmd *cobra.Command) {
	s.facts.Command, s.facts.Use = cmd.CommandPath(), cmd.Use
	s.facts.HasFlag = func(name string) bool {
		return cmd.Flags().Lookup(name) != nil || cmd.InheritedFlags().Lookup(name) != nil
	}
}

// Report prints err to standard error, in the format of --output, with known secrets removed. It returns the exit code
// for the error.
func (s *Session) Report(err error) int {
	f := s.facts
	if s.conn != nil {
		f.RequestID = s.conn.RequestID()
	}
	r := explain.New(err, f)
	r.Hint = s.hintWithFlags(r.Hint)
	text := r.Text()
	switch s.errorForm() {
	case show.JSON:
		text = r.JSON()
	case show.YAML:
		text = r.YAML()
	}
	fmt.Fprintln(s.Stderr, s.scrubbed(text))
	return r.Exit
}

// hintedCommand matches a command in a hint.
var hintedCommand = regexp.MustCompile("`trivet [^`]+`")

// hintWithFlags adds the flags --context, --org and --project of the command line to the commands in a hint, so that they
// act in the same place. Commands that log in, and help, do not get them.
func (s *Session) hintWithFlags(hint string) string {
	return hintedCommand.ReplaceAllStringFunc(hint, func(text string) string {
		command := strings.Trim(text, "`")
		words := strings.Fields(command)
		flags := []struct{ name, value string }{{"context", s.flags.context}, {"org", s.flags.org}, {"project", s.flags.project}}
		switch {
		case slices.Contains([]string{"login", "logout", "context", "help"}, words[1]) || slices.Contains(words, "--help"):
			return text
		case slices.Contains([]string{"whoami", "invitation", "org"}, words[1]): // they tell which orgs and projects there are
			flags = flags[:1]
		case words[1] == "project":
			flags = flags[:2]
		}
		for _, f := range flags {
			has := slices.ContainsFunc(words, func(w string) bool {
				return w == "--"+f.name || strings.HasPrefix(w, "--"+f.name+"=") || f.name != "context" && w == "--all-projects"
			})
			if f.value != "" && !has {
				command += " --" + f.name + " " + explain.Quoted(f.value)
			}
		}
		return "`" + command + "`"
	})
}

// errorForm returns the output format for errors. If the command line is invalid, --output may not have been parsed
// yet; errorForm then looks for it in the arguments.
func (s *Session) errorForm() show.Form {
	if s.Form != show.Table {
		return s.Form
	}
	for i, arg := range s.Args {
		value, ok := strings.CutPrefix(arg, "--output=")
		switch {
		case arg == "--":
			return s.Form
		case ok:
			return show.Form(value)
		case (arg == "-o" || arg == "--output") && i+1 < len(s.Args):
			return show.Form(s.Args[i+1])
		}
		if value, ok = strings.CutPrefix(arg, "-o"); ok && value != "" {
			return show.Form(strings.TrimPrefix(value, "="))
		}
	}
	return s.Form
}
