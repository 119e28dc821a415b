package image

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestBackgroundJobs checks that each job runs once at a time, that the number of concurrent jobs is limited, that a
// failed job pauses before it runs again, and that close waits for running jobs.
func TestBackgroundJobs(t *testing.T) {
	woken := make(chan struct{}, 100)
	var failed []string
	e := newBackgroundJobs(func() { woken <- struct{}{} }, func(name string, _ error) { failed = append(failed, name) })
	slots, gate := make(chan struct{}, 2), make(chan struct{})
	wait := func(context.Context) error { <-gate; return nil }
	require.False(t, e.start("early", slots, wait), "nothing runs before Run")
	ctx, cancel := context.WithCancel(t.Context())
	e.open(ctx)
	require.True(t, e.start("a", slots, wait))
	require.False(t, e.start("a", slots, wait), "one run of a job at a time")
	require.True(t, e.start("b", slots, wait))
	require.False(t, e.start("c", slots, wait), "two at a time")
	close(gate)
	<-woken
	<-woken
	require.True(t, e.start("c", slots, func(context.Context) error { return errors.New("no") }))
	<-woken
	require.Equal(t, []string{"c"}, failed)
	require.False(t, e.start("c", slots, wait), "the job is paused")
	for times, rest := range []time.Duration{2 * minBackoff, 4 * minBackoff, 8 * minBackoff, 16 * minBackoff, 32 * minBackoff, maxBackoff, maxBackoff} {
		now := time.Now()
		e.recordResult("c", errors.New("no"), now)
		require.Equal(t, rest, e.failed["c"].until.Sub(now), times)
	}
	e.recordResult("c", nil, time.Now())
	ended := false
	require.True(t, e.start("c", slots, func(ctx context.Context) error {
		<-ctx.Done()
		for range 1000 {
			runtime.Gosched()
		}
		ended = true
		return ctx.Err()
	}))
	cancel()
	e.close()
	require.True(t, ended, "close waits")
	require.Equal(t, []string{"c"}, failed, "being stopped is no failure")
	require.False(t, e.start("late", slots, wait))
}
