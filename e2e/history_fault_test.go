package e2e

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
)

// fault is a kind of fault that a test injects into a saga. The function act causes the fault, waits, and repairs it.
type fault struct {
	name string
	act  func(ctx context.Context, s *saga, r *rand.Rand) error
}

// farOff is the time by which a member's clock is set forward or back.
const farOff = 10 * time.Minute

var faults = []fault{
	{"the leader is killed", func(ctx context.Context, s *saga, r *rand.Rand) error { return s.killed(ctx, r, s.sagaLeader(ctx)) }},
	{"a follower is killed", func(ctx context.Context, s *saga, r *rand.Rand) error { return s.killed(ctx, r, s.follower(ctx, r)) }},
	{"the leader is cut off", func(ctx context.Context, s *saga, r *rand.Rand) error { return s.cutOff(ctx, r, s.sagaLeader(ctx)) }},
	{"a follower is cut off", func(ctx context.Context, s *saga, r *rand.Rand) error { return s.cutOff(ctx, r, s.follower(ctx, r)) }},
	{"the leader's clock jumps", func(ctx context.Context, s *saga, r *rand.Rand) error {
		return s.jumped(ctx, r, s.sagaLeader(ctx), nil)
	}},
	{"a follower's clock jumps", func(ctx context.Context, s *saga, r *rand.Rand) error {
		return s.jumped(ctx, r, s.follower(ctx, r), nil)
	}},
	{"the leader's clock jumps and it is killed", func(ctx context.Context, s *saga, r *rand.Rand) error {
		return s.jumped(ctx, r, s.sagaLeader(ctx), s.killed)
	}},
	{"the leader's clock jumps and it is cut off", func(ctx context.Context, s *saga, r *rand.Rand) error {
		return s.jumped(ctx, r, s.sagaLeader(ctx), s.cutOff)
	}},
	{"the leader is killed while a follower's clock is off", func(ctx context.Context, s *saga, r *rand.Rand) error {
		return s.jumped(ctx, r, s.follower(ctx, r), func(ctx context.Context, r *rand.Rand, _ int) error {
			return s.killed(ctx, r, s.sagaLeader(ctx))
		})
	}},
}

func everyFault() (names []string) {
	for _, f := range faults {
		names = append(names, f.name)
	}
	return names
}

func (s *saga) follower(ctx context.Context, r *rand.Rand) int {
	return (s.sagaLeader(ctx)+r.IntN(2))%3 + 1
}

// hold waits for a random time between least and most, or until ctx ends.
func hold(ctx context.Context, r *rand.Rand, least, most time.Duration) {
	select {
	case <-time.After(least + time.Duration(r.Int64N(int64(most-least)))):
	case <-ctx.Done():
	}
}

// killed kills a member, starts it again after up to 2 seconds, and waits until all running members are ready.
func (s *saga) killed(ctx context.Context, r *rand.Rand, id int) error {
	if err := s.dir.Kill(s.trio.Name(id)); err != nil {
		return err
	}
	hold(ctx, r, 0, 2*time.Second)
	if err := s.trio.Start(id); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return s.trio.Ready(ctx)
}

// cutOff drops the packets between a member and the other members for 1 to 4 seconds. Clients can still reach it.
func (s *saga) cutOff(ctx context.Context, r *rand.Rand, id int) error {
	var errs []error
	for other := range s.trio.Members {
		if other != id {
			errs = append(errs, s.hosts.Cut(id, other), s.hosts.Cut(other, id))
		}
	}
	hold(ctx, r, time.Second, 4*time.Second)
	return errors.Join(append(errs, s.hosts.Heal())...)
}

// jumped sets a member's clock forward or back by farOff, calls the function meanwhile if it is not nil, and corrects
// the clock.
func (s *saga) jumped(ctx context.Context, r *rand.Rand, id int, meanwhile func(context.Context, *rand.Rand, int) error) error {
	ahead := farOff
	if r.IntN(2) == 0 {
		ahead = -farOff
	}
	if err := s.trio.SetClock(id, ahead); err != nil {
		return err
	}
	hold(ctx, r, 100*time.Millisecond, 2*time.Second)
	var err error
	if meanwhile != nil {
		err = meanwhile(ctx, r, id)
		hold(ctx, r, time.Second, 2*time.Second)
	}
	return errors.Join(err, s.trio.SetClock(id, 0))
}
