package kv

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
	"github.com/trivet-cloud/trivet/controlplane/kv/lessor"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
)

// LeaseFeed brings the engine's changes of leases to the service that is made after it.
type LeaseFeed struct {
	mu    sync.Mutex
	to    *tenure
	clock func() time.Duration
}

// Changed is for the engine's OnLeases.
func (f *LeaseFeed) Changed(c mvcc.LeaseChanges) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.to != nil {
		f.to.follow(c, f.clock())
	}
}

func (f *LeaseFeed) attach(to *tenure, clock func() time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	to.wake = make(chan struct{}, 1)
	f.to, f.clock = to, clock
}

// tenure is this member's time as the leader that ends leases.
type tenure struct {
	wake chan struct{} // capacity 1: the next lease may end sooner than thought, or all have changed

	mu      sync.Mutex
	term    uint64         // 0: this member is not in charge
	lessor  *lessor.Lessor // nil: the leases are not read yet
	missed  []mvcc.LeaseChanges
	unsound bool // the state was replaced: the leases must be read again
}

// follow keeps up with what was granted and revoked.
func (t *tenure) follow(c mvcc.LeaseChanges, now time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.term == 0:
		return
	case c.All:
		t.unsound = true
	case t.lessor == nil:
		t.missed = append(t.missed, c)
	default:
		t.apply(c, now)
	}
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

func (t *tenure) apply(c mvcc.LeaseChanges, now time.Duration) {
	for _, l := range c.Granted {
		t.lessor.Add(lessor.Lease{ID: l.ID, TTL: l.TTL}, now)
		if slices.Contains(c.Revoked, l.ID) {
			t.unsound = true // which came first is not told
		}
	}
	for _, id := range c.Revoked {
		t.lessor.Remove(id)
	}
}

// begin takes charge. read gives all leases; what changes meanwhile is not lost.
func (t *tenure) begin(term uint64, read func() ([]command.Lease, error), clock func() time.Duration) error {
	t.mu.Lock()
	t.term, t.lessor, t.missed, t.unsound = term, nil, nil, false
	t.mu.Unlock()
	all, err := read()
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	leases := make([]lessor.Lease, len(all))
	for i, l := range all {
		leases[i] = lessor.Lease{ID: l.ID, TTL: l.TTL}
	}
	now := clock()
	t.lessor = lessor.New(leases, now)
	for _, c := range t.missed {
		t.apply(c, now)
	}
	t.missed = nil
	return nil
}

// end lays the charge down.
func (t *tenure) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lessor != nil {
		t.lessor.Close()
	}
	t.term, t.lessor, t.missed = 0, nil, nil
}

// renew renews a lease for the leader of a term. One that has expired it sees to its end.
func (t *tenure) renew(ctx context.Context, id int64, term uint64, now time.Duration) (leaseTold, error) {
	t.mu.Lock()
	if t.lessor == nil || t.term != term {
		t.mu.Unlock()
		return leaseTold{}, leader.ErrNotLeader // or not yet in charge
	}
	ttl, gone, ok := t.lessor.Renew(id, now)
	t.mu.Unlock()
	switch {
	case !ok:
		return leaseTold{}, nil
	case gone == nil:
		return leaseTold{Found: true, TTL: ttl, Granted: ttl}, nil
	}
	select {
	case <-gone:
	case <-ctx.Done():
		return leaseTold{}, ctx.Err()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.term != term {
		return leaseTold{}, leader.ErrNotLeader // it was not ended, the tenure was
	}
	return leaseTold{}, nil
}

// remaining says how long a lease has to live.
func (t *tenure) remaining(id int64, term uint64, now time.Duration) (leaseTold, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lessor == nil || t.term != term {
		return leaseTold{}, leader.ErrNotLeader
	}
	left, l, ok := t.lessor.Remaining(id, now)
	return leaseTold{Found: ok, TTL: int64(left / time.Second), Granted: l.TTL}, nil
}

// expired hands out leases to end, and says how long there is nothing more to do.
func (t *tenure) expired(now time.Duration, most int) (ids []int64, wait time.Duration, sound bool) {
	const idle = time.Hour
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.unsound || t.lessor == nil {
		return nil, 0, false
	}
	ids = t.lessor.Expired(now, most)
	next, ok := t.lessor.Next()
	if !ok {
		return ids, idle, true
	}
	return ids, min(max(next-now, 0), idle), true
}

// count is how many leases are known; 0 while this member is not in charge.
func (t *tenure) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lessor == nil {
		return 0
	}
	return t.lessor.Len()
}

// errDeposed is returned when the records name another member, or a later term, as the one that ends leases.
var errDeposed = errors.New("another member leads")

// endLeases revokes expired leases for one term in which this member leads, until ctx ends with the term. After an error
// it pauses and returns, so that leader.While calls it again.
func (s *Service) endLeases(ctx context.Context, term uint64) {
	if err := s.endLeasesOf(ctx, term); err != nil && ctx.Err() == nil {
		s.opts.Log.Warn("leases are not looked after", "term", term, "err", err)
		select {
		case <-time.After(s.opts.Election / 10):
		case <-ctx.Done():
		}
	}
}

// endLeasesOf is one attempt of endLeases. It returns nil when ctx has ended or the leases must be read again.
func (s *Service) endLeasesOf(ctx context.Context, term uint64) error {
	if err := s.takeCharge(ctx, term); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer s.lessor.end()
	err := s.lessor.begin(term, func() ([]command.Lease, error) {
		snap := s.opts.Engine.Snapshot()
		defer snap.Close()
		return snap.Leases()
	}, s.opts.Clock)
	if err != nil {
		return err
	}
	s.opts.Log.Info("looking after leases", "term", term, "leases", s.lessor.count())
	for ctx.Err() == nil {
		// As many as are ended side by side, as in etcd.
		const atOnce = 16
		ids, wait, sound := s.lessor.expired(s.opts.Clock(), atOnce)
		if !sound {
			return nil // begin again
		}
		if len(ids) > 0 {
			if err := s.expire(ctx, term, ids); err != nil {
				return err
			}
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-s.lessor.wake:
		case <-ctx.Done():
		}
		timer.Stop()
	}
	return nil
}

// takeCharge writes this member's term into the records, so that nothing that an earlier leader still has under way can
// end a lease.
func (s *Service) takeCharge(ctx context.Context, term uint64) error {
	if err := s.opts.Agreement.ReadIndex(ctx); err != nil {
		return err
	}
	mine := lessorRecord{term: term, member: s.opts.Self}
	for ctx.Err() == nil {
		p, err := s.newest()
		switch {
		case err != nil:
			return err
		case p.lessor == mine:
			return nil
		case p.lessor.term > term:
			return errDeposed
		}
		step := command.Step{Kind: command.StepSetRecord, Key: []byte(recordLessor), Value: mine.encode()}
		if _, err := s.propose(ctx, p.epoch, []command.Step{step}); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// expire ends leases side by side. Those that could not be ended are handed out again later.
func (s *Service) expire(ctx context.Context, term uint64, ids []int64) error {
	mine := lessorRecord{term: term, member: s.opts.Self}
	errs := make([]error, len(ids))
	var work sync.WaitGroup
	for i, id := range ids {
		work.Go(func() { errs[i] = s.endLease(ctx, mine, id) })
	}
	work.Wait()
	return errors.Join(errs...)
}

func (s *Service) endLease(ctx context.Context, mine lessorRecord, id int64) error {
	for {
		p, err := s.current()
		if err != nil {
			return err
		}
		if p.lessor != mine {
			if p, err = s.newest(); err != nil {
				return err
			}
			if p.lessor != mine {
				return errDeposed
			}
		}
		r, err := s.propose(ctx, p.epoch, []command.Step{{Kind: command.StepRevoke, Lease: id}})
		if err != nil {
			if ctx.Err() == nil {
				s.opts.Log.Warn("end lease", "lease", id, "err", err)
			}
			return nil
		}
		switch r.Refused {
		case command.RefusedEpoch:
			if _, err := s.newest(); err != nil {
				return err
			}
			continue
		case command.RefusedLeaseNotFound:
			// Somebody was faster. The feed says so, unless it did before the leases were read.
			s.lessor.forget(id)
		case command.RefusedNot:
			s.counters.expired.Add(1)
		}
		return refusalOf(r)
	}
}

// forget drops a lease that is not there.
func (t *tenure) forget(id int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lessor != nil {
		t.lessor.Remove(id)
	}
}

// refusalOf is an error for any refusal that is not expected when a lease is ended.
func refusalOf(r command.Result) error {
	if r.Refused == command.RefusedLeaseNotFound {
		return nil
	}
	return refusal(&r)
}
