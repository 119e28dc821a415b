package leader

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// NoLeaderTime is how long a call waits for a leader to be elected before it fails.
const NoLeaderTime = 5 * time.Second

// ErrOutcomeUnknown is in the error chain of the fault that Route returns if the leader was lost before it answered. The
// call may have taken effect.
var ErrOutcomeUnknown = errors.New("the leader was lost before it answered")

// Route calls attempt with the ID of the leader, which may be self, and returns the error of attempt. If attempt
// returns ErrNotLeader or ErrNotSent, it had no effect, and Route calls it again. If repeatable is true, Route also
// calls attempt again after the response of another member was lost. Route returns a fault of kind Unavailable if there
// was no leader for NoLeaderTime, or if the leader was lost and the outcome is unknown. It returns the error of ctx if
// ctx has ended.
func Route(ctx context.Context, l Leadership, self uint64, repeatable bool, attempt func(ctx context.Context, leader uint64) error) error {
	patience := time.NewTimer(NoLeaderTime)
	defer patience.Stop()
	pause := 5 * time.Millisecond
	for {
		changed := l.Changed()
		if leader, _ := l.Leader(); leader != 0 {
			err := attemptOn(ctx, l, self, leader, attempt)
			var f *fault.Fault
			var remote *RemoteError
			switch {
			case err == nil || errors.As(err, &f) || errors.As(err, &remote):
				return err
			case ctx.Err() != nil:
				// The caller canceled, or its deadline passed. The error of the closed connection is only a
				// consequence.
				return fmt.Errorf("%w: %v", ctx.Err(), err)
			case errors.Is(err, ErrNotLeader), errors.Is(err, ErrNotSent), repeatable && leader != self:
			case leader == self:
				return err
			default:
				return fault.New(fault.Unavailable, "the leader was lost before it answered; whether the call took effect is not known").
					Because(fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)).MayRetry()
			}
		}
		select {
		case <-changed:
			pause = 5 * time.Millisecond
		case <-time.After(pause):
			pause = min(2*pause, 100*time.Millisecond)
		case <-patience.C:
			return fault.New(fault.Unavailable, "no leader: fewer than a majority of the members can be reached").MayRetry()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// attemptOn calls attempt with the ID of the leader. If the leader is another member, attemptOn cancels the attempt
// when this member learns of a newer leader. Without this, the attempt could wait forever for a leader that is cut off
// from the cluster.
func attemptOn(ctx context.Context, l Leadership, self, leader uint64, attempt func(ctx context.Context, leader uint64) error) error {
	if leader == self {
		return attempt(ctx, leader)
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			changed := l.Changed()
			if now, _ := l.Leader(); now != leader && now != 0 {
				cancel()
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	err := attempt(ctx, leader)
	cancel()
	<-done
	return err
}
