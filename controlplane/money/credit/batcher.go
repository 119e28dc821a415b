package credit

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// maxShare is the maximum number of requests in one transaction, and settleTime the maximum duration of the
// transaction. The transaction does not end when the context of one caller ends, because other callers wait for its
// result. Therefore it needs a time limit of its own.
const (
	maxShare   = 128
	settleTime = 20 * time.Second
)

// batchers holds a queue of requests per wallet. Requests on a wallet are executed one transaction after the other,
// because concurrent transactions on one wallet would conflict.
type batchers struct {
	mu   sync.Mutex
	open map[cloud.ProjectID]*walletBatcher
}

// walletBatcher is the queue of requests on one wallet.
type walletBatcher struct {
	// callersCount is the number of callers that use the queue; the last one deletes it. batchers.mu guards it.
	callersCount int
	// turn is a semaphore with one slot. The caller that has the slot executes the waiting requests.
	turn chan struct{}

	mu      sync.Mutex
	waiting []*queuedRequest
}

func (d *batchers) enter(p cloud.ProjectID) *walletBatcher {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := d.open[p]
	if q == nil {
		q = &walletBatcher{turn: make(chan struct{}, 1)}
		d.open[p] = q
	}
	q.callersCount++
	return q
}

func (d *batchers) leave(p cloud.ProjectID, q *walletBatcher) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if q.callersCount--; q.callersCount == 0 {
		delete(d.open, p)
	}
}

// queue adds requests to the queue of project p and waits until all of them are executed. They are executed by another
// caller's call of queue, or by this one, which then calls settle. If ctx ends first, queue removes the requests that
// still wait and returns the error of ctx. Requests that are being executed may or may not take effect.
func (d *batchers) queue(ctx context.Context, p cloud.ProjectID, settle batchFunc, requests ...*queuedRequest) error {
	q := d.enter(p)
	defer d.leave(p, q)
	q.mu.Lock()
	q.waiting = append(q.waiting, requests...)
	q.mu.Unlock()
	for _, t := range requests {
		for !t.over() {
			select {
			case <-t.settled:
			case q.turn <- struct{}{}:
				q.serve(ctx, settle)
				<-q.turn
			case <-ctx.Done():
				q.mu.Lock()
				q.waiting = slices.DeleteFunc(q.waiting, func(w *queuedRequest) bool { return slices.Contains(requests, w) })
				q.mu.Unlock()
				return ctx.Err()
			}
		}
	}
	return nil
}

// batchFunc executes requests in one transaction. If it returns an error, every one of the requests gets this error.
type batchFunc func(context.Context, []*queuedRequest) error

func (t *queuedRequest) over() bool {
	select {
	case <-t.settled:
		return true
	default:
		return false
	}
}

// serve executes the first maxShare waiting requests with the function settle, and sets their results. It continues
// when ctx is cancelled, because the batch contains other callers' requests.
func (q *walletBatcher) serve(ctx context.Context, settle batchFunc) {
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
