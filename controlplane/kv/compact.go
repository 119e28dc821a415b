package kv

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// ageCompactor stores samples of the current revision over time, to find the newest revision that is at least age old.
type ageCompactor struct {
	age     time.Duration
	samples []revisionSample
}

type revisionSample struct {
	at       time.Duration
	revision int64
}

// due adds the sample that revision is current at the time now. It returns the newest sampled revision that is at least
// age old, or 0 if no sample has become that old since the last call.
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

// compactByAge compacts history that is older than Options.CompactAge while this member leads, until ctx ends. The
// samples of revisions are lost with leadership, so a new leader compacts nothing until it has led for CompactAge, as
// in etcd.
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
