package dial

import (
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Tried is an endpoint that could not be reached.
type Tried struct{ Endpoint, Why string }

// Unreachable says that no endpoint took the call: nothing was sent.
type Unreachable struct{ Tried []Tried }

func (e *Unreachable) Error() string {
	each := make([]string, len(e.Tried))
	for i, t := range e.Tried {
		each[i] = t.Endpoint + ": " + t.Why
	}
	return "no endpoint can be reached: " + strings.Join(each, "; ")
}

// GRPCStatus makes it UNAVAILABLE.
func (e *Unreachable) GRPCStatus() *status.Status { return status.New(codes.Unavailable, e.Error()) }

// Unavailable says that an endpoint answered UNAVAILABLE, or was lost before it answered.
type Unavailable struct {
	Endpoint string
	// Doubtful is set where the call may have been carried out, and it matters whether it was.
	Doubtful bool
	Err      error
}

func (e *Unavailable) Error() string {
	return fmt.Sprintf("%s: %s", e.Endpoint, status.Convert(e.Err).Message())
}

// Unwrap gives the status.
func (e *Unavailable) Unwrap() error { return e.Err }
