package session

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/explain"
)

// each calls Each for the arguments and returns its error and what it has printed. timeout is the value of --timeout.
func each(t *testing.T, timeout, limit time.Duration, args []string, body func(ctx context.Context, arg string) error) (string, error) {
	var out bytes.Buffer
	s := &Session{Shell: Shell{Stderr: &out}, flags: flags{timeout: timeout}}
	err := s.Each(t.Context(), limit, args, body)
	return out.String(), err
}

// TestEachAfterTheDeadline checks that Each prints an error for each argument when the deadline of the command passes, also
// if a member reports it a moment before, and that the exit code is then that of a timeout.
func TestEachAfterTheDeadline(t *testing.T) {
	late := map[time.Duration]error{
		0:                    status.Error(codes.DeadlineExceeded, "context deadline exceeded"),
		time.Millisecond:     status.Error(codes.DeadlineExceeded, "context deadline exceeded"),
		2 * time.Millisecond: Errorf(codes.DeadlineExceeded, "", "c is still STOPPING"),
	}
	for early, lateErr := range late {
		synctest.Test(t, func(t *testing.T) {
			out, err := each(t, time.Minute, time.Hour, []string{"a", "b", "c", "d"}, func(ctx context.Context, arg string) error {
				switch arg {
				case "a":
					return errors.New("a is broken")
				case "b":
					return nil
				case "c":
					time.Sleep(time.Minute - early)
					return lateErr
				}
				t.Errorf("%s was attempted", arg)
				return nil
			})
			var coded *Coded
			require.ErrorAs(t, err, &coded)
			require.Equal(t, explain.ExitTimeout, coded.Code)
			require.True(t, strings.HasPrefix(out, "trivet: FAILED: a is broken\ntrivet: DEADLINE_EXCEEDED: c"), out)
			require.True(t, strings.HasSuffix(out, "\ntrivet: DEADLINE_EXCEEDED: d was not attempted: the deadline of the command had passed\n"), out)
		})
	}
}

// TestEachWithItsOwnDeadlines checks that without --timeout the deadline of one argument does not end the others, and that
// the exit code is that of the first failure.
func TestEachWithItsOwnDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var attempted []string
		out, err := each(t, 0, time.Minute, []string{"a", "b", "c"}, func(ctx context.Context, arg string) error {
			attempted = append(attempted, arg)
			switch arg {
			case "a":
				return NotFound("", "no VM named a")
			case "b":
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		})
		var coded *Coded
		require.ErrorAs(t, err, &coded)
		require.Equal(t, explain.ExitNotFound, coded.Code)
		require.Equal(t, []string{"a", "b", "c"}, attempted)
		require.Contains(t, out, "DEADLINE_EXCEEDED: b: not done within 1m")
	})
}
