package identity

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// missesPerSecond is the average number of linearizable reads per second that a member begins because it found no
// project, user or role for a call in its recent records. missBurst is how many of these may begin without a pause.
// Each read needs responses from other members.
const (
	missesPerSecond = 50
	missBurst       = 50
)

// missReads lets calls that found no project, user or role share linearizable reads, and limits the rate of these
// reads. Each call waits for a read and never uses older records instead. So a caller who names unknown projects can
// only delay other such calls, by some milliseconds.
type missReads struct {
	limit *rate.Limiter
	turn  chan struct{} // capacity 1; guards begun
	begun time.Time     // when the last successful read began
}

func newMissReads() *missReads {
	return &missReads{limit: rate.NewLimiter(missesPerSecond, missBurst), turn: make(chan struct{}, 1)}
}

// wait returns when a call of barrier that began after the call of wait has succeeded: its own, or one of a concurrent
// call of wait. Calls of barrier are rate-limited. It returns Unavailable if the limit allows none before the deadline
// of ctx.
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

// viewAfterMiss runs f on records that include every write acknowledged before the call.
func (s *Service) viewAfterMiss(ctx context.Context, f func(*store.View) error) error {
	if err := s.misses.wait(ctx, s.opts.Store.Barrier); err != nil {
		return err
	}
	return s.opts.Store.Local(f)
}
