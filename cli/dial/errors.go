package dial

import (
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Tried is an endpoint that could not be reached, with the reason.
type Tried struct{ Endpoint, Why string }

// Unreachable is the error if no endpoint can be reached. Nothing was sent.
type Unreachable struct{ Tried []Tried }

func (e *Unreachable) Error() string {
	each := make([]string, len(e.Tried))
	for i, t := range e.Tried {
		each[i] = t.Endpoint + ": " + t.Why
	}
	return "no endpoint can be reached: " + strings.Join(each, "; ")
}

// GRPCStatus returns UNAVAILABLE.
func (e *Unreachable) GRPCStatus() *status.Status { return status.New(codes.Unavailable, e.Error()) }

// Unavailable is the error if an endpoint returned UNAVAILABLE, or the connection broke before the response.
type Unavailable struct {
	Endpoint string
	// Doubtful is set if the call may have been executed and must not be repeated without checking.
	Doubtful bool
	Err      error
}

func (e *Unavailable) Error() string {
	return fmt.Sprintf("%s: %s", e.Endpoint, status.Convert(e.Err).Message())
}

// Unwrap returns the gRPC status error.
func (e *Unavailable) Unwrap() error { return e.Err }
