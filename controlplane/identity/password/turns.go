package password

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// rank is how much is known of who asks for a password to be tried.
type rank uint8

const (
	// familiar is a name that logged in from the same network before.
	familiar rank = iota
	// known is a name that logged in before, from other networks.
	known
	stranger
	ranks
)

// Limits of the requests that wait for a turn on one member.
const (
	// maxWaiting is how many strangers wait, maxReserved how many of each other rank.
	maxWaiting  = 256
	maxReserved = 64
	// maxShare is how many requests of one network, a /24 of IPv4 or a /64 of IPv6, wait or are served, beyond the familiar
	// ones.
	maxShare = 16
	// maxNameShare is how many requests in one name wait or are served in each of the two ranks of users: somebody who knows
	// the name of a user does not fill that rank.
	maxNameShare = 4
	// hashWait is how long a request waits for its turn.
	hashWait = 10 * time.Second
	// maxPause bounds the pause after a turn: on a busy host the work takes longer by the clock than it used a core.
	maxPause = 200 * time.Millisecond
)

// request is one password to be hashed.
type request struct {
	rank rank
	name cloud.UserID
	// network is empty for who is not counted by network.
	network string
}

// nameShare counts requests in a name and rank.
type nameShare struct {
	name cloud.UserID
	rank rank
}

type waiter struct {
	request
	// ready is closed when the waiter has its turn.
	ready chan struct{}
}

// turns lets a few requests at once be served, at most a quarter of the cores together.
type turns struct {
	// pause is how long a turn lasts beyond its work, as a multiple of the work; after and now are the clock.
	pause float64
	after func(time.Duration, func())
	now   func() time.Time

	mu sync.Mutex
	// free is how many more turns can be had at once.
	free    int
	last    rank
	waiting [ranks][]*waiter
	// networks and names count the requests that wait or are served.
	networks map[string]int
	names    map[nameShare]int
}

// newTurns is for a member that has so many cores. One turn takes one core.
func newTurns(cores int) *turns {
	slots := max(1, cores/4)
	return &turns{
		pause: max(0, float64(4*slots)/float64(cores)-1), now: time.Now,
		after: func(d time.Duration, f func()) { time.AfterFunc(d, f) },
		free:  slots, last: stranger, networks: map[string]int{}, names: map[nameShare]int{},
	}
}

// do runs f when it is the request's turn. It is Unavailable when too many wait, and after hashWait.
func (t *turns) do(ctx context.Context, r request, f func()) error {
	w, ok := t.enter(r)
	if !ok {
		return errTooMany()
	}
	defer t.leave(w)
	patience := time.NewTimer(hashWait)
	defer patience.Stop()
	var err error
	select {
	case <-w.ready:
	case <-patience.C:
		err = errTooMany()
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		if t.giveUp(w) {
			return err
		}
		t.release() // the turn came in the same moment
		return err
	}
	began := t.now()
	defer func() {
		if rest := min(maxPause, time.Duration(t.pause*float64(t.now().Sub(began)))); rest > 0 {
			t.after(rest, t.release)
		} else {
			t.release()
		}
	}()
	f()
	return nil
}

// enter puts a request into the queue of its rank, or of a lower one when that or the request's share of it is full.
func (t *turns) enter(r request) (*waiter, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for ; r.rank < ranks; r.rank++ {
		if t.fits(r) {
			break
		}
	}
	if r.rank == ranks {
		return nil, false
	}
	if r.rank != familiar && r.network != "" {
		t.networks[r.network]++
	}
	if r.rank != stranger {
		t.names[nameShare{r.name, r.rank}]++
	}
	w := &waiter{r, make(chan struct{})}
	t.waiting[r.rank] = append(t.waiting[r.rank], w)
	t.grant()
	return w, true
}

func (t *turns) fits(r request) bool {
	if r.rank != familiar && r.network != "" && t.networks[r.network] >= maxShare {
		return false
	}
	if r.rank == stranger {
		return len(t.waiting[stranger]) < maxWaiting
	}
	return t.names[nameShare{r.name, r.rank}] < maxNameShare && len(t.waiting[r.rank]) < maxReserved
}

// leave takes a request's shares back.
func (t *turns) leave(w *waiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if w.rank != familiar && w.network != "" {
		decrement(t.networks, w.network)
	}
	if w.rank != stranger {
		decrement(t.names, nameShare{w.name, w.rank})
	}
}

func decrement[K comparable](counts map[K]int, k K) {
	if counts[k]--; counts[k] <= 0 {
		delete(counts, k)
	}
}

// giveUp takes a request out of its queue; false when it has its turn already.
func (t *turns) giveUp(w *waiter) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.waiting[w.rank], w)
	if i < 0 {
		return false
	}
	t.waiting[w.rank] = slices.Delete(t.waiting[w.rank], i, i+1)
	return true
}

func (t *turns) release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.free++
	t.grant()
}

// grant gives the free turns to the oldest requests of the ranks, one rank after the other. The caller holds mu.
func (t *turns) grant() {
	for t.free > 0 {
		next := ranks
		for i := range ranks {
			if r := (t.last + 1 + i) % ranks; len(t.waiting[r]) > 0 {
				next = r
				break
			}
		}
		if next == ranks {
			return
		}
		w := t.waiting[next][0]
		t.waiting[next] = slices.Delete(t.waiting[next], 0, 1)
		t.last = next
		t.free--
		close(w.ready)
	}
}
