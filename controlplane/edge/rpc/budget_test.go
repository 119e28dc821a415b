package rpc

import (
	"context"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// reserved is the result of a reservation in another goroutine.
type reserved struct {
	release func()
	err     error
}

// waits starts a reservation and returns once it waits.
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

// ended returns the result of a reservation that no longer waits.
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

// reserveNow returns a reservation, which must be made or refused without waiting.
func reserveNow(t *testing.T, b *budget, bytes int) (release func(), ok bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	release, err := b.reserve(ctx, netip.Addr{}, "", bytes)
	return release, err == nil
}

// A small message that fits does not wait behind a large one that does not fit. The large one is passed a bounded
// number of times; then later messages wait until it has its bytes.
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

// When the call of a large message that may not be passed any more ends, the messages behind it get their bytes at
// once.
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
