package delay

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var limits = Limits{Burst: 10, Every: 20 * time.Millisecond, Longest: 2 * time.Second}

// newStopped returns an Answers whose clock does not advance, and a function that returns the delays since it was last
// called.
func newStopped() (*Answers, func() []time.Duration) {
	a := New(limits)
	at := time.Now()
	a.Now = func() time.Time { return at }
	var all []time.Duration
	a.Sleep = func(_ context.Context, d time.Duration) { all = append(all, d) }
	return a, func() []time.Duration {
		out := all
		all = nil
		return out
	}
}

// TestResponsesAboveTheRateAreDelayed sends more responses than Burst to one caller. Those above Burst must be delayed
// by one more interval each, and responses to another caller not at all.
func TestResponsesAboveTheRateAreDelayed(t *testing.T) {
	a, since := newStopped()
	for range limits.Burst {
		a.Wait(t.Context(), "a")
	}
	require.Empty(t, since())
	for range 3 {
		a.Wait(t.Context(), "a")
	}
	require.Equal(t, []time.Duration{limits.Every, 2 * limits.Every, 3 * limits.Every}, since())
	a.Wait(t.Context(), "b")
	require.Empty(t, since())
}

// TestAllow checks that calls above the rate of their caller are not allowed, that these calls do not count, and that
// other callers are not affected.
func TestAllow(t *testing.T) {
	a, _ := newStopped()
	at := a.Now()
	for range limits.Burst {
		require.True(t, a.Allow("a"))
	}
	for range 3 {
		require.False(t, a.Allow("a"))
	}
	require.True(t, a.Allow("b"))
	a.Now = func() time.Time { return at.Add(limits.Every) }
	require.True(t, a.Allow("a"))
	require.False(t, a.Allow("a"))
}

// TestDelayIsBounded checks that a delay is at most Longest, that responses above this limit do not extend later
// delays, and that a delay ends with the call's context.
func TestDelayIsBounded(t *testing.T) {
	a, since := newStopped()
	for range limits.Burst + 10*int(limits.Longest/limits.Every) {
		a.Wait(t.Context(), "a")
	}
	longest := time.Duration(0)
	for _, s := range since() {
		longest = max(longest, s)
	}
	require.Equal(t, limits.Longest, longest)
	later := a.Now().Add(limits.Longest + limits.Every)
	a.Now = func() time.Time { return later }
	a.Wait(t.Context(), "a")
	require.Empty(t, since(), "a response after the last delay has ended must not be delayed")

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	cancel()
	ended := make(chan struct{})
	go func() { defer close(ended); sleep(ctx, time.Hour) }()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("a call that has ended still waits")
	}
}

// TestDelayedResponsesAreBounded checks the limits of delayed responses, per caller and in total, and of the callers in
// memory. A caller with a delayed response must not be evicted.
func TestDelayedResponsesAreBounded(t *testing.T) {
	a, _ := newStopped()
	for n := range maxDelayed/maxDelayedOf + 1 {
		for range limits.Burst + 2*maxDelayedOf {
			a.take(fmt.Sprint("flood", n))
		}
		require.Equal(t, min((n+1)*maxDelayedOf, maxDelayed), a.delayed)
	}
	for n := range maxCallers + 100 {
		a.take(fmt.Sprint(n))
		require.LessOrEqual(t, len(a.callers), maxCallers)
	}
	for n := range maxDelayed / maxDelayedOf {
		require.Contains(t, a.callers, fmt.Sprint("flood", n))
	}
}
