package identity

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// After ten misses in a minute from one place a name's password is not tried from there, right or not; from elsewhere
// it is, other names are, and after the minute it is again.
func TestMissesEndTheTrying(t *testing.T) {
	w := newWorld(t)
	w.user("ada")
	w.user("bob")
	const here, there = "192.0.2.1:1000", "192.0.2.2:1000"
	try := func(name, from, with string) bool {
		u, err := w.first.proven(t.Context(), cloud.UserID(name), with, from)
		require.NoError(t, err)
		return u != nil
	}
	for i := range maxMisses {
		require.False(t, try("ada", fmt.Sprintf("192.0.2.1:%d", 2000+i), "guess"), "another port is the same place")
	}
	require.False(t, try("ada", here, password))
	require.True(t, try("ada", there, password))
	require.True(t, try("bob", here, password))
	w.wait(time.Minute)
	require.True(t, try("ada", here, password))
}

// Guesses that come together are not all tried: the count is asked again in each one's turn.
func TestMissesAtOnce(t *testing.T) {
	w := newWorld(t)
	w.user("ada")
	var wg sync.WaitGroup
	for range 4 * maxMisses {
		wg.Go(func() {
			u, err := w.first.proven(t.Context(), "ada", "guess", "192.0.2.1:1")
			require.NoError(t, err)
			require.Nil(t, u)
		})
	}
	wg.Wait()
	tried := w.first.misses.names[attempt{"ada", "192.0.2.1"}].n
	require.GreaterOrEqual(t, tried, maxMisses)
	require.Less(t, tried, maxMisses+maxHashing)
}

func TestTheThrottleIsBounded(t *testing.T) {
	th := throttle{names: map[attempt]*count{}}
	for i := range 3 * maxRemembers {
		th.miss(attempt{address: fmt.Sprint(i)}, int64(i))
		require.LessOrEqual(t, len(th.names), maxRemembers)
	}
	// What is over goes first.
	th = throttle{names: map[attempt]*count{}}
	th.miss(attempt{address: "old"}, 0)
	for i := range maxRemembers {
		th.miss(attempt{address: fmt.Sprint(i)}, missWindow)
	}
	require.Len(t, th.names, maxRemembers)
	require.NotContains(t, th.names, attempt{address: "old"})
}

// Whoever asks can make a member hash only so many passwords, and no queue grows.
func TestHashingIsBounded(t *testing.T) {
	s := newWorld(t).first
	for range maxQueue {
		s.queue <- struct{}{}
	}
	_, err := s.proven(t.Context(), "ada", password, "")
	require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
	for range maxQueue {
		<-s.queue
	}
	_, err = s.proven(t.Context(), "ada", password, "")
	require.NoError(t, err)
}

func TestNetwork(t *testing.T) {
	for in, want := range map[string]string{
		"192.0.2.1:80": "192.0.2.1", "[2001:db8:1:2:3::4]:80": "2001:db8:1:2::/64", "[2001:db8:1:2:9::9%eth0]:1": "2001:db8:1:2::/64",
		"[::ffff:192.0.2.1]:80": "192.0.2.1", "bufconn": "bufconn", "": "",
	} {
		require.Equal(t, want, network(in), in)
	}
}
