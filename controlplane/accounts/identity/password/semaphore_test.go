package password

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestHashingTakesAQuarterOfTheCores checks the number of slots and the pause for hosts of different sizes: hashing
// must use at most a quarter of the cores, with a pause after each hash on a host with fewer than four.
func TestHashingTakesAQuarterOfTheCores(t *testing.T) {
	for _, c := range []struct {
		cores, slots int
		pause        float64
	}{{1, 1, 3}, {2, 1, 1}, {3, 1, 1. / 3}, {4, 1, 0}, {7, 1, 0}, {8, 2, 0}, {64, 16, 0}} {
		u := newRankedSemaphore(c.cores)
		require.Equal(t, c.slots, u.free, "%d cores", c.cores)
		require.InDelta(t, c.pause, u.pause, 1e-9, "%d cores", c.cores)
		busy := float64(u.free) / (1 + u.pause)
		require.LessOrEqual(t, busy, float64(c.cores)/4+1e-9)
	}
}

// loginLoad is a member with a number of cores on which a hash takes hashTook of the synctest bubble's time.
type loginLoad struct {
	t      *testing.T
	hasher *Hasher
	wg     sync.WaitGroup

	mu     sync.Mutex
	order  []string // the names whose passwords were hashed, in order
	atOnce int
	most   int
}

const hashTook = 20 * time.Millisecond

func newLoginLoad(t *testing.T, cores int) *loginLoad {
	return &loginLoad{t: t, hasher: NewHasher(cores)}
}

// login starts a goroutine that tries a password for a name, and calls got with the result. networks are those of the
// name's earlier logins.
func (c *loginLoad) login(name, network, password string, networks []string, got func(bool, error)) {
	c.wg.Go(func() {
		now := func() cloud.Time { return time.Now().UnixMilli() }
		ok, err := c.hasher.Try(context.Background(), cloud.UserID(name), network+":1", password, now, func() (Account, error) {
			h := &Hash{Salt: []byte(name), Sum: []byte(right)}
			return Account{Hash: h, Networks: networks}, nil
		})
		got(ok, err)
	})
}

func (c *loginLoad) hash(h *Hash, password string) []byte {
	c.mu.Lock()
	c.order = append(c.order, string(h.Salt))
	c.atOnce++
	c.most = max(c.most, c.atOnce)
	c.mu.Unlock()
	time.Sleep(hashTook)
	c.mu.Lock()
	c.atOnce--
	c.mu.Unlock()
	return []byte(password)
}

// hashed returns the number of passwords that were hashed so far.
func (c *loginLoad) hashed() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.order)
}

// TestUsersLogInDuringAFloodOfWrongPasswords sends wrong passwords from five networks with 64 connections each. A user
// who logged in from the same network before must log in after at most two of them are hashed, one who logged in from
// another network after at most three, and each network may fill only its share of the queue. With two cores, one
// password is hashed at a time, during half of the time.
func TestUsersLogInDuringAFloodOfWrongPasswords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newLoginLoad(t, 2)
		c.hasher.sum = c.hash
		var refused, wrong int
		var mu sync.Mutex
		for n := range 5 {
			for i := range 64 {
				c.login(fmt.Sprintf("guess%d", i), fmt.Sprintf("10.0.%d.%d", n, i), "wrong", nil, func(ok bool, err error) {
					mu.Lock()
					defer mu.Unlock()
					if err != nil {
						require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
						refused++
						return
					}
					require.False(t, ok)
					wrong++
				})
			}
		}
		synctest.Wait()
		require.Equal(t, 5*(64-maxShare), refused)
		for _, user := range []string{"ada", "bob", "eve"} {
			home := []string{"198.51.100.7"}
			from := map[string]string{"ada": "198.51.100.7", "bob": "203.0.113.1", "eve": "10.0.1.200"}[user] // eve's network is the attacker's too
			if user == "eve" {
				home = []string{from}
			}
			before := c.hashed()
			done := make(chan struct{})
			c.login(user, from, right, home, func(ok bool, err error) {
				defer close(done)
				require.NoError(t, err, user)
				require.True(t, ok, user)
			})
			<-done
			require.LessOrEqual(t, c.hashed()-before, 3, user)
		}
		began := time.Now()
		before := c.hashed()
		c.wg.Wait()
		require.Equal(t, 5*maxShare, wrong)
		require.Equal(t, 1, c.most)
		require.GreaterOrEqual(t, time.Since(began), time.Duration(2*(c.hashed()-before)-2)*hashTook, "after each hash there must be a pause as long as the hash took")
		require.Empty(t, c.hasher.semaphore.networks)
		require.Empty(t, c.hasher.semaphore.names)
	})
}

// TestGuessingForOneNameTakesFewSlots checks that many wrong passwords for one name fill at most maxNameShare places of
// the queue of rank known, so that other users can log in.
func TestGuessingForOneNameTakesFewSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newLoginLoad(t, 2)
		c.hasher.sum = c.hash
		for n := range 16 {
			for range 4 {
				c.login("bob", fmt.Sprintf("10.0.%d.1", n), "wrong", []string{"198.51.100.9"}, func(bool, error) {})
			}
		}
		synctest.Wait()
		require.Len(t, c.hasher.semaphore.waiting[known], maxNameShare-1, "one of the places belongs to the request that is being served")
		done := make(chan struct{})
		before := c.hashed()
		c.login("ada", "203.0.113.1", right, []string{"198.51.100.7"}, func(ok bool, err error) {
			defer close(done)
			require.NoError(t, err)
			require.True(t, ok)
		})
		<-done
		require.LessOrEqual(t, c.hashed()-before, 2*maxNameShare+1)
		c.wg.Wait()
	})
}

// TestTheQueueIsBounded checks that a request is refused at once if the queue is full, that a request whose caller gave
// up makes room, and that a request is refused after hashWait.
func TestTheQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := newRankedSemaphore(2)
		hold := make(chan struct{})
		release := sync.OnceFunc(func() { close(hold) })
		defer release()
		var wg sync.WaitGroup
		wg.Go(func() { _ = u.do(t.Context(), request{rank: unfamiliar}, func() { <-hold }) })
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		for range maxWaiting {
			wg.Go(func() {
				require.ErrorIs(t, u.do(ctx, request{rank: unfamiliar}, func() { t.Error("a request was executed whose caller had given up") }), context.Canceled)
			})
		}
		synctest.Wait()
		err := u.do(t.Context(), request{rank: unfamiliar}, func() {})
		require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
		cancel()
		synctest.Wait()
		require.Empty(t, u.waiting[unfamiliar])
		began := time.Now()
		err = u.do(t.Context(), request{rank: unfamiliar}, func() {})
		require.True(t, fault.Is(err, fault.Unavailable), "%v", err)
		require.Equal(t, hashWait, time.Since(began))
		release()
		wg.Wait()
		require.NoError(t, u.do(t.Context(), request{rank: unfamiliar}, func() {}))
	})
}
