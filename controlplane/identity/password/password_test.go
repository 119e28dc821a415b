package password

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const right = "correct horse"

// door is a desk with a clock and a few names that have a password.
type door struct {
	t    *testing.T
	desk *Desk
	hash Hash
	at   atomic.Int64
}

func newDoor(t *testing.T) *door {
	d := &door{t: t, desk: NewDesk()}
	h, err := d.desk.Hash(t.Context(), right)
	require.NoError(t, err)
	d.hash = h
	return d
}

func (d *door) wait(w time.Duration) { d.at.Add(w.Milliseconds()) }

func (d *door) try(name, from, with string) bool {
	ok, err := d.attempt(name, from, with)
	require.NoError(d.t, err)
	return ok
}

func (d *door) attempt(name, from, with string) (bool, error) {
	now := func() cloud.Time { return d.at.Load() }
	return d.desk.Try(context.Background(), cloud.UserID(name), from, with, now, func() (*Hash, error) {
		if name == "nobody" {
			return nil, nil
		}
		return &d.hash, nil
	})
}

// Only the right password of a name that has one is right.
func TestTry(t *testing.T) {
	d := newDoor(t)
	require.True(t, d.try("ada", "a", right))
	require.False(t, d.try("ada", "b", right+"r"))
	require.False(t, d.try("ada", "c", ""))
	require.False(t, d.try("nobody", "d", right))
	require.False(t, d.try("ada", "e", string(make([]byte, Max+1))))
}

// A secret is compared whole, and its misses count like those of a password.
func TestTrySecret(t *testing.T) {
	d := NewDesk()
	require.True(t, d.TrySecret("TV1", "a", "s3cret", []byte("s3cret"), 0))
	require.False(t, d.TrySecret("TV1", "a", "", nil, 0), "no secret is no secret to know")
	for range MaxMisses {
		require.False(t, d.TrySecret("TV2", "a", "guess", []byte("s3cret"), 0))
	}
	require.False(t, d.TrySecret("TV2", "a", "s3cret", []byte("s3cret"), 0))
	require.True(t, d.TrySecret("TV2", "b", "s3cret", []byte("s3cret"), 0))
}

// A name that is not there costs a try what a name that is costs, so that nobody learns names by the clock.
func TestUnknownNamesAreTriedToo(t *testing.T) {
	h := newDoor(t).hash
	require.Equal(t, [2]uint32{h.Time, h.MemoryKiB}, [2]uint32{nobody.Time, nobody.MemoryKiB})
	require.Len(t, nobody.Sum, len(h.Sum))
}

// After ten misses in a minute from one place a name's password is not tried from there, right or not; from elsewhere
// it is, other names are, and after the minute it is again.
func TestMissesEndTheTrying(t *testing.T) {
	d := newDoor(t)
	const here, there = "192.0.2.1:1000", "192.0.2.2:1000"
	for i := range MaxMisses {
		require.False(t, d.try("ada", fmt.Sprintf("192.0.2.1:%d", 2000+i), "guess"), "another port is the same place")
	}
	require.False(t, d.try("ada", here, right))
	require.True(t, d.try("ada", there, right))
	require.True(t, d.try("bob", here, right))
	d.wait(time.Minute)
	require.True(t, d.try("ada", here, right))
}

// Guesses that come together are not all tried: the count is asked again in each one's turn.
func TestMissesAtOnce(t *testing.T) {
	d := newDoor(t)
	var wg sync.WaitGroup
	for range 4 * MaxMisses {
		wg.Go(func() {
			ok, err := d.attempt("ada", "192.0.2.1:1", "guess")
			require.NoError(t, err)
			require.False(t, ok)
		})
	}
	wg.Wait()
	tried := d.desk.misses.names[attempt{"ada", "192.0.2.1"}].n
	require.GreaterOrEqual(t, tried, MaxMisses)
	require.Less(t, tried, MaxMisses+maxHashing)
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
	d := newDoor(t)
	for range maxQueue {
		d.desk.queue <- struct{}{}
	}
	_, err := d.attempt("ada", "", right)
	require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
	for range maxQueue {
		<-d.desk.queue
	}
	require.True(t, d.try("ada", "", right))
}

func TestNetwork(t *testing.T) {
	for in, want := range map[string]string{
		"192.0.2.1:80": "192.0.2.1", "[2001:db8:1:2:3::4]:80": "2001:db8:1:2::/64", "[2001:db8:1:2:9::9%eth0]:1": "2001:db8:1:2::/64",
		"[::ffff:192.0.2.1]:80": "192.0.2.1", "bufconn": "bufconn", "": "",
	} {
		require.Equal(t, want, Network(in), in)
	}
}

// Who claims nothing takes nobody's turn and misses nothing; one network fills the desk for itself only.
func TestOneNetworkDoesNotShutOthersOut(t *testing.T) {
	d := newDoor(t)
	for range 2 * MaxMisses {
		require.False(t, d.try("ada", "192.0.2.1:1", ""))
	}
	require.True(t, d.try("ada", "192.0.2.1:1", right))
	for range maxShare {
		require.True(t, d.desk.share.enter("192.0.2.1"))
	}
	_, err := d.attempt("ada", "192.0.2.1:1", right)
	require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
	require.True(t, d.try("ada", "192.0.2.2:1", right))
	for range maxShare {
		d.desk.share.leave("192.0.2.1")
	}
	require.True(t, d.try("ada", "192.0.2.1:1", right))
	require.Empty(t, d.desk.share.at)
}
