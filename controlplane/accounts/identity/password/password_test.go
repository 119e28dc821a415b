package password

import (
	"context"
	"crypto/sha256"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

const right = "correct horse"

// fixture is a Hasher with a clock at `at`, in Unix milliseconds, and a few names that have the password right.
type fixture struct {
	t      *testing.T
	hasher *Hasher
	hash   Hash
	at     atomic.Int64
	// networks holds the networks of earlier logins, by name.
	networks map[string][]string
}

// quick is a fast replacement for argon2id, for tests that do not depend on the hash function.
func quick(h *Hash, password string) []byte {
	sum := sha256.Sum256(append(slices.Clone(h.Salt), password...))
	return sum[:]
}

func newFixture(t *testing.T) *fixture { return newFixtureWith(t, quick) }

func newFixtureWith(t *testing.T, sum func(*Hash, string) []byte) *fixture {
	d := &fixture{t: t, hasher: NewHasher(runtime.GOMAXPROCS(0))}
	d.hasher.sum = sum
	h, err := d.hasher.Hash(t.Context(), "ada", right)
	require.NoError(t, err)
	d.hash = h
	return d
}

func (d *fixture) wait(w time.Duration) { d.at.Add(w.Milliseconds()) }

func (d *fixture) try(name, from, with string) bool {
	ok, err := d.attempt(name, from, with)
	require.NoError(d.t, err)
	return ok
}

func (d *fixture) attempt(name, from, with string) (bool, error) {
	now := func() cloud.Time { return d.at.Load() }
	return d.hasher.Try(context.Background(), cloud.UserID(name), from, with, now, func() (Account, error) {
		if name == "nobody" {
			return Account{}, nil
		}
		return Account{Hash: &d.hash, Networks: d.networks[name]}, nil
	})
}

// TestTry checks that Try accepts only the correct password of a name that has one.
func TestTry(t *testing.T) {
	d := newFixtureWith(t, (*Hash).sum)
	require.True(t, d.try("ada", "a", right))
	require.False(t, d.try("ada", "b", right+"r"))
	require.False(t, d.try("ada", "c", ""))
	require.False(t, d.try("nobody", "d", right))
	require.False(t, d.try("ada", "e", string(make([]byte, Max+1))))
}

// TestTrySecret checks that TrySecret accepts only the equal, non-empty secret, and refuses every secret from a network
// after MaxMisses wrong ones.
func TestTrySecret(t *testing.T) {
	d := NewHasher(runtime.GOMAXPROCS(0))
	require.True(t, d.TrySecret("TV1", "a", "s3cret", []byte("s3cret"), 0))
	require.False(t, d.TrySecret("TV1", "a", "", nil, 0), "the empty secret must be refused even if none is stored")
	for range MaxMisses {
		require.False(t, d.TrySecret("TV2", "a", "guess", []byte("s3cret"), 0))
	}
	require.False(t, d.TrySecret("TV2", "a", "s3cret", []byte("s3cret"), 0))
	require.True(t, d.TrySecret("TV2", "b", "s3cret", []byte("s3cret"), 0))
}

// TestUnknownNamesTakeTheSameTime checks that the hash for unknown names has the same parameters and length as a stored
// hash, so that the response time does not reveal whether a name exists.
func TestUnknownNamesTakeTheSameTime(t *testing.T) {
	h := newFixtureWith(t, (*Hash).sum).hash
	require.Equal(t, [2]uint32{h.Time, h.MemoryKiB}, [2]uint32{nobody.Time, nobody.MemoryKiB})
	require.Len(t, nobody.Sum, len(h.Sum))
}

// TestMissesAreLimitedPerNetwork checks that after MaxMisses (10) wrong passwords for a name from one network within a
// minute, even the correct password from there is refused. Other networks and names must not be affected, and after the
// minute passwords are checked again.
func TestMissesAreLimitedPerNetwork(t *testing.T) {
	d := newFixture(t)
	const here, there = "192.0.2.1:1000", "192.0.2.2:1000"
	for i := range MaxMisses {
		require.False(t, d.try("ada", fmt.Sprintf("192.0.2.1:%d", 2000+i), "guess"), "a wrong password must be refused, from any port of the address")
	}
	require.False(t, d.try("ada", here, right))
	require.True(t, d.try("ada", there, right))
	require.True(t, d.try("bob", here, right))
	d.wait(time.Minute)
	require.True(t, d.try("ada", here, right))
}

// TestConcurrentMissesAreLimited checks that of many concurrent wrong passwords only MaxMisses are hashed, because each
// request is checked again against the limit when it gets a slot.
func TestConcurrentMissesAreLimited(t *testing.T) {
	d := newFixture(t)
	var hashed atomic.Int64
	d.hasher.sum = func(h *Hash, password string) []byte { hashed.Add(1); return quick(h, password) }
	var wg sync.WaitGroup
	for range maxShare {
		wg.Go(func() {
			ok, err := d.attempt("ada", "192.0.2.1:1", "guess")
			require.NoError(t, err)
			require.False(t, ok)
		})
	}
	wg.Wait()
	require.GreaterOrEqual(t, int(hashed.Load()), MaxMisses)
	require.Less(t, int(hashed.Load()), MaxMisses+max(1, runtime.GOMAXPROCS(0)/4))
}

// TestMissesAreLimitedPerName checks that after MaxNameMisses wrong passwords for a name from many networks within an
// hour, passwords from new networks are refused. From a network of an earlier login only the limit of that network may
// apply.
func TestMissesAreLimitedPerName(t *testing.T) {
	d := newFixture(t)
	d.networks = map[string][]string{"ada": {"198.51.100.7"}}
	hashed := 0
	d.hasher.sum = func(h *Hash, password string) []byte {
		hashed++
		if password == right {
			return h.Sum
		}
		return make([]byte, 32)
	}
	for n := range 100 {
		for range 3 {
			require.False(t, d.try("ada", fmt.Sprintf("192.0.2.%d:1", n), "guess"))
			require.False(t, d.try("nobody", fmt.Sprintf("192.0.2.%d:1", n), "guess"))
		}
	}
	require.Equal(t, 2*MaxNameMisses, hashed, "as many passwords must be hashed for a name that does not exist")
	require.False(t, d.try("ada", "203.0.113.5:1", right), "the correct password from a new network must be refused")
	require.True(t, d.try("bob", "203.0.113.5:1", right))
	require.True(t, d.try("ada", "198.51.100.7:1", right))
	for range MaxMisses {
		require.False(t, d.try("ada", "198.51.100.7:1", "guess"))
	}
	require.False(t, d.try("ada", "198.51.100.7:1", right), "the limit of the network itself must apply")
	d.wait(time.Hour)
	require.True(t, d.try("ada", "203.0.113.5:1", right))
}

// TestMissesForOtherNamesEvictNoName checks that wrong passwords for many other names do not evict the count of wrong
// passwords for one name.
func TestMissesForOtherNamesEvictNoName(t *testing.T) {
	th := newThrottle[attempt](MaxMisses, missWindow)
	ada := attempt{"ada", "192.0.2.1"}
	for range MaxMisses {
		th.miss(ada, 0)
	}
	for i := range 3 * maxRemembers {
		th.miss(attempt{cloud.UserID(fmt.Sprint(i)), "192.0.2.1"}, 1)
		require.LessOrEqual(t, len(th.counts), maxRemembers)
	}
	require.False(t, th.allow(ada, missWindow-1))
	require.True(t, th.allow(ada, missWindow))
	// Expired windows are evicted before recent misses.
	over := newThrottle[string](MaxMisses, missWindow)
	for i := range maxRemembers {
		over.miss(fmt.Sprint(i), 0)
		over.miss(fmt.Sprint(i), 0)
	}
	for i := range evictSample {
		over.miss(fmt.Sprint("new", i), missWindow)
	}
	for i := range evictSample {
		require.True(t, over.counts[fmt.Sprint("new", i)] != nil)
	}
}

// TestSecretsAreCountedApart checks that wrong secrets of service accounts do not evict the counts of wrong passwords.
func TestSecretsAreCountedApart(t *testing.T) {
	d := newFixture(t)
	for range MaxMisses {
		require.False(t, d.try("ada", "192.0.2.1:1", "guess"))
	}
	for i := range maxRemembers + evictSample {
		require.False(t, d.hasher.TrySecret(cloud.UserID(fmt.Sprint("TV", i)), "192.0.2.1:1", "guess", []byte("s3cret"), 0))
	}
	require.False(t, d.try("ada", "192.0.2.1:1", right))
	require.Equal(t, 1, len(d.hasher.misses.counts))
}

func TestNetwork(t *testing.T) {
	for in, want := range map[string]string{
		"192.0.2.1:80": "192.0.2.1", "[2001:db8:1:2:3::4]:80": "2001:db8:1:2::/64", "[2001:db8:1:2:9::9%eth0]:1": "2001:db8:1:2::/64",
		"[::ffff:192.0.2.1]:80": "192.0.2.1", "bufconn": "bufconn", "": "",
	} {
		require.Equal(t, want, Network(in), in)
	}
	for in, want := range map[string]string{"192.0.2.1": "192.0.2.0/24", "2001:db8:1:2::/64": "2001:db8:1:2::/64", "bufconn": "bufconn", "": ""} {
		require.Equal(t, want, widerNetwork(in), in)
	}
}

// TestMissingPasswordTakesNoSlot checks that a login without a password gets no hashing slot and does not count as a
// wrong password.
func TestMissingPasswordTakesNoSlot(t *testing.T) {
	d := newFixture(t)
	for range 2 * MaxMisses {
		require.False(t, d.try("ada", "192.0.2.1:1", ""))
	}
	require.True(t, d.try("ada", "192.0.2.1:1", right))
}
