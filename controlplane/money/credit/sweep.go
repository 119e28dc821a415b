package credit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// SweepEvery is the pause between two sweeps. A reservation normally expires at most this long after its deadline.
const SweepEvery = time.Second

const (
	// maxSweep is the maximum number of reservations that one sweep expires in total, and sweepPage the maximum number
	// that it reads at a time.
	maxSweep  = 10_000
	sweepPage = 500
	// sweepers is the maximum number of wallets for which one sweep expires reservations concurrently.
	sweepers = 16
	// sweeper is the name of the principal in transactions of expired reservations. No user can have this name.
	sweeper = "system:expiry"
)

// Sweep expires reservations whose deadline has passed, earliest deadline first. Package leader calls it periodically
// on the leader. The ledger command DoExpire changes only a reservation that is pending and past its deadline, so each
// reservation expires once, even if several sweeps run at the same time.
func (s *Service) Sweep(ctx context.Context) error {
	var after []string
	var failed error
	for swept := 0; swept < maxSweep; swept += sweepPage {
		page, last, err := s.overdue(after)
		if err != nil {
			return err
		}
		failed = errors.Join(failed, s.expire(ctx, page))
		if len(last) == 0 || ctx.Err() != nil {
			break
		}
		after = last
	}
	return failed
}

// overdue returns a page of the reservations whose deadline has passed: their IDs by account key. The result last is
// the position after which the next page begins, or nil after the last page.
func (s *Service) overdue(after []string) (page map[string][]string, last []string, err error) {
	now := number(s.opts.Store.Now())
	page = map[string][]string{}
	err = s.opts.Store.Local(func(v *store.View) error {
		rows, more, err := due.ListAfter(v, sweepPage, after)
		if err != nil {
			return err
		}
		for _, r := range rows {
			if r.Path[0] > now {
				return nil
			}
			page[r.Path[1]] = append(page[r.Path[1]], r.Path[2])
		}
		if more {
			last = rows[len(rows)-1].Path
		}
		return nil
	})
	if len(page) == 0 {
		last = nil
	}
	return page, last, err
}

// expire expires the reservations of a page, for at most sweepers wallets concurrently. After an error for one wallet
// it continues with the others. It returns all errors.
func (s *Service) expire(ctx context.Context, page map[string][]string) error {
	var work sync.WaitGroup
	var mu sync.Mutex
	var failed error
	slots := make(chan struct{}, sweepers)
	for of, ids := range page {
		slots <- struct{}{}
		work.Go(func() {
			defer func() { <-slots }()
			if err := s.expireOf(ctx, of, ids); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = errors.Join(failed, fmt.Errorf("expire reservations of %s: %w", of, err))
			}
		})
	}
	work.Wait()
	return failed
}

// expireOf expires the given reservations of one account. It adds all of them to the wallet's queue before it waits, so
// that they are executed in few transactions.
func (s *Service) expireOf(ctx context.Context, of string, ids []string) error {
	requests, project := make([]*queuedRequest, len(ids)), projectOf(of)
	for i, id := range ids {
		o := Request{Tenant: cloud.Tenant{Project: project}, account: of, Command: ledger.Command{Op: ledger.DoExpire, By: sweeper, Reservation: id}}
		t, err := newQueuedRequest(nil, o)
		if err != nil {
			return err
		}
		requests[i] = t
	}
	if err := s.batchers.queue(ctx, project, s.settle, requests...); err != nil {
		return err
	}
	var failed error
	for _, t := range requests {
		failed = errors.Join(failed, t.err)
	}
	return failed
}
