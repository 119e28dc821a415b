package kv

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// ageCompactor holds samples of the current revision, each with the time at which it was taken. They are used to find
// the newest revision that is at least age old.
type ageCompactor struct {
	age     time.Duration
	samples []revisionSample
}

type revisionSample struct {
	at       time.Duration
	revision int64
}

// due adds a sample: the given revision is the current one at the time now. It returns the newest sampled revision that
// is at least age old, and discards all samples up to that one. It returns 0 if no sample is that old.
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

// compactByAge compacts history older than Options.CompactAge, until ctx ends. Only the leader compacts. A member that
// loses leadership discards its samples, so a new leader compacts nothing until it has led for CompactAge, as in etcd.
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
