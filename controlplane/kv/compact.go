package kv

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// ager finds out which revisions are older than an age, by looking from time to time.
type ager struct {
	age   time.Duration
	marks []mark
}

type mark struct {
	at       time.Duration
	revision int64
}

// due notes that a revision is current now, and returns the newest one known to have been current an age ago; 0 when
// that is none, or was returned before.
func (a *ager) due(now time.Duration, revision int64) (old int64) {
	a.marks = append(a.marks, mark{now, revision})
	last := -1
	for i, m := range a.marks {
		if now-m.at >= a.age {
			last, old = i, m.revision
		}
	}
	a.marks = a.marks[last+1:]
	return old
}

// compactByAge lets go of history that is older than Options.CompactAge while this member leads. What it remembers of
// ages dies with the leadership: a new leader keeps more for a while, as etcd's does.
func (s *Service) compactByAge(ctx context.Context) {
	const marksPerAge = 10
	tick := time.NewTicker(max(s.opts.CompactAge/marksPerAge, time.Second))
	defer tick.Stop()
	a := ager{age: s.opts.CompactAge}
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if s.Leader() != s.opts.Self {
			a.marks = nil
			continue
		}
		revision := a.due(s.opts.Clock(), s.opts.Engine.Revision())
		if revision <= s.opts.Engine.CompactRevision() {
			continue
		}
		if err := s.compact(ctx, revision); err != nil && !errors.Is(err, rpctypes.ErrGRPCCompacted) && ctx.Err() == nil {
			s.opts.Log.Warn("compact by age", "revision", revision, "err", err)
		}
	}
}
