// Package fault defines Fault, the only error type whose message is shown to the caller of an RPC.
//
// Code that detects a failure creates a Fault with a Kind and a message that tells the caller what to do. Any other
// error is internal: the API server logs it once, with the request ID, and returns INTERNAL. The table in table.go is
// the only place that maps a Kind to an RPC code, a REST code and an HTTP status. The package depends on no transport,
// except for those codes.
package fault

import (
	"errors"
	"fmt"
	"maps"
	"time"
)

// Kind classifies a Fault. The zero Kind is Internal.
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
	// TooLarge reports a body or message that exceeds its size limit. It is INVALID_ARGUMENT, but with HTTP status 413.
	TooLarge
	// MethodNotAllowed reports an HTTP method that the path does not support. It is INVALID_ARGUMENT, but with HTTP
	// status 405.
	MethodNotAllowed
	// BadGateway reports that this member could not forward a request to another member, or did not receive the
	// response.
	BadGateway
	// Throttled reports that a call was rejected because of load, not because of its arguments: the caller's budget is
	// used up, or a member's disk is nearly full. It is RESOURCE_EXHAUSTED, and has HTTP status 429 on every service.
	Throttled
	kinds
)

// Fault is an error that is returned to the caller of an RPC. Message is one sentence for a person. Reason is an
// optional constant for programs (UPPER_SNAKE, as in google.rpc.ErrorInfo). Field names the invalid request field.
// Details holds further values, for persons and programs.
type Fault struct {
	Kind    Kind
	Message string
	Reason  string
	Field   string
	Details map[string]any
	// Retry is true if the same call may succeed soon.
	Retry bool
	// RetryAfter is how long the caller should wait before the retry; 0 means one second.
	RetryAfter time.Duration `cbor:",omitempty"`

	cause error
}

// New returns a Fault with a kind and a message formatted as by fmt.Sprintf.
func New(kind Kind, format string, args ...any) *Fault {
	return &Fault{Kind: kind, Message: fmt.Sprintf(format, args...)}
}

// Invalid returns an InvalidArgument fault about one field of the request. The message begins with the field's name.
func Invalid(field, format string, args ...any) *Fault {
	f := New(InvalidArgument, format, args...)
	f.Field = field
	f.Message = field + ": " + f.Message
	return f
}

func (f *Fault) Error() string { return f.Message }

// Unwrap returns the cause, which is not sent to the caller.
func (f *Fault) Unwrap() error { return f.cause }

// Because sets err as the cause of f, which is logged and not sent to the caller. It returns f.
func (f *Fault) Because(err error) *Fault { f.cause = err; return f }

// WithReason sets the field Reason, a constant for programs, and returns f.
func (f *Fault) WithReason(reason string) *Fault { f.Reason = reason; return f }

// With adds one entry to Details and returns f.
func (f *Fault) With(key string, value any) *Fault {
	f.Details = maps.Clone(f.Details)
	if f.Details == nil {
		f.Details = map[string]any{}
	}
	f.Details[key] = value
	return f
}

// MayRetry sets the field Retry, which means that the same call may succeed soon, and returns f.
func (f *Fault) MayRetry() *Fault { f.Retry = true; return f }

// MayRetryAfter is like MayRetry, and also sets how long the caller should wait before the retry.
func (f *Fault) MayRetryAfter(wait time.Duration) *Fault {
	f.Retry, f.RetryAfter = true, wait
	return f
}

// RetryDelay returns how long the caller should wait before the retry, in whole seconds and at least one second.
func (f *Fault) RetryDelay() time.Duration {
	return max((f.RetryAfter + time.Second - 1).Truncate(time.Second), time.Second)
}

// From returns the first Fault in err's chain, if there is one.
func From(err error) (*Fault, bool) {
	var f *Fault
	ok := errors.As(err, &f)
	return f, ok
}

// Is reports whether the first Fault in err's chain is of this kind.
func Is(err error, kind Kind) bool {
	f, ok := From(err)
	return ok && f.Kind == kind
}
