package dial

import (
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Tried is an endpoint that could not be reached, with the reason.
type Tried struct{ Endpoint, Why string }

// Unreachable is the error for a call that was not sent, because no endpoint can be reached. Tried lists all endpoints
// that were tried.
type Unreachable struct {
	Tried []Tried
	// Late is true if the deadline of the call passed before an endpoint could be tried to the end.
	Late bool
}

func (e *Unreachable) Error() string {
	each := make([]string, len(e.Tried))
	for i, t := range e.Tried {
		each[i] = t.Endpoint + ": " + t.Why
	}
	return "no endpoint can be reached: " + strings.Join(each, "; ")
}

// GRPCStatus returns a status with the code UNAVAILABLE, so that status.Code works with this error.
func (e *Unreachable) GRPCStatus() *status.Status { return status.New(codes.Unavailable, e.Error()) }

// Unavailable is the error for a call to which an endpoint returned UNAVAILABLE, or whose connection broke before the
// response.
type Unavailable struct {
	Endpoint string
	// Doubtful is set if the call may have been executed and is not safe to repeat.
	Doubtful bool
	Err      error
}

func (e *Unavailable) Error() string {
	return fmt.Sprintf("%s: %s", e.Endpoint, status.Convert(e.Err).Message())
}

// Unwrap returns the gRPC status error of the call.
func (e *Unavailable) Unwrap() error { return e.Err }
