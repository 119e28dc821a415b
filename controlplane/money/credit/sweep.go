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

// SweepEvery is the pause between sweeps: how late a reservation may expire.
const SweepEvery = time.Second

const (
	// maxSweep bounds the reservations of one run, and sweepPage those that are read at a time.
	maxSweep  = 10_000
	sweepPage = 500
	// sweepers wallets are swept at a time.
	sweepers = 16
	// sweeper is by whom a reservation expires: no user has such a name.
	sweeper = "system:expiry"
)

// Sweep expires reservations past their deadline, oldest first. It is a leader's task. Each expiry is an order like any
// other, a compare and set on the leader's time: whoever sweeps, and however often, a reservation expires once.
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

// overdue returns a page of the reservations past their deadline, by account, and the position of the next page, nil
// after the last.
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

// expire orders the expiry of reservations, a few wallets at a time. A wallet that fails does not hold up the others.
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

// expireOf queues all of one wallet before it waits for any, so that they share transactions.
func (s *Service) expireOf(ctx context.Context, of string, ids []string) error {
	tickets, project := make([]*ticket, len(ids)), projectOf(of)
	for i, id := range ids {
		o := Order{Tenant: cloud.Tenant{Project: project}, account: of, Command: ledger.Command{Op: ledger.DoExpire, By: sweeper, Reservation: id}}
		t, err := newTicket(nil, o)
		if err != nil {
			return err
		}
		tickets[i] = t
	}
	if err := s.desks.queue(ctx, project, s.settle, tickets...); err != nil {
		return err
	}
	var failed error
	for _, t := range tickets {
		failed = errors.Join(failed, t.err)
	}
	return failed
}
