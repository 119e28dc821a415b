package leader

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// NoLeaderTime is how long a command waits for a leader to appear.
const NoLeaderTime = 5 * time.Second

// Route runs an attempt on the leader, which may be this member itself, and again while nothing can have happened: there
// is no leader yet, the one that was known is gone or says that it does not lead. If the attempt is repeatable, it is
// made again too when another leader's answer was lost. Unavailable when there was no leader for NoLeaderTime, or
// when what a lost leader did is not known; else the error is the attempt's own, or the context's.
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
				// What the transport made of it is of no use to the caller: who hung up, or whose time is over, is told so.
				return fmt.Errorf("%w: %v", ctx.Err(), err)
			case errors.Is(err, ErrNotLeader), errors.Is(err, ErrNotSent), repeatable && leader != self:
			case leader == self:
				return err
			default:
				return fault.New(fault.Unavailable, "the leader was lost before it answered; whether the call took effect is not known").
					Because(err).MayRetry()
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

// attemptOn makes an attempt on a leader. One that waits for another member is given up when that no longer leads: a
// member that is cut off would never answer.
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
