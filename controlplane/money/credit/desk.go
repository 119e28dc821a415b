package credit

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// maxShare is how many orders share a transaction, settleTime how long it may take: whoever waits for it may hang up, the
// others want their answers.
const (
	maxShare   = 128
	settleTime = 20 * time.Second
)

// desks are the queues of orders, one a wallet. Orders of one wallet would only undo each other's transactions.
type desks struct {
	mu   sync.Mutex
	open map[cloud.ProjectID]*desk
}

// desk is the queue of one wallet.
type desk struct {
	// people are at it; the last one takes it away. Under the mutex of desks.
	people int
	// turn is held by who carries out what waits.
	turn chan struct{}

	mu      sync.Mutex
	waiting []*ticket
}

func (d *desks) enter(p cloud.ProjectID) *desk {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := d.open[p]
	if q == nil {
		q = &desk{turn: make(chan struct{}, 1)}
		d.open[p] = q
	}
	q.people++
	return q
}

func (d *desks) leave(p cloud.ProjectID, q *desk) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if q.people--; q.people == 0 {
		delete(d.open, p)
	}
}

// queue waits until tickets are settled: by the one whose turn it is, together with others, or in the caller's own turn.
// When ctx ends first, what still waits is withdrawn, and of what is being carried out nobody knows.
func (d *desks) queue(ctx context.Context, p cloud.ProjectID, settle settler, tickets ...*ticket) error {
	q := d.enter(p)
	defer d.leave(p, q)
	q.mu.Lock()
	q.waiting = append(q.waiting, tickets...)
	q.mu.Unlock()
	for _, t := range tickets {
		for !t.over() {
			select {
			case <-t.settled:
			case q.turn <- struct{}{}:
				q.serve(ctx, settle)
				<-q.turn
			case <-ctx.Done():
				q.mu.Lock()
				q.waiting = slices.DeleteFunc(q.waiting, func(w *ticket) bool { return slices.Contains(tickets, w) })
				q.mu.Unlock()
				return ctx.Err()
			}
		}
	}
	return nil
}

// settler carries out tickets in one transaction; its error is that of all of them.
type settler func(context.Context, []*ticket) error

func (t *ticket) over() bool {
	select {
	case <-t.settled:
		return true
	default:
		return false
	}
}

// serve settles the first that wait. It goes on when the caller hangs up: the others' orders are in it.
func (q *desk) serve(ctx context.Context, settle settler) {
	q.mu.Lock()
	n := min(len(q.waiting), maxShare)
	share := slices.Clone(q.waiting[:n])
	q.waiting = slices.Delete(q.waiting, 0, n)
	q.mu.Unlock()
	if n == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	err := settle(ctx, share)
	for _, t := range share {
		if err != nil {
			t.err = err
		}
		close(t.settled)
	}
}
