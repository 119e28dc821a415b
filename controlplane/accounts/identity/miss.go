package identity

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// missesPerSecond is the maximum average rate of the linearizable reads that a member begins because its recent records
// contain no such project, user or role as a call names. missBurst is how many of these reads may begin at once. The
// rate is limited because each read needs responses from other members.
const (
	missesPerSecond = 50
	missBurst       = 50
)

// missReads performs the linearizable reads for calls whose project, user or role this member did not find. Concurrent
// calls share one read, and the rate of reads is limited. A call waits for its read instead of using older records. So
// a caller that names unknown projects only delays other calls of this type, by some milliseconds.
type missReads struct {
	limit *rate.Limiter
	turn  chan struct{} // capacity 1; guards begun
	begun time.Time     // when the last successful read began
}

func newMissReads() *missReads {
	return &missReads{limit: rate.NewLimiter(missesPerSecond, missBurst), turn: make(chan struct{}, 1)}
}

// wait makes sure that a call of the function barrier has begun and succeeded after wait was called. Concurrent calls
// of wait can share one call of barrier. The rate of calls of barrier is limited. If the limit allows none before the
// deadline of ctx, wait returns Unavailable.
func (m *missReads) wait(ctx context.Context, barrier func(context.Context) error) error {
	asked := time.Now()
	select {
	case m.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-m.turn }()
	if m.begun.After(asked) {
		return nil
	}
	if err := m.limit.Wait(ctx); err != nil {
		return fault.New(fault.Unavailable, "too many calls with unknown projects or users wait on this member: try again").MayRetry().Because(err)
	}
	begun := time.Now()
	if err := barrier(ctx); err != nil {
		return err
	}
	m.begun = begun
	return nil
}

// viewAfterMiss runs the function f on this member's records, after they include every write acknowledged before the
// call.
func (s *Service) viewAfterMiss(ctx context.Context, f func(*store.View) error) error {
	if err := s.misses.wait(ctx, s.opts.Store.Barrier); err != nil {
		return err
	}
	return s.opts.Store.Local(f)
}
