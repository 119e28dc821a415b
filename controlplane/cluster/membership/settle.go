package membership

import (
	"context"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
)

// SettleEvery is the pause between two looks at the records.
const SettleEvery = 500 * time.Millisecond

// Settle makes the groups follow the records, once. It is a leader's task. What cannot be done yet is tried again.
func (s *Service) Settle(ctx context.Context) error {
	if err := s.seed(ctx); err != nil {
		return err
	}
	for {
		all, err := s.List(ctx, false)
		if err != nil {
			return err
		}
		for _, m := range all {
			err := s.settle(ctx, &m)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s.say(&m, err)
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

// Run is Settle for as long as the context lasts, at once when a change was asked for here. It is a leader's task.
func (s *Service) Run(ctx context.Context) error {
	tick := time.NewTicker(SettleEvery)
	defer tick.Stop()
	for {
		if err := s.Settle(ctx); err != nil && ctx.Err() == nil {
			s.opts.Log.Warn("settle members", "err", err)
		}
		select {
		case <-tick.C:
		case <-s.wake:
		case <-ctx.Done():
			return nil
		}
	}
}

// say logs why a change waits, once.
func (s *Service) say(m *Member, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		delete(s.said, m.ID)
		return
	}
	if text := err.Error(); s.said[m.ID] != text {
		s.said[m.ID] = text
		s.opts.Log.Info("a member's change waits", "of", m.ID, "state", m.State, "err", err)
	}
}

// seed writes the members of the first configuration when there are no records, or when they are of another cluster,
// which this one was made of.
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
			return nil // it joined: the records are for who made the cluster to write
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

// forget removes all records of another cluster: what they say of births and removed ids means nothing here.
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

// settle brings one member a step further.
func (s *Service) settle(ctx context.Context, m *Member) error {
	switch m.State {
	case Waiting:
		if m.Kept || s.opts.Store.Now()-m.Since < WaitingTime.Milliseconds() {
			return nil
		}
		_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			now, err := Members.Get(tx, path(m.ID))
			if err == nil && now != nil && now.State == Waiting && !now.Kept && now.Since == m.Since {
				Members.Delete(tx, path(m.ID))
			}
			return err
		})
		return err
	case Joined:
		return s.advance(ctx, m, consensus.Change{Kind: consensus.AddLearner, Member: m.ID, DirID: m.Birth}, Learning)
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

// advance carries a change out and notes that it is done.
func (s *Service) advance(ctx context.Context, m *Member, c consensus.Change, then State) error {
	if err := s.judge(ctx, c, false); err != nil {
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

// leave takes a member out of all groups. One that leads hands over first: whoever leads then goes on.
func (s *Service) leave(ctx context.Context, m *Member) error {
	for _, g := range s.opts.Groups {
		if leader, _ := g.Leadership.Leader(); leader != m.ID {
			continue
		}
		to, err := s.heir(ctx, m.ID)
		if err != nil {
			return err
		}
		if to == 0 {
			break // nobody else votes: the removal itself ends the leadership
		}
		if err := s.onGroup(ctx, act{Group: g.ID, Transfer: to}); err != nil {
			return err
		}
	}
	c := consensus.Change{Kind: consensus.Remove, Member: m.ID}
	if err := s.judge(ctx, c, m.Force); err != nil {
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
			now.Lost = append(now.Lost, now.Birth)
			now.State, now.Birth, now.Since, now.Kept, now.Replace, now.Force = Waiting, 0, tx.Now(), true, false, false
			Members.Put(tx, now, path(m.ID))
			return nil
		}
		Members.Delete(tx, path(m.ID))
		removed.Put(tx, &tombstone{Name: now.Name, At: tx.Now()}, path(m.ID))
		return nil
	})
	return err
}

// heir is a voter other than the one that leaves, this member if it is one; 0 if there is none that was heard from.
func (s *Service) heir(ctx context.Context, leaving uint64) (uint64, error) {
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
