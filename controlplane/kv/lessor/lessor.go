// Package lessor decides when leases end: what the leader of the keyspace knows of them beyond their records.
//
// It is pure: times are handed in, from a clock that only goes forward, and what has expired is handed out. It must not
// know who leads, how a lease is ended or where leases are stored, and starts nothing.
//
// A lease lives for its TTL from when it was added, renewed or taken over. A new leader takes over all of them as if they
// had just been renewed: it cannot know when they were, and a lease that lives a little longer breaks no promise, one
// that ends early does. So that a whole fleet's leases do not end in one moment after that, leases beyond what can be
// ended in a second are spread out by a second each.
package lessor

import (
	"cmp"
	"container/heap"
	"slices"
	"time"
)

// RevokesPerSecond is how many leases are ended in a second at most, as in etcd.
const RevokesPerSecond = 1000

// retryAfter is when a lease that was handed out by Expired and is still there is handed out again.
const retryAfter = 3 * time.Second

// MaxTTL is the longest time to live in seconds, as in etcd.
const MaxTTL = 9_000_000_000

// forever is longer than any clock runs; MaxTTL does not fit into a Duration.
const forever = time.Duration(1<<63 - 1)

// Lease is a lease as it is stored.
type Lease struct {
	ID  int64
	TTL int64 // seconds
}

// Lessor holds the leases. It is not safe for concurrent use. Times are durations since a moment of the caller's.
type Lessor struct {
	leases map[int64]*entry
	queue  queue

	// The budget of Expired.
	second time.Duration // when the present second began
	spent  int
}

type entry struct {
	Lease
	expires time.Duration
	due     time.Duration // place in queue: expires, or later when it is being ended
	ending  bool
	place   int
	gone    chan struct{} // closed when the lease is removed
}

// New takes over leases at now.
func New(all []Lease, now time.Duration) *Lessor {
	l := &Lessor{leases: make(map[int64]*entry, len(all)), second: now}
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b Lease) int { return cmp.Or(cmp.Compare(a.TTL, b.TTL), cmp.Compare(a.ID, b.ID)) })
	const perSecond = RevokesPerSecond * 3 / 4
	var window time.Duration // begin of the second that is being filled
	filled := 0
	for _, lease := range all {
		expires := after(now, lease.TTL)
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

// after is now and seconds later, or forever.
func after(now time.Duration, seconds int64) time.Duration {
	if seconds > int64((forever-now)/time.Second) {
		return forever
	}
	return now + time.Duration(seconds)*time.Second
}

func (l *Lessor) insert(lease Lease, expires time.Duration) {
	e := &entry{Lease: lease, expires: expires, due: expires, gone: make(chan struct{})}
	l.leases[lease.ID] = e
	heap.Push(&l.queue, e)
}

// Add adds a lease that was granted. One that is there already stays as it is.
func (l *Lessor) Add(lease Lease, now time.Duration) {
	if l.leases[lease.ID] == nil {
		l.insert(lease, after(now, lease.TTL))
	}
}

// Remove forgets a lease that has ended.
func (l *Lessor) Remove(id int64) {
	if e := l.leases[id]; e != nil {
		delete(l.leases, id)
		heap.Remove(&l.queue, e.place)
		close(e.gone)
	}
}

// Close lets go of whoever waits for the end of a lease.
func (l *Lessor) Close() {
	for id := range l.leases {
		l.Remove(id)
	}
}

// Len is how many leases there are.
func (l *Lessor) Len() int { return len(l.leases) }

// Renew gives a lease its whole TTL again. Of a lease that is not there ok is false. One that has expired is not renewed:
// gone is closed when it has ended.
func (l *Lessor) Renew(id int64, now time.Duration) (ttl int64, gone <-chan struct{}, ok bool) {
	e := l.leases[id]
	switch {
	case e == nil:
		return 0, nil, false
	case e.ending || e.expires <= now:
		return 0, e.gone, true
	}
	e.expires = after(now, e.TTL)
	e.due = e.expires
	heap.Fix(&l.queue, e.place)
	return e.TTL, nil, true
}

// Remaining is the time that a lease has to live; 0 when it has expired.
func (l *Lessor) Remaining(id int64, now time.Duration) (left time.Duration, lease Lease, ok bool) {
	e := l.leases[id]
	if e == nil {
		return 0, Lease{}, false
	}
	return max(e.expires-now, 0), e.Lease, true
}

// Soonest are all leases, those first that end first.
func (l *Lessor) Soonest() []int64 {
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

// Expired hands out leases that are to be ended, at most so many, and RevokesPerSecond in a second. A lease that has not
// been removed 3 s later is handed out again.
func (l *Lessor) Expired(now time.Duration, most int) []int64 {
	if now-l.second >= time.Second {
		l.second, l.spent = now, 0
	}
	most = min(most, RevokesPerSecond-l.spent)
	var ids []int64
	for len(l.queue) > 0 && len(ids) < most && l.queue[0].due <= now {
		e := l.queue[0]
		e.ending, e.due = true, now+retryAfter
		heap.Fix(&l.queue, 0)
		ids = append(ids, e.ID)
	}
	l.spent += len(ids)
	return ids
}

// Next is when Expired may have something to hand out; ok is false when there are no leases.
func (l *Lessor) Next() (at time.Duration, ok bool) {
	if len(l.queue) == 0 {
		return 0, false
	}
	at = l.queue[0].due
	if l.spent >= RevokesPerSecond {
		at = max(at, l.second+time.Second)
	}
	return at, true
}

// queue is a heap by due.
type queue []*entry

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].due < q[j].due }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	e := x.(*entry)
	e.place = len(*q)
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
