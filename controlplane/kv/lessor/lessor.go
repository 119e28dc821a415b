// Package lessor decides when leases expire. Its Lessor holds the expiry times, which the leader of the keyspace stores
// only in memory; the leases themselves are stored in the engine.
//
// The package has no side effects: the caller passes the time, from a monotonic clock, and receives the expired leases.
// The package must not depend on who leads, how a lease is revoked or where leases are stored, and starts no
// goroutines.
//
// A lease expires one TTL after it was added, renewed or taken over. A new leader takes over all leases as if they had
// just been renewed, because it does not know when they were: a lease may live longer than promised, but must not
// expire early. After a takeover, many leases could expire at the same moment. New therefore schedules at most three
// quarters of RevokesPerSecond leases to expire in the same second. The other leases expire in later seconds.
package lessor

import (
	"cmp"
	"container/heap"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// RevokesPerSecond is the maximum number of leases that Expired returns per second, as in etcd.
const RevokesPerSecond = 1000

// retryAfter is the time after which Expired returns a lease again if it has not been removed.
const retryAfter = 3 * time.Second

// MaxTTL is the maximum TTL of a lease in seconds, as in etcd.
const MaxTTL = 9_000_000_000

// never is the expiry time of a lease whose TTL is so long that the computed expiry time would overflow a
// time.Duration.
const never = time.Duration(1<<63 - 1)

// Lease holds the ID and the TTL of a lease, as stored in the engine.
type Lease struct {
	ID  int64
	TTL int64 // seconds
}

// Lessor schedules the expiry of leases. It is not safe for concurrent use. Times are durations since an origin that
// the caller chooses.
type Lessor struct {
	leases map[int64]*entry
	queue  queue

	// The rate limit of Expired: the current second, and the number of leases returned in it.
	second   time.Duration // start of the current second
	returned int
}

type entry struct {
	Lease
	expires  time.Duration
	due      time.Duration // sort key of queue: expires, or the time of the retry after Expired has returned the lease
	returned bool
	index    int
	removed  chan struct{} // closed when the lease is removed
}

// New returns a Lessor for existing leases, as if all of them had been renewed at the time now. If too many leases
// would expire in the same second, some of them expire in later seconds instead; see the package comment.
func New(all []Lease, now time.Duration) *Lessor {
	l := &Lessor{leases: make(map[int64]*entry, len(all)), second: now}
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b Lease) int { return cmp.Or(cmp.Compare(a.TTL, b.TTL), cmp.Compare(a.ID, b.ID)) })
	const perSecond = RevokesPerSecond * 3 / 4
	var window time.Duration // start of the second for which expiries are being scheduled
	filled := 0
	for _, lease := range all {
		expires := expiryTime(now, lease.TTL)
		if mutant.On(mutant.ExpireEarly) {
			expires = expiryTime(now, lease.TTL/2)
		}
		if expires >= window+time.Second {
			window, filled = expires, 0
		} else if filled == perSecond {
			window, filled = window+time.Second, 0
		}
		filled++
		l.insert(lease, max(expires, window))
	}
	return l
}

// expiryTime returns now plus seconds, or never if the sum would overflow.
func expiryTime(now time.Duration, seconds int64) time.Duration {
	if seconds > int64((never-now)/time.Second) {
		return never
	}
	return now + time.Duration(seconds)*time.Second
}

func (l *Lessor) insert(lease Lease, expires time.Duration) {
	e := &entry{Lease: lease, expires: expires, due: expires, removed: make(chan struct{})}
	l.leases[lease.ID] = e
	heap.Push(&l.queue, e)
}

// Add adds a lease that was granted at the time now. If the ID exists already, Add does nothing.
func (l *Lessor) Add(lease Lease, now time.Duration) {
	if l.leases[lease.ID] == nil {
		l.insert(lease, expiryTime(now, lease.TTL))
	}
}

// Remove removes a lease that has ended. If Renew has returned a channel for the lease, the channel is closed.
func (l *Lessor) Remove(id int64) {
	if e := l.leases[id]; e != nil {
		delete(l.leases, id)
		heap.Remove(&l.queue, e.index)
		close(e.removed)
	}
}

// Close removes all leases, which closes the channels returned by Renew.
func (l *Lessor) Close() {
	for id := range l.leases {
		l.Remove(id)
	}
}

// Len returns the number of leases.
func (l *Lessor) Len() int { return len(l.leases) }

// Renew sets a lease's expiry time to one TTL after now, and returns the TTL in seconds. If the lease does not exist,
// ok is false. An expired lease is not renewed: Renew then returns a channel, removed, that is closed when the lease is
// removed.
func (l *Lessor) Renew(id int64, now time.Duration) (ttl int64, removed <-chan struct{}, ok bool) {
	e := l.leases[id]
	switch {
	case e == nil:
		return 0, nil, false
	case e.returned || e.expires <= now:
		return 0, e.removed, true
	}
	e.expires = expiryTime(now, e.TTL)
	e.due = e.expires
	heap.Fix(&l.queue, e.index)
	return e.TTL, nil, true
}

// Remaining returns a lease and the time until it expires, which is 0 if it has expired. If the lease does not exist,
// ok is false.
func (l *Lessor) Remaining(id int64, now time.Duration) (ttl time.Duration, lease Lease, ok bool) {
	e := l.leases[id]
	if e == nil {
		return 0, Lease{}, false
	}
	return max(e.expires-now, 0), e.Lease, true
}

// IDsByExpiry returns the IDs of all leases, sorted by expiry time.
func (l *Lessor) IDsByExpiry() []int64 {
	all := make([]*entry, 0, len(l.leases))
	for _, e := range l.leases {
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b *entry) int { return cmp.Or(cmp.Compare(a.expires, b.expires), cmp.Compare(a.ID, b.ID)) })
	ids := make([]int64, len(all))
	for i, e := range all {
		ids[i] = e.ID
	}
	return ids
}

// Expired returns the IDs of up to limit leases that have expired at the time now, and no more than RevokesPerSecond in
// a second. A lease that is not removed within 3 s is returned again.
func (l *Lessor) Expired(now time.Duration, limit int) []int64 {
	if now-l.second >= time.Second {
		l.second, l.returned = now, 0
	}
	limit = min(limit, RevokesPerSecond-l.returned)
	var ids []int64
	for len(l.queue) > 0 && len(ids) < limit && l.queue[0].due <= now {
		e := l.queue[0]
		e.returned, e.due = true, now+retryAfter
		heap.Fix(&l.queue, 0)
		ids = append(ids, e.ID)
	}
	l.returned += len(ids)
	return ids
}

// Next returns the earliest time at which Expired may return a lease; ok is false if there are no leases.
func (l *Lessor) Next() (at time.Duration, ok bool) {
	if len(l.queue) == 0 {
		return 0, false
	}
	at = l.queue[0].due
	if l.returned >= RevokesPerSecond {
		at = max(at, l.second+time.Second)
	}
	return at, true
}

// queue is a heap of leases, ordered by their field due.
type queue []*entry

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].due < q[j].due }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	e := x.(*entry)
	e.index = len(*q)
	*q = append(*q, e)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	old := *q
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	return e
}
