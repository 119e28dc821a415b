package retry

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var errBusy = errors.New("busy")

// attempts calls Do with an operation that always fails. It returns the times of the operation's calls since the call
// of Do, and the error of Do.
func attempts(ctx context.Context, p Pauses) (at []time.Duration, err error) {
	begin := time.Now()
	err = Do(ctx, p, func() error {
		at = append(at, time.Since(begin))
		return errBusy
	})
	return at, err
}

func TestPausesDoubleUpToTheLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		at, err := attempts(ctx, Pauses{First: 10 * time.Millisecond, Last: 30 * time.Millisecond})
		require.Equal(t, []time.Duration{0, 10 * time.Millisecond, 30 * time.Millisecond, 60 * time.Millisecond, 90 * time.Millisecond}, at)
		require.ErrorIs(t, err, errBusy)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.EqualError(t, err, "busy: context deadline exceeded")
	})
}

func TestNoAttemptBeginsAfterWithin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		at, err := attempts(t.Context(), Pauses{First: 10 * time.Millisecond, Last: time.Second, Within: 35 * time.Millisecond})
		require.Equal(t, []time.Duration{0, 10 * time.Millisecond, 30 * time.Millisecond}, at)
		require.Equal(t, errBusy, err)
	})
}

func TestJitterIsBounded(t *testing.T) {
	pauses := Pauses{First: 100 * time.Millisecond, Last: 100 * time.Millisecond, Jitter: 0.2}.Start()
	different := map[time.Duration]bool{}
	for range 1000 {
		pause := pauses.NextBackOff()
		require.InDelta(t, 100, pause.Seconds()*1000, 20.001)
		different[pause] = true
	}
	require.Greater(t, len(different), 100)
}

func TestPermanentErrorEndsTheRetry(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	calls := 0
	err := Do(ctx, Pauses{First: time.Hour, Last: time.Hour}, func() error { calls++; return Permanent(errBusy) })
	require.Equal(t, errBusy, err, "a permanent error must be returned also if the context has ended")
	require.Equal(t, 1, calls)
	require.NoError(t, Do(ctx, Pauses{}, func() error { return Permanent(nil) }))
}
