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

// LeaseFeed forwards lease changes from the engine to the Service. The engine needs its callback when it is created,
// and at that time the Service does not exist yet.
type LeaseFeed struct {
	mu     sync.Mutex
	expiry *leaseExpiry
	clock  func() time.Duration
}

// Changed forwards granted and revoked leases to the Service, which updates the expiry times. The engine must call
// Changed as its callback OnLeases.
func (f *LeaseFeed) Changed(c mvcc.LeaseChanges) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.expiry != nil {
		f.expiry.observe(c, f.clock())
	}
}

func (f *LeaseFeed) attach(expiry *leaseExpiry, clock func() time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	expiry.wake = make(chan struct{}, 1)
	f.expiry, f.clock = expiry, clock
}

// leaseExpiry schedules the expiry of all leases while this member is the leader.
type leaseExpiry struct {
	wake chan struct{} // capacity 1; receives a value when leases have changed and expireLeasesOnce must check them

	mu      sync.Mutex
	term    uint64         // the leader's term; 0 while this member does not expire leases
	lessor  *lessor.Lessor // nil until the leases have been read from the engine
	pending []mvcc.LeaseChanges
	stale   bool // the leases must be read again from the engine
}

// observe applies granted and revoked leases to the expiry times. While the method start is still reading the leases,
// observe only stores the changes, and start applies them later.
func (e *leaseExpiry) observe(c mvcc.LeaseChanges, now time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.term == 0:
		return
	case c.All:
		e.stale = true
	case e.lessor == nil:
		e.pending = append(e.pending, c)
	default:
		e.apply(c, now)
	}
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

func (e *leaseExpiry) apply(c mvcc.LeaseChanges, now time.Duration) {
	for _, l := range c.Granted {
		e.lessor.Add(lessor.Lease{ID: l.ID, TTL: l.TTL}, now)
		if slices.Contains(c.Revoked, l.ID) {
			e.stale = true // the order of the grant and the revocation is unknown
		}
	}
	for _, id := range c.Revoked {
		e.lessor.Remove(id)
	}
}

// start begins lease expiry for the given term. The function read returns all leases in the engine. Changes that
// observe receives while read runs are applied afterwards.
func (e *leaseExpiry) start(term uint64, read func() ([]command.Lease, error), clock func() time.Duration) error {
	e.mu.Lock()
	e.term, e.lessor, e.pending, e.stale = term, nil, nil, false
	e.mu.Unlock()
	all, err := read()
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	leases := make([]lessor.Lease, len(all))
	for i, l := range all {
		leases[i] = lessor.Lease{ID: l.ID, TTL: l.TTL}
	}
	now := clock()
	e.lessor = lessor.New(leases, now)
	for _, c := range e.pending {
		e.apply(c, now)
	}
	e.pending = nil
	return nil
}

// stop ends lease expiry for the term. Calls of renew that wait for a revocation then return ErrNotLeader.
func (e *leaseExpiry) stop() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lessor != nil {
		e.lessor.Close()
	}
	e.term, e.lessor, e.pending = 0, nil, nil
}

// renew renews a lease. If the lease has expired, renew waits until the lease is revoked, and its response then says
// that the lease was not found. It returns ErrNotLeader if this member does not expire leases in the given term.
func (e *leaseExpiry) renew(ctx context.Context, id int64, term uint64, now time.Duration) (leaseResponse, error) {
	e.mu.Lock()
	if e.lessor == nil || e.term != term {
		e.mu.Unlock()
		return leaseResponse{}, leader.ErrNotLeader // another term, or lease expiry has not started yet
	}
	ttl, removed, ok := e.lessor.Renew(id, now)
	e.mu.Unlock()
	switch {
	case !ok:
		return leaseResponse{}, nil
	case removed == nil:
		return leaseResponse{Found: true, TTL: ttl, Granted: ttl}, nil
	}
	select {
	case <-removed:
	case <-ctx.Done():
		return leaseResponse{}, ctx.Err()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.term != term {
		return leaseResponse{}, leader.ErrNotLeader // the term ended, the lease was not revoked
	}
	return leaseResponse{}, nil
}

// remaining returns the remaining TTL and the granted TTL of a lease. It returns ErrNotLeader if this member does not
// expire leases in the given term.
func (e *leaseExpiry) remaining(id int64, term uint64, now time.Duration) (leaseResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lessor == nil || e.term != term {
		return leaseResponse{}, leader.ErrNotLeader
	}
	left, l, ok := e.lessor.Remaining(id, now)
	return leaseResponse{Found: ok, TTL: int64(left / time.Second), Granted: l.TTL}, nil
}

// expired returns the IDs of expired leases, at most limit of them. The result wait is the time until the next lease
// expires, at most 1 h. The result fresh is false if the leases must be read from the engine again; ids and wait are
// then not set.
func (e *leaseExpiry) expired(now time.Duration, limit int) (ids []int64, wait time.Duration, fresh bool) {
	const idle = time.Hour
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stale || e.lessor == nil {
		return nil, 0, false
	}
	ids = e.lessor.Expired(now, limit)
	next, ok := e.lessor.Next()
	if !ok {
		return ids, idle, true
	}
	return ids, min(max(next-now, 0), idle), true
}

// count returns the number of leases, or 0 while this member does not expire leases.
func (e *leaseExpiry) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lessor == nil {
		return 0
	}
	return e.lessor.Len()
}

// errDeposed means that the stored lessor record, which names the leader that expires leases, contains another member
// or a later term. This member must then not expire leases.
var errDeposed = errors.New("another member is the leader")

// expireLeases revokes expired leases while this member leads in the given term, until ctx ends. After an error it
// pauses for a tenth of the election timeout and returns; leader.While then calls it again.
func (s *Service) expireLeases(ctx context.Context, term uint64) {
	if err := s.expireLeasesOnce(ctx, term); err != nil && ctx.Err() == nil {
		s.opts.Log.Warn("expire leases", "term", term, "err", err)
		select {
		case <-time.After(s.opts.Election / 10):
		case <-ctx.Done():
		}
	}
}

// expireLeasesOnce revokes expired leases until ctx ends, the leases must be read again, or an error occurs. In the
// first two cases it returns nil.
func (s *Service) expireLeasesOnce(ctx context.Context, term uint64) error {
	if err := s.recordLessorTerm(ctx, term); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer s.lessor.stop()
	err := s.lessor.start(term, func() ([]command.Lease, error) {
		snap := s.opts.Engine.Snapshot()
		defer snap.Close()
		return snap.Leases()
	}, s.opts.Clock)
	if err != nil {
		return err
	}
	s.opts.Log.Info("lease expiry started", "term", term, "leases", s.lessor.count())
	for ctx.Err() == nil {
		// As in etcd, up to 16 leases are revoked concurrently.
		const concurrent = 16
		ids, wait, fresh := s.lessor.expired(s.opts.Clock(), concurrent)
		if !fresh {
			return nil // leader.While calls expireLeases again, which reads the leases again
		}
		if len(ids) > 0 {
			if err := s.revokeAll(ctx, term, ids); err != nil {
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

// recordLessorTerm writes this member's ID and term into the lessor record, which names the leader that expires leases.
// The write increments the epoch of the records. An earlier leader's revocations that are still in flight carry the
// previous epoch, so the engine refuses them.
func (s *Service) recordLessorTerm(ctx context.Context, term uint64) error {
	if err := s.opts.Consensus.ReadIndex(ctx); err != nil {
		return err
	}
	mine := lessorRecord{term: term, member: s.opts.Self}
	for ctx.Err() == nil {
		p, err := s.localPolicy()
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

// revokeAll revokes leases concurrently. If a revocation fails, leaseExpiry.expired returns that lease again later.
func (s *Service) revokeAll(ctx context.Context, term uint64, ids []int64) error {
	mine := lessorRecord{term: term, member: s.opts.Self}
	errs := make([]error, len(ids))
	var work sync.WaitGroup
	for i, id := range ids {
		work.Go(func() { errs[i] = s.revokeExpired(ctx, mine, id) })
	}
	work.Wait()
	return errors.Join(errs...)
}

func (s *Service) revokeExpired(ctx context.Context, mine lessorRecord, id int64) error {
	for {
		p, err := s.currentPolicy()
		if err != nil {
			return err
		}
		if p.lessor != mine {
			if p, err = s.localPolicy(); err != nil {
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
				s.opts.Log.Warn("revoke expired lease", "lease", id, "err", err)
			}
			return nil
		}
		switch r.Refused {
		case command.RefusedEpoch:
			if _, err := s.localPolicy(); err != nil {
				return err
			}
			continue
		case command.RefusedLeaseNotFound:
			// Another caller revoked the lease. LeaseFeed reports that revocation only if it happened after the leases
			// were read, so the lease is removed here in any case.
			s.lessor.remove(id)
		case command.RefusedNot:
			s.counters.expired.Add(1)
		}
		return revokeError(r)
	}
}

// remove removes a lease from the lessor. It is called for a lease that is no longer in the engine.
func (e *leaseExpiry) remove(id int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lessor != nil {
		e.lessor.Remove(id)
	}
}

// revokeError returns the error for a refused revocation. It returns nil for RefusedLeaseNotFound, because the lease
// has then been revoked already.
func revokeError(r command.Result) error {
	if r.Refused == command.RefusedLeaseNotFound {
		return nil
	}
	return refusalError(&r)
}
