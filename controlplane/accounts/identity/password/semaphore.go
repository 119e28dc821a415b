package password

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// rank is the priority of a request. It depends on whether the user logged in before, and from which networks.
type rank uint8

const (
	// familiar is the rank of a user who logged in from the same network before.
	familiar rank = iota
	// known is the rank of a user who logged in before, but only from other networks.
	known
	unfamiliar
	ranks
)

// Limits of the requests that wait for a hashing slot on one member.
const (
	// maxWaiting is the maximum number of requests that wait in the queue of rank unfamiliar. maxReserved is the
	// maximum number in the queue of each other rank.
	maxWaiting  = 256
	maxReserved = 64
	// maxShare is the maximum number of requests of one network (a /24 of IPv4 or a /64 of IPv6) that wait for a slot
	// or have one. Requests of rank familiar are not counted.
	maxShare = 16
	// maxNameShare is the maximum number of requests for one user name in each of the ranks familiar and known that
	// wait for a slot or have one. So an attacker who knows a user's name cannot fill the queue of that rank.
	maxNameShare = 4
	// hashWait is how long a request waits for a slot before it is refused.
	hashWait = 10 * time.Second
	// maxPause is the maximum time for which a slot stays occupied after the hashing. The pause is proportional to the
	// elapsed time of the hashing, which can be long on a busy host, so it needs a maximum.
	maxPause = 200 * time.Millisecond
)

// request is one password to be hashed.
type request struct {
	rank rank
	name cloud.UserID
	// network is the client's network. It is empty if the request does not count in maxShare.
	network string
}

// nameShare is the key of rankedSemaphore.names: a user name and a rank.
type nameShare struct {
	name cloud.UserID
	rank rank
}

type waiter struct {
	request
	// ready is closed when the waiter gets a slot.
	ready chan struct{}
}

// rankedSemaphore is a semaphore with one queue per rank. It limits how many passwords are hashed at once to a quarter
// of the number of cores, and at least one.
type rankedSemaphore struct {
	// pause is how long a slot stays occupied after the hashing, as a multiple of the time that the hashing took. The
	// fields after and now are time.AfterFunc and time.Now; tests replace them.
	pause float64
	after func(time.Duration, func())
	now   func() time.Time

	mu sync.Mutex
	// free is the number of slots that are not occupied.
	free    int
	last    rank
	waiting [ranks][]*waiter
	// networks and names count the requests that wait for a slot or have one. networks counts them per network, and
	// names per user name and rank.
	networks map[string]int
	names    map[nameShare]int
}

// newRankedSemaphore returns a semaphore with one slot per four cores, and at least one. A slot uses one core.
func newRankedSemaphore(cores int) *rankedSemaphore {
	slots := max(1, cores/4)
	return &rankedSemaphore{
		pause: max(0, float64(4*slots)/float64(cores)-1), now: time.Now,
		after: func(d time.Duration, f func()) { time.AfterFunc(d, f) },
		free:  slots, last: unfamiliar, networks: map[string]int{}, names: map[nameShare]int{},
	}
}

// do waits for a slot and runs f. It returns Unavailable if the queues are full, or if the request gets no slot within
// hashWait.
func (t *rankedSemaphore) do(ctx context.Context, r request, f func()) error {
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
		if t.abandon(w) {
			return err
		}
		t.release() // the request got a slot at the same moment
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

// enter puts a request into the queue of its rank. If fits does not allow that, enter tries the queues of the lower
// ranks in turn. It returns false if fits allows none of them.
func (t *rankedSemaphore) enter(r request) (*waiter, bool) {
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
	if r.rank != unfamiliar {
		t.names[nameShare{r.name, r.rank}]++
	}
	w := &waiter{r, make(chan struct{})}
	t.waiting[r.rank] = append(t.waiting[r.rank], w)
	t.grant()
	return w, true
}

// fits reports whether the request may enter the queue of its rank: the queue is not full, and the limits maxShare (per
// network) and maxNameShare (per user name) are not reached. The caller must hold t.mu.
func (t *rankedSemaphore) fits(r request) bool {
	if r.rank != familiar && r.network != "" && t.networks[r.network] >= maxShare {
		return false
	}
	if r.rank == unfamiliar {
		return len(t.waiting[unfamiliar]) < maxWaiting
	}
	return t.names[nameShare{r.name, r.rank}] < maxNameShare && len(t.waiting[r.rank]) < maxReserved
}

// leave decrements the counts of a request's network and user name when the request has ended.
func (t *rankedSemaphore) leave(w *waiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if w.rank != familiar && w.network != "" {
		decrement(t.networks, w.network)
	}
	if w.rank != unfamiliar {
		decrement(t.names, nameShare{w.name, w.rank})
	}
}

func decrement[K comparable](counts map[K]int, k K) {
	if counts[k]--; counts[k] <= 0 {
		delete(counts, k)
	}
}

// abandon removes a request from its queue. It returns false if the request is no longer in the queue, because it got a
// slot.
func (t *rankedSemaphore) abandon(w *waiter) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.waiting[w.rank], w)
	if i < 0 {
		return false
	}
	t.waiting[w.rank] = slices.Delete(t.waiting[w.rank], i, i+1)
	return true
}

func (t *rankedSemaphore) release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.free++
	t.grant()
}

// grant gives the free slots to waiting requests. It serves the queues round-robin, and each queue in the order of
// arrival. The caller must hold t.mu.
func (t *rankedSemaphore) grant() {
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
