package lessor

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const s = time.Second

func TestLeaseExpiresAfterTTL(t *testing.T) {
	l := New(nil, 10*s)
	l.Add(Lease{ID: 1, TTL: 5}, 10*s)
	require.Empty(t, l.Expired(14*s, 10))
	left, lease, ok := l.Remaining(1, 12*s)
	require.True(t, ok)
	require.Equal(t, 3*s, left)
	require.EqualValues(t, 5, lease.TTL)
	at, ok := l.Next()
	require.True(t, ok)
	require.Equal(t, 15*s, at)
	require.Equal(t, []int64{1}, l.Expired(15*s, 10))

	// Expired returns the lease again only after retryAfter.
	require.Empty(t, l.Expired(17*s, 10))
	require.Equal(t, []int64{1}, l.Expired(18*s, 10))
	l.Remove(1)
	require.Empty(t, l.Expired(30*s, 10))
	_, ok = l.Next()
	require.False(t, ok)
}

func TestRenewRestartsTTL(t *testing.T) {
	l := New([]Lease{{ID: 1, TTL: 5}}, 0)
	ttl, removed, ok := l.Renew(1, 4*s)
	require.True(t, ok)
	require.Nil(t, removed)
	require.EqualValues(t, 5, ttl)
	require.Empty(t, l.Expired(8*s, 10))
	require.Equal(t, []int64{1}, l.Expired(9*s, 10))
}

func TestRenewOfExpiredLease(t *testing.T) {
	l := New([]Lease{{ID: 1, TTL: 5}}, 0)
	_, removed, ok := l.Renew(1, 5*s) // expired, but not removed
	require.True(t, ok)
	require.NotNil(t, removed)
	select {
	case <-removed:
		t.Fatal("the lease was not removed yet")
	default:
	}
	l.Remove(1)
	<-removed
	_, _, ok = l.Renew(1, 6*s)
	require.False(t, ok)
}

func TestCloseEndsWaitingRenewals(t *testing.T) {
	l := New([]Lease{{ID: 1, TTL: 1}}, 0)
	_, removed, _ := l.Renew(1, 2*s)
	l.Close()
	<-removed
	require.Zero(t, l.Len())
}

// TestNewRestartsTTLs checks that the leases passed to New expire one full TTL later.
func TestNewRestartsTTLs(t *testing.T) {
	l := New([]Lease{{ID: 1, TTL: 60}, {ID: 2, TTL: 5}}, 100*s)
	require.Equal(t, []int64{2, 1}, l.IDsByExpiry())
	require.Empty(t, l.Expired(104*s, 10))
	require.Equal(t, []int64{2}, l.Expired(105*s, 10))
	l.Remove(2)
	require.Equal(t, []int64{1}, l.Expired(160*s, 10))
}

// TestNewSpreadsExpiries checks that leases with the same TTL do not all expire in the same second after New.
func TestNewSpreadsExpiries(t *testing.T) {
	var all []Lease
	for id := range int64(3000) {
		all = append(all, Lease{ID: id + 1, TTL: 10})
	}
	l := New(all, 0)
	ended := map[time.Duration]int{}
	for at := 10 * s; l.Len() > 0; at += s {
		for _, id := range l.Expired(at, 5000) {
			l.Remove(id)
			ended[at]++
		}
		require.Less(t, at, 20*s)
	}
	require.Equal(t, map[time.Duration]int{10 * s: 750, 11 * s: 750, 12 * s: 750, 13 * s: 750}, ended)
}

func TestExpiredIsRateLimited(t *testing.T) {
	l := New(nil, 0)
	for id := range int64(2500) {
		l.Add(Lease{ID: id + 1, TTL: 1}, 0)
	}
	require.Len(t, l.Expired(s, 600), 600)
	require.Len(t, l.Expired(s, 600), RevokesPerSecond-600)
	require.Empty(t, l.Expired(s+s/2, 600))
	at, ok := l.Next()
	require.True(t, ok)
	require.Equal(t, 2*s, at, "Expired returns no lease before the next second")
	require.Len(t, l.Expired(2*s, 5000), RevokesPerSecond)
}

func TestLongestTTLDoesNotOverflow(t *testing.T) {
	l := New([]Lease{{ID: 1, TTL: MaxTTL * 100}}, 1000*s)
	require.Empty(t, l.Expired(1<<62, 1))
	_, removed, ok := l.Renew(1, 1<<62)
	require.True(t, ok)
	require.Nil(t, removed)
}
