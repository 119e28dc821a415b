package membership

import (
	"context"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// ReconcileEvery is the interval at which Run calls Reconcile.
const ReconcileEvery = 500 * time.Millisecond

// Reconcile makes the next change to the raft groups for each member whose record requires one. Only the leader runs
// it. A change that cannot be made yet is tried again by the next call.
func (s *Service) Reconcile(ctx context.Context) error {
	if err := s.seed(ctx); err != nil {
		return err
	}
	for {
		all, err := s.List(ctx, false)
		if err != nil {
			return err
		}
		for _, m := range all {
			err := s.reconcile(ctx, &m)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s.logWaiting(&m, err)
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return ctx.Err()
		default:
			return nil
		}
	}
}

// Run calls Reconcile at the interval ReconcileEvery until ctx ends. When a call has changed a record on this member,
// Run calls Reconcile at once. Only the leader runs Run.
func (s *Service) Run(ctx context.Context) error {
	tick := time.NewTicker(ReconcileEvery)
	defer tick.Stop()
	for {
		if err := s.Reconcile(ctx); err != nil && ctx.Err() == nil {
			s.opts.Log.Warn("reconcile members", "err", err)
		}
		select {
		case <-tick.C:
		case <-s.wake:
		case <-ctx.Done():
			return nil
		}
	}
}

// logWaiting logs err, the reason why a change of the member m cannot be made yet. It does not log the same reason
// twice in succession.
func (s *Service) logWaiting(m *Member, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		delete(s.logged, m.ID)
		return
	}
	if text := err.Error(); s.logged[m.ID] != text {
		s.logged[m.ID] = text
		s.opts.Log.Info("a membership change waits", "of", m.ID, "state", m.State, "err", err)
	}
}

// seed writes the records of the members in Options.First if there are no records of members. It replaces the records
// if they were written by another cluster, because this cluster was restored from a backup of that cluster.
func (s *Service) seed(ctx context.Context) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		of, err := clusterOf.Get(tx, "id")
		if err != nil {
			return err
		}
		if of != nil && *of == s.opts.Cluster {
			return nil
		}
		all, err := list(tx)
		if err != nil {
			return err
		}
		switch {
		case len(s.opts.First) == 0:
			return nil // this member joined later: a member of the first configuration writes the records
		case of != nil:
			if err := forget(tx, all); err != nil {
				return err
			}
		case len(all) > 0:
			clusterOf.Put(tx, &s.opts.Cluster, "id")
			return nil
		}
		for _, m := range s.opts.First {
			m.Wanted, m.State, m.Since = Voter, Voting, tx.Now()
			Members.Put(tx, &m, path(m.ID))
		}
		clusterOf.Put(tx, &s.opts.Cluster, "id")
		return nil
	})
	return err
}

// forget deletes all records of members and of removed members that another cluster wrote. The directory IDs and the
// removed IDs in them have no meaning in this cluster.
func forget(tx *store.Tx, all []Member) error {
	for _, m := range all {
		Members.Delete(tx, path(m.ID))
	}
	gone, _, err := removed.List(tx, 0)
	for _, r := range gone {
		removed.Delete(tx, r.Path...)
	}
	return err
}

// reconcile makes the next change for one member. It deletes an entry older than WaitingTime, adds a joined member to
// the groups as a learner, promotes a learner that has caught up, or removes a leaving member.
func (s *Service) reconcile(ctx context.Context, m *Member) error {
	switch m.State {
	case Waiting:
		if m.NoExpiry || s.opts.Store.Now()-m.Since < WaitingTime.Milliseconds() {
			return nil
		}
		_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			now, err := Members.Get(tx, path(m.ID))
			if err == nil && now != nil && now.State == Waiting && !now.NoExpiry && now.Since == m.Since {
				Members.Delete(tx, path(m.ID))
			}
			return err
		})
		return err
	case Joined:
		return s.advance(ctx, m, consensus.Change{Kind: consensus.AddLearner, Member: m.ID, DirID: m.DirID}, Learning)
	case Learning:
		if m.Wanted != Voter {
			return nil
		}
		if err := s.mayVote(ctx, m); err != nil {
			return err
		}
		return s.advance(ctx, m, consensus.Change{Kind: consensus.Promote, Member: m.ID}, Voting)
	case Leaving:
		return s.leave(ctx, m)
	}
	return nil
}

// advance executes the membership change c in all groups, and then sets the state of the member m to the parameter
// then.
func (s *Service) advance(ctx context.Context, m *Member, c consensus.Change, then State) error {
	if err := s.verifyChange(ctx, c, false); err != nil {
		return err
	}
	if err := s.change(ctx, c, false); err != nil {
		return err
	}
	s.opts.Log.Info("member changed", "of", m.ID, "state", then)
	return s.rewrite(ctx, m.ID, func(now *Member) error {
		if now.State == m.State {
			now.State = then
		}
		return nil
	})
}

// leave removes a member from all groups. If the member leads a group, leave first transfers that leadership. If this
// member stops being the leader meanwhile, Reconcile on the new leader continues the removal.
func (s *Service) leave(ctx context.Context, m *Member) error {
	for _, g := range s.opts.Groups {
		if leader, _ := g.Leadership.Leader(); leader != m.ID {
			continue
		}
		to, err := s.successor(ctx, m.ID)
		if err != nil {
			return err
		}
		if to == 0 {
			break // no other voter: the removal itself ends the leadership
		}
		if err := s.onGroup(ctx, act{Group: g.ID, Transfer: to}); err != nil {
			return err
		}
	}
	c := consensus.Change{Kind: consensus.Remove, Member: m.ID}
	if err := s.verifyChange(ctx, c, m.Force); err != nil {
		return err
	}
	if err := s.change(ctx, c, m.Force); err != nil {
		return err
	}
	s.opts.Log.Info("member removed", "of", m.ID, "replace", m.Replace)
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		now, err := Members.Get(tx, path(m.ID))
		if err != nil || now == nil || now.State != Leaving {
			return err
		}
		if now.Replace {
			now.FormerDirIDs = append(now.FormerDirIDs, now.DirID)
			now.State, now.DirID, now.Since, now.NoExpiry, now.Replace, now.Force = Waiting, 0, tx.Now(), true, false, false
			Members.Put(tx, now, path(m.ID))
			return nil
		}
		Members.Delete(tx, path(m.ID))
		removed.Put(tx, &tombstone{Name: now.Name, At: tx.Now()}, path(m.ID))
		return nil
	})
	return err
}

// successor returns the voter to which the leadership of a leaving member is transferred. It is this member if this
// member is a voter. Otherwise it is the voter from which this member most recently received a message. successor
// returns 0 if there is none.
func (s *Service) successor(ctx context.Context, leaving uint64) (uint64, error) {
	all, err := s.List(ctx, false)
	if err != nil {
		return 0, err
	}
	status, err := s.opts.Consensus.Status(ctx)
	if err != nil {
		return 0, err
	}
	best, since := uint64(0), uint64(0)
	for _, m := range all {
		if m.ID == leaving || !m.Votes() {
			continue
		}
		if m.ID == s.opts.Self {
			return m.ID, nil
		}
		if ticks, heard := status.Heard[m.ID]; heard && (best == 0 || ticks < since) {
			best, since = m.ID, ticks
		}
	}
	return best, nil
}
