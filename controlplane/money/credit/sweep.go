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

// SweepEvery is the pause between sweeps, and so the longest delay after which a due reservation normally expires.
const SweepEvery = time.Second

const (
	// maxSweep bounds the reservations that one run expires. sweepPage is the number read at a time.
	maxSweep  = 10_000
	sweepPage = 500
	// sweepers bounds the wallets that are swept concurrently.
	sweepers = 16
	// sweeper is the principal recorded for an expiry. No user can have this name.
	sweeper = "system:expiry"
)

// Sweep expires reservations past their deadline, oldest first. It runs as a leader task. Each expiry is an ordinary
// request, a compare-and-set against the leader's time, so a reservation expires once even if several sweeps run.
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

// overdue returns a page of the reservations past their deadline, grouped by account, and the position of the next
// page, which is nil after the last page.
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

// expire expires the reservations of a page, for up to sweepers wallets at a time. A failure on one wallet does not
// delay the others.
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

// expireOf expires reservations of one wallet. It queues all of them before it waits, so that they share transactions.
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
