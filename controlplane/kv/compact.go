package kv

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// ageCompactor determines which revisions are older than age, from samples of the current revision.
type ageCompactor struct {
	age     time.Duration
	samples []revisionSample
}

type revisionSample struct {
	at       time.Duration
	revision int64
}

// due records that revision is current at now. It returns the newest recorded revision that was current at least age
// ago, or 0 if there is none that was not returned before.
func (a *ageCompactor) due(now time.Duration, revision int64) (old int64) {
	a.samples = append(a.samples, revisionSample{now, revision})
	last := -1
	for i, m := range a.samples {
		if now-m.at >= a.age {
			last, old = i, m.revision
		}
	}
	a.samples = a.samples[last+1:]
	return old
}

// compactByAge compacts history that is older than Options.CompactAge while this member leads. The recorded ages are
// lost with leadership, so a new leader keeps more history for a while, as in etcd.
func (s *Service) compactByAge(ctx context.Context) {
	const samplesPerAge = 10
	tick := time.NewTicker(max(s.opts.CompactAge/samplesPerAge, time.Second))
	defer tick.Stop()
	a := ageCompactor{age: s.opts.CompactAge}
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if s.Leader() != s.opts.Self {
			a.samples = nil
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
