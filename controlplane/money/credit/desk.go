package credit

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// maxShare bounds the orders in one transaction, and settleTime the duration of the transaction. The bound is needed
// because the transaction continues after a caller cancels: other callers wait for its result.
const (
	maxShare   = 128
	settleTime = 20 * time.Second
)

// desks holds the queues of orders, one per wallet. Without queues, concurrent transactions on one wallet would
// conflict.
type desks struct {
	mu   sync.Mutex
	open map[cloud.ProjectID]*desk
}

// desk holds the queue of one wallet.
type desk struct {
	// people counts the callers that use the queue; the last one deletes it. Guarded by desks.mu.
	people int
	// turn is a semaphore of one: its holder executes the waiting orders.
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

// queue enqueues tickets and waits until they are settled, either by another caller's batch or by a batch that this
// call executes. If ctx ends first, queue withdraws the tickets that are still waiting; the outcome of tickets in
// execution is unknown.
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

// settler executes tickets in one transaction. A returned error applies to all of them.
type settler func(context.Context, []*ticket) error

func (t *ticket) over() bool {
	select {
	case <-t.settled:
		return true
	default:
		return false
	}
}

// serve settles the first maxShare waiting tickets. It ignores the cancellation of ctx, because the batch contains
// other callers' orders.
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
