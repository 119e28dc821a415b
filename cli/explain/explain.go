// Package explain turns an error into what the user sees: a code, a message, at most one hint, and an exit code.
//
// It handles gRPC statuses with their google.rpc details, the errors of package dial, and the errors that the program
// finds itself ([Problem], [Usage]). It makes no calls. It escapes text from the server. Where a message of the server
// names a request field, New replaces the field by the flag or argument of the command (field.go). Decisions:
//
//   - The code is the name of the gRPC code, as in google.rpc.Code, also for errors that the program finds itself, so
//     that a script needs to know one set of names. [Failed] is the only other code.
//   - The exit code depends on the code alone (exit.go).
package explain

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
)

// Facts holds what the report depends on besides the error: properties of the command that failed.
type Facts struct {
	// Source names where the token was read from: a flag or variable such as "--token-file", or SavedLogin. It is empty
	// if there was no token.
	Source string
	// LoggingIn is set for a command that requests a token, such as `trivet login`.
	LoggingIn bool
	// Context is the name of the saved login that --context or TRIVET_CONTEXT selected; empty for the current one.
	Context string
	// Timeout is the time limit of the command.
	Timeout time.Duration
	// RequestID is the ID of the last call to which a member has responded; empty if there is none.
	RequestID string
	// Ongoing describes what the control plane continues to do after the command has ended; the zero value for nothing.
	Ongoing Ongoing
	// Command is the command line of the command without arguments, such as "trivet vm list".
	Command string
	// Use is the usage line of the command, such as "rename VM NAME".
	Use string
	// HasFlag reports whether the command has a flag. It is nil if the command is unknown.
	HasFlag func(name string) bool
}

// Ongoing is an operation that goes on after the command is interrupted or its deadline has passed.
type Ongoing struct {
	// What says what goes on, such as "web is still being stopped".
	What string
	// Look is a command that shows the progress, such as "trivet vm wait web --for STOPPED".
	Look string
}

// SavedLogin is the value of Facts.Source for a token that `trivet login` saved.
const SavedLogin = "trivet login"

// Problem is an error that the program finds itself, such as a name that no object has.
type Problem struct {
	// Code is the code that the control plane would give; OK means Failed.
	Code    codes.Code
	Message string
	// Hint says what the user can do. Optional.
	Hint string
	// Details are lines that belong to the message, such as a table. Optional.
	Details []string
	// Responded is true if the problem was found in the response to the last call, whose ID is then reported.
	Responded bool
	// Err is the cause. Optional.
	Err error
}

func (p *Problem) Error() string { return p.Message }

// Unwrap returns the cause.
func (p *Problem) Unwrap() error { return p.Err }

// Usage is the error for an invalid command line.
type Usage struct{ Message string }

func (u *Usage) Error() string { return u.Message }

// Failed is the code of an error without a gRPC code: a failure on the user's computer, such as a file that cannot be
// read, or an operation that has ended without success.
const Failed = "FAILED"

// New returns the report of err, which must not be nil.
func New(err error, f Facts) Report {
	var unreachableErr *dial.Unreachable
	var lost *dial.Unavailable
	var problem *Problem
	var usage *Usage
	var st interface{ GRPCStatus() *status.Status }
	switch {
	case errors.As(err, &usage):
		r := report(codes.InvalidArgument, usage.Message)
		if f.Command != "" {
			r.Hint = "run `" + f.Command + " --help`"
		}
		return r
	case errors.Is(err, context.Canceled):
		return interrupted(f)
	case errors.As(err, &problem):
		r := report(problem.Code, problem.Message)
		r.Hint, r.Details = problem.Hint, problem.Details
		if problem.Responded {
			r.RequestID = f.RequestID
		}
		return r
	case errors.As(err, &unreachableErr):
		return unreachable(unreachableErr, f)
	case errors.As(err, &lost):
		return unavailable(lost, f)
	case errors.As(err, &st):
		return ofStatus(err, st.GRPCStatus(), f)
	case errors.Is(err, context.DeadlineExceeded):
		return late(err.Error(), f)
	}
	return report(codes.OK, err.Error())
}

// report returns a Report without a hint. The first line of text is the message, the others are details.
func report(c codes.Code, text string) Report {
	r := Report{Code: code.Code(c).String(), Exit: exitCode(c)}
	if c == codes.OK {
		r.Code = Failed
	}
	r.Reason = r.Code
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	r.Message = lines[0]
	for _, line := range lines[1:] {
		if line != "" {
			r.Details = append(r.Details, line)
		}
	}
	return r
}

func interrupted(f Facts) Report {
	r := report(codes.Canceled, "interrupted")
	r.goesOn(f)
	return r
}

// goesOn adds what the control plane continues to do to the message, and the command that shows it as the hint.
func (r *Report) goesOn(f Facts) {
	if f.Ongoing.What == "" {
		return
	}
	r.Message += "; " + f.Ongoing.What
	if f.Ongoing.Look != "" {
		r.Hint = "`" + f.Ongoing.Look + "` shows how it goes on"
	}
}

// late returns the report for a deadline that has passed. The parameter message is the text of the error, which says
// what was not done if it is more than the text of context.DeadlineExceeded.
func late(message string, f Facts) Report {
	what := strings.TrimSuffix(strings.TrimSuffix(message, context.DeadlineExceeded.Error()), ": ")
	if f.Timeout > 0 {
		message = "not done within " + Duration(f.Timeout)
		if what != "" && what != message {
			message = what + ": " + message
		}
	}
	r := report(codes.DeadlineExceeded, message)
	r.Hint = "the call may still be carried out; --timeout sets a longer deadline"
	r.goesOn(f)
	return r
}

// Duration formats d without units that are 0, such as 30m for 30m0s.
func Duration(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

func unreachable(e *dial.Unreachable, f Facts) Report {
	if e.Late {
		return late("no control plane has answered: "+context.DeadlineExceeded.Error(), f)
	}
	rows := make([][2]string, len(e.Tried))
	for i, t := range e.Tried {
		rows[i] = [2]string{t.Endpoint, t.Why}
	}
	r := report(codes.Unavailable, "no control plane can be reached")
	r.Details = table(rows)
	r.Hint = "give an endpoint with --endpoint or TRIVET_ENDPOINT, and check that trivet-controlplane runs there"
	return r
}

func unavailable(e *dial.Unavailable, f Facts) Report {
	s := status.Convert(e.Err)
	r := ofStatus(e.Err, s, f)
	r.Message = e.Endpoint + ": " + s.Message()
	r.Hint = "try again in a moment; `trivet cluster status` shows which members are reachable"
	if e.Doubtful {
		r.Hint = "the call may have been carried out or not: check before you repeat it"
	}
	return r
}

// ofStatus returns the report of a gRPC status, which may come from a member or from the gRPC client itself. The
// parameter err is the error that contains s.
func ofStatus(err error, s *status.Status, f Facts) Report {
	info, field, request := details(s)
	text, what := s.Message(), ""
	if wrapped := err.Error(); !strings.HasPrefix(wrapped, rpcPrefix) {
		text = withoutRPC(wrapped)
		what = text
	}
	c := s.Code()
	if info.GetReason() == memberNotFound {
		c = codes.NotFound
	}
	r := report(c, text)
	r.RequestID = request
	if info.GetReason() != "" {
		r.Reason = info.GetReason()
	}
	if rest, ok := strings.CutPrefix(r.Message, "source_url: "); ok {
		r.Message = argument("source_url", f) + ": " + rest
	}
	switch s.Code() {
	case codes.Unauthenticated:
		if f.Source == "" && !f.LoggingIn {
			r.Message = "you are not logged in"
		}
		r.Hint = unauthenticated(f, info)
	case codes.PermissionDenied:
		r.Message, r.Hint = withCommand(flagNames(r.Message, "", f), f), denied(r.Reason)
	case codes.InvalidArgument, codes.OutOfRange:
		r.Message, r.Hint = flagNames(r.Message, field, f), fieldHint(field)
		if TenantMissing(err) && f.HasFlag != nil && f.HasFlag("all-projects") {
			r.Hint = "name one with --org and --project, or give --all-projects"
		}
	case codes.ResourceExhausted:
		if r.Reason == "NO_HOST_FITS" {
			r.Details = append(r.Details, refusals(r.Message, info)...)
		}
		if r.Reason == "QUOTA_EXCEEDED" {
			r.Message = quantities.Replace(r.Message)
		}
		r.Hint = hints[r.Reason]
	case codes.Internal:
		if info != nil {
			r.Hint = "this is a fault of the control plane: search its log for the request ID"
		}
	case codes.Unimplemented:
		if info == nil {
			r.Hint = "the endpoint does not know this call: it is not a Trivet control plane, or has another version"
		}
	case codes.DeadlineExceeded:
		if info == nil {
			r = late(what, f)
			r.RequestID = request
		} else {
			r.goesOn(f)
		}
	case codes.Canceled:
		return interrupted(f)
	case codes.Unavailable:
		r.Hint = "try again in a moment"
	case codes.Aborted:
		r.Hint = "try again"
	default:
		r.Hint = hints[r.Reason]
	}
	return r
}

// memberNotFound is the reason for a member that does not exist. Its code is FAILED_PRECONDITION, which is part of the wire
// contract of the key-value store; on the command line it is NOT_FOUND, as for all other objects.
const memberNotFound = "MEMBER_NOT_FOUND"

// quantities replaces the names of the fields of a quota in messages.
var quantities = strings.NewReplacer(" vcpus", " vCPUs", " memory_mib", " MiB of memory", " storage_gib", " GiB of storage", " vms", " VMs",
	" vpcs", " VPCs", " security_groups", " security groups", " floating_ips", " floating IPs", " service_ips", " service IPs",
	" volume_gib", " GiB of volumes", " image_mib", " MiB of images")

// deniedMethod matches the name of a method in a message that refuses a caller.
var deniedMethod = regexp.MustCompile(`\b(may not|cannot call) [A-Z][a-z]+[A-Z]\w*`)

// withCommand replaces the name of the method in a message that refuses a caller by the command.
func withCommand(message string, f Facts) string {
	if f.Command == "" {
		return message
	}
	return deniedMethod.ReplaceAllStringFunc(message, func(text string) string {
		before := text[:strings.LastIndexByte(text, ' ')]
		if before == "may not" {
			before = "may not run"
		} else {
			before = "cannot run"
		}
		return before + " `" + f.Command + "`"
	})
}

// rpcPrefix begins the text that grpc gives to a status.
const rpcPrefix = "rpc error: code = "

// withoutRPC removes what grpc puts before the message of a status, such as "rpc error: code = NotFound desc = ".
func withoutRPC(text string) string {
	before, after, found := strings.Cut(text, rpcPrefix)
	if !found {
		return text
	}
	_, message, _ := strings.Cut(after, " desc = ")
	return before + message
}

func details(s *status.Status) (info *errdetails.ErrorInfo, field, request string) {
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			info = d
		case *errdetails.RequestInfo:
			request = d.GetRequestId()
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				field = v.GetField()
			}
		}
	}
	return info, field, request
}
