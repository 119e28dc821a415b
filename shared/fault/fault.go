// Package fault is the one error that a caller may read.
//
// A Fault is made where the fact is known, says what to do about it, and carries a Kind. Everything else that travels as
// an error is ours: it is logged once at the edge with the request id and shown as INTERNAL. The table in table.go is the
// only place where a Kind becomes an RPC code, a REST code or an HTTP status. It knows no transport but the codes' names.
package fault

import (
	"errors"
	"fmt"
	"maps"
	"time"
)

// Kind says what sort of failure it is. The zero Kind is Internal.
type Kind uint8

const (
	Internal Kind = iota
	InvalidArgument
	Unauthenticated
	PermissionDenied
	NotFound
	AlreadyExists
	ResourceExhausted
	FailedPrecondition
	Aborted
	OutOfRange
	Unimplemented
	Unavailable
	DeadlineExceeded
	Canceled
	// TooLarge is a body or message over its limit: INVALID_ARGUMENT with its own HTTP status, 413.
	TooLarge
	// MethodNotAllowed is a known path asked in a wrong way: INVALID_ARGUMENT with its own HTTP status, 405.
	MethodNotAllowed
	// BadGateway is a call that was handed on to another member and broke on the way there or back.
	BadGateway
	// Throttled refuses a call because of load, not its arguments: the caller's budget is used up, or a member's disk
	// is nearly full. It is RESOURCE_EXHAUSTED with HTTP status 429 on every service.
	Throttled
	kinds
)

// Fault is an error for the caller. Message is one sentence for a person; Reason, when set, is a constant for a program
// (UPPER_SNAKE, as in google.rpc.ErrorInfo); Field names the offending request field; Details are for both.
type Fault struct {
	Kind    Kind
	Message string
	Reason  string
	Field   string
	Details map[string]any
	// Retry tells that the same call may succeed soon.
	Retry bool
	// RetryAfter is how long to wait before that; 0 is a second.
	RetryAfter time.Duration `cbor:",omitempty"`

	cause error
}

// New makes a Fault with a formatted message.
func New(kind Kind, format string, args ...any) *Fault {
	return &Fault{Kind: kind, Message: fmt.Sprintf(format, args...)}
}

// Invalid is an InvalidArgument about one field of the request.
func Invalid(field, format string, args ...any) *Fault {
	f := New(InvalidArgument, format, args...)
	f.Field = field
	f.Message = field + ": " + f.Message
	return f
}

func (f *Fault) Error() string { return f.Message }

// Unwrap gives the cause, which the caller never sees.
func (f *Fault) Unwrap() error { return f.cause }

// Because keeps err as the cause, for the log.
func (f *Fault) Because(err error) *Fault { f.cause = err; return f }

// WithReason sets the program-readable reason.
func (f *Fault) WithReason(reason string) *Fault { f.Reason = reason; return f }

// With adds one detail.
func (f *Fault) With(key string, value any) *Fault {
	f.Details = maps.Clone(f.Details)
	if f.Details == nil {
		f.Details = map[string]any{}
	}
	f.Details[key] = value
	return f
}

// MayRetry marks a failure that the same call may not meet again soon.
func (f *Fault) MayRetry() *Fault { f.Retry = true; return f }

// MayRetryAfter is MayRetry with a retry delay.
func (f *Fault) MayRetryAfter(wait time.Duration) *Fault {
	f.Retry, f.RetryAfter = true, wait
	return f
}

// RetryDelay returns how long the caller should wait before the same call may succeed, in whole seconds, at least one.
func (f *Fault) RetryDelay() time.Duration {
	return max((f.RetryAfter + time.Second - 1).Truncate(time.Second), time.Second)
}

// From finds the Fault in err's chain.
func From(err error) (*Fault, bool) {
	var f *Fault
	ok := errors.As(err, &f)
	return f, ok
}

// Is reports whether err is a Fault of this kind.
func Is(err error, kind Kind) bool {
	f, ok := From(err)
	return ok && f.Kind == kind
}
