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
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// LeaseFeed passes the engine's lease changes to the Service, which is created after the engine.
type LeaseFeed struct {
	mu    sync.Mutex
	to    *tenure
	clock func() time.Duration
}

// Changed handles a lease change; set it as the engine's OnLeases.
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

// tenure holds the state of lease expiry during this member's term as leader.
type tenure struct {
	wake chan struct{} // capacity 1: the next lease may expire earlier than expected, or all leases have changed

	mu      sync.Mutex
	term    uint64         // 0: this member does not expire leases
	lessor  *lessor.Lessor // nil: the leases have not been read yet
	missed  []mvcc.LeaseChanges
	unsound bool // the state was replaced: the leases must be read again
}

// follow applies granted and revoked leases.
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
			t.unsound = true // the order of the grant and the revocation is unknown
		}
	}
	for _, id := range c.Revoked {
		t.lessor.Remove(id)
	}
}

// begin starts lease expiry for a term. read returns all leases; changes that arrive during read are applied after it.
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

// end stops lease expiry for the term.
func (t *tenure) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lessor != nil {
		t.lessor.Close()
	}
	t.term, t.lessor, t.missed = 0, nil, nil
}

// renew renews a lease for the leader of a term. If the lease has expired, renew waits until it is revoked.
func (t *tenure) renew(ctx context.Context, id int64, term uint64, now time.Duration) (leaseTold, error) {
	t.mu.Lock()
	if t.lessor == nil || t.term != term {
		t.mu.Unlock()
		return leaseTold{}, leader.ErrNotLeader // or lease expiry has not started yet
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
		return leaseTold{}, leader.ErrNotLeader // the term ended, the lease was not revoked
	}
	return leaseTold{}, nil
}

// remaining returns how long a lease has to live.
func (t *tenure) remaining(id int64, term uint64, now time.Duration) (leaseTold, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lessor == nil || t.term != term {
		return leaseTold{}, leader.ErrNotLeader
	}
	left, l, ok := t.lessor.Remaining(id, now)
	return leaseTold{Found: ok, TTL: int64(left / time.Second), Granted: l.TTL}, nil
}

// expired returns up to most expired leases, and how long to wait until the next one expires. It returns sound=false if
// the leases must be read again.
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

// count returns the number of leases, or 0 while this member does not expire leases.
func (t *tenure) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lessor == nil {
		return 0
	}
	return t.lessor.Len()
}

// errDeposed is returned when the records name another member, or a later term, as the one that expires leases.
var errDeposed = errors.New("another member leads")

// endLeases revokes expired leases for one term in which this member leads, until ctx ends with the term. After an
// error it pauses and returns, so that leader.While calls it again.
func (s *Service) endLeases(ctx context.Context, term uint64) {
	if err := s.endLeasesOf(ctx, term); err != nil && ctx.Err() == nil {
		s.opts.Log.Warn("leases are not looked after", "term", term, "err", err)
		select {
		case <-time.After(s.opts.Election / 10):
		case <-ctx.Done():
		}
	}
}

// endLeasesOf runs endLeases once. It returns nil when ctx has ended or the leases must be read again.
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
		// etcd revokes as many leases concurrently.
		const atOnce = 16
		ids, wait, sound := s.lessor.expired(s.opts.Clock(), atOnce)
		if !sound {
			return nil // the caller reads the leases again
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

// takeCharge writes this member's term into the records, so that the engine refuses lease revocations that an earlier
// leader still has in flight.
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

// expire revokes leases concurrently. Leases whose revocation failed are returned by expired again later.
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
		epoch := p.epoch
		if mutant.On(mutant.ExpireDeposed) {
			epoch = 0
		}
		r, err := s.propose(ctx, epoch, []command.Step{{Kind: command.StepRevoke, Lease: id}})
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
			// The lease was revoked by another caller. The feed reports that, unless it did so before the leases were read.
			s.lessor.forget(id)
		case command.RefusedNot:
			s.counters.expired.Add(1)
		}
		return refusalOf(r)
	}
}

// forget removes a lease that does not exist in the engine.
func (t *tenure) forget(id int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lessor != nil {
		t.lessor.Remove(id)
	}
}

// refusalOf returns an error for every refusal except RefusedLeaseNotFound, which is expected when a lease is revoked.
func refusalOf(r command.Result) error {
	if r.Refused == command.RefusedLeaseNotFound {
		return nil
	}
	return refusal(&r)
}
