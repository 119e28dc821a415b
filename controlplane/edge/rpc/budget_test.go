package rpc

import (
	"context"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// reserved holds the results of a call of reserve in another goroutine.
type reserved struct {
	release func()
	err     error
}

// waits starts a goroutine that calls reserve, and returns when that call waits for bytes. The channel receives the
// result.
func (b *budget) waits(t *testing.T, ctx context.Context, bytes int) <-chan reserved {
	t.Helper()
	length := func() int {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.queue)
	}
	before, out := length(), make(chan reserved, 1)
	go func() {
		release, err := b.reserve(ctx, netip.Addr{}, "", bytes)
		out <- reserved{release, err}
	}()
	require.Eventually(t, func() bool { return length() == before+1 }, patience, time.Millisecond)
	return out
}

// ended waits for the result of a reservation that waits started, and fails the test if it does not arrive within
// patience.
func ended(t *testing.T, r <-chan reserved) reserved {
	t.Helper()
	select {
	case got := <-r:
		return got
	case <-time.After(patience):
		require.Fail(t, "the reservation still waits")
		return reserved{}
	}
}

// reserveNow makes a reservation with a timeout of 20 ms. ok is false if it was refused or had to wait longer.
func reserveNow(t *testing.T, b *budget, bytes int) (release func(), ok bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	release, err := b.reserve(ctx, netip.Addr{}, "", bytes)
	return release, err == nil
}

// TestSmallMessagesPassALargeOne lets a large message wait for bytes. Small messages that fit must be served before it,
// but only maxPasses times; then later ones must wait until the large one has its bytes.
func TestSmallMessagesPassALargeOne(t *testing.T) {
	b := newBudget(1, 1, math.MaxInt)
	first, ok := reserveNow(t, b, maxLarge-MaxMessage+1)
	require.True(t, ok)
	large := b.waits(t, t.Context(), MaxMessage)
	for n := range maxPasses {
		release, ok := reserveNow(t, b, small+1)
		require.True(t, ok, "message %d fits", n)
		release()
	}
	_, ok = reserveNow(t, b, small+1)
	require.False(t, ok, "one message more would delay the large one")
	later := b.waits(t, t.Context(), small+1)
	first()
	got := ended(t, large)
	require.NoError(t, got.err)
	next := ended(t, later)
	require.NoError(t, next.err)
	got.release()
	next.release()
	require.True(t, b.idle())
}

// TestCanceledReservationAdmitsTheNext lets a large message block those behind it. When its call ends, the next message
// must get its bytes at once.
func TestCanceledReservationAdmitsTheNext(t *testing.T) {
	b := newBudget(1, 1, math.MaxInt)
	first, ok := reserveNow(t, b, maxLarge-1000)
	require.True(t, ok)
	ctx, cancel := context.WithCancel(t.Context())
	large := b.waits(t, ctx, MaxMessage)
	b.mu.Lock()
	b.queue[0].passes = maxPasses
	b.mu.Unlock()
	later := b.waits(t, t.Context(), 1000)
	cancel()
	require.ErrorContains(t, ended(t, large).err, "bytes of unfinished messages")
	next := ended(t, later)
	require.NoError(t, next.err)
	next.release()
	first()
	require.True(t, b.idle())
}
