package fault

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
)

// TestNoEmptyCell checks that every kind has a gRPC code, and a REST code and an HTTP status for every service. An
// error without a code would be sent otherwise.
func TestNoEmptyCell(t *testing.T) {
	for k := Internal; k < kinds; k++ {
		require.NotEqual(t, codes.OK, k.RPC(), "kind %d has no RPC code", k)
		for s := range services {
			shape := k.REST(s)
			require.NotEmpty(t, shape.Code, "kind %d, service %d", k, s)
			require.GreaterOrEqual(t, shape.Status, 400, "kind %d, service %d", k, s)
		}
	}
}

// TestVMColumn compares the table with the codes of the wire contract for the VM controller's REST API (docs/api.md).
func TestVMColumn(t *testing.T) {
	want := map[codes.Code]Shape{
		codes.Unauthenticated:    {"UNAUTHENTICATED", 401},
		codes.PermissionDenied:   {"FORBIDDEN", 403},
		codes.InvalidArgument:    {"INVALID_ARGUMENT", 400},
		codes.NotFound:           {"NOT_FOUND", 404},
		codes.AlreadyExists:      {"ALREADY_EXISTS", 409},
		codes.ResourceExhausted:  {"RESOURCE_EXHAUSTED", 429},
		codes.FailedPrecondition: {"FAILED_PRECONDITION", 422},
	}
	for c := codes.Canceled; c <= codes.Unauthenticated; c++ {
		shape, listed := want[c]
		if !listed {
			shape = Shape{"INTERNAL", 500}
		}
		require.Equal(t, shape, FromRPC(c).REST(VM), "code %v", c)
	}
}

// TestCreditColumn compares the table with the codes of the wire contract for the credit service's REST API
// (docs/api.md). All other kinds must be INTERNAL, because each operation sets its own code for them.
func TestCreditColumn(t *testing.T) {
	want := map[Kind]Shape{
		Unauthenticated: {"UNAUTHENTICATED", 401}, PermissionDenied: {"FORBIDDEN", 403}, InvalidArgument: {"INVALID_ARGUMENT", 400},
		NotFound: {"NOT_FOUND", 404}, TooLarge: {"INVALID_ARGUMENT", 413}, MethodNotAllowed: {"INVALID_ARGUMENT", 405},
		Throttled: {"RESOURCE_EXHAUSTED", 429},
	}
	for k := Internal; k < kinds; k++ {
		shape, listed := want[k]
		if !listed {
			shape = Shape{"INTERNAL", 500}
		}
		require.Equal(t, shape, k.REST(Credit), "kind %d", k)
	}
}

func TestFaultIsFoundThroughWrapping(t *testing.T) {
	cause := errors.New("disk on fire")
	err := fmt.Errorf("create vm: %w", New(ResourceExhausted, "no host fits").With("n1", "memory").Because(cause))
	f, ok := From(err)
	require.True(t, ok)
	require.Equal(t, "no host fits", f.Message)
	require.Equal(t, map[string]any{"n1": "memory"}, f.Details)
	require.ErrorIs(t, err, cause)
	require.True(t, Is(err, ResourceExhausted))
	require.False(t, Is(cause, ResourceExhausted))
}

func TestInvalidNamesItsField(t *testing.T) {
	f := Invalid("spec.cpu.vcpus", "must be 1 to 288, got %d", 0)
	require.Equal(t, "spec.cpu.vcpus: must be 1 to 288, got 0", f.Error())
	require.Equal(t, "spec.cpu.vcpus", f.Field)
}

// TestRetryDelay checks that the delay is rounded up to whole seconds. A repeated call after a shorter delay would be
// refused again.
func TestRetryDelay(t *testing.T) {
	for wait, want := range map[time.Duration]time.Duration{
		0: time.Second, time.Millisecond: time.Second, time.Second: time.Second, 1001 * time.Millisecond: 2 * time.Second, 31900 * time.Millisecond: 32 * time.Second,
	} {
		f := New(Throttled, "wait").MayRetryAfter(wait)
		require.True(t, f.Retry)
		require.Equal(t, want, f.RetryDelay(), "%s", wait)
	}
}
