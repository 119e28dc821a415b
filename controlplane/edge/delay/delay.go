// Package delay delays answers to callers that make a member refuse many calls, so that a client that waits for its
// answers sends few calls. A refusal costs little, but on a small host thousands of them a second slow the calls of
// others.
//
// It knows no calls and no callers: a key identifies the caller, such as an address or an org.
package delay

import (
	"context"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Limits are the limits of the answers to one caller.
type Limits struct {
	// Burst and Every are the rate of undelayed answers: a number at once, and then one every so often.
	Burst int
	Every time.Duration
	// Longest is the longest delay of one answer.
	Longest time.Duration
}

// Bounds of what Answers keeps. An answer beyond the first two is not delayed, because each delayed one holds a
// goroutine and a stream or a connection.
const (
	maxDelayedOf = 256
	maxDelayed   = 2048
	maxCallers   = 10_000
)

// Answers delays answers by caller. Its methods may be called concurrently.
type Answers struct {
	limits Limits
	// Now and Sleep are a steady clock; tests replace them.
	Now   func() time.Time
	Sleep func(context.Context, time.Duration)

	mu      sync.Mutex
	delayed int
	callers map[string]*caller
}

// caller is the state of one caller.
type caller struct {
	rate    *rate.Limiter
	delayed int
}

// New returns Answers that have delayed none yet.
func New(limits Limits) *Answers {
	return &Answers{limits: limits, Now: time.Now, Sleep: sleep, callers: map[string]*caller{}}
}

// Wait counts an answer to a caller and, if there were too many, waits until its turn or until the context ends.
func (a *Answers) Wait(ctx context.Context, key string) {
	wait, c := a.take(key)
	if wait <= 0 {
		return
	}
	a.Sleep(ctx, wait)
	a.mu.Lock()
	defer a.mu.Unlock()
	c.delayed--
	a.delayed--
}

// take counts an answer and returns how long it has to wait. If that is more than 0, it counts as delayed.
func (a *Answers) take(key string) (time.Duration, *caller) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.Now()
	c := a.callers[key]
	if c == nil {
		if len(a.callers) >= maxCallers {
			a.evict(now)
		}
		c = &caller{rate: rate.NewLimiter(rate.Every(a.limits.Every), a.limits.Burst)}
		a.callers[key] = c
	}
	turn := c.rate.ReserveN(now, 1)
	wait := turn.DelayFrom(now)
	if wait > a.limits.Longest {
		// The turns of later answers are not moved further away.
		turn.CancelAt(now)
		wait = a.limits.Longest
	}
	if wait <= 0 || c.delayed >= maxDelayedOf || a.delayed >= maxDelayed {
		return 0, nil
	}
	c.delayed++
	a.delayed++
	return wait, c
}

// evict removes, from a sample of callers without delayed answers, the one with the most undelayed answers left.
func (a *Answers) evict(now time.Time) {
	least, most, sampled := "", -1.0, 0
	for key, c := range a.callers {
		if c.delayed > 0 {
			continue
		}
		if left := c.rate.TokensAt(now); sampled == 0 || left > most {
			least, most = key, left
		}
		if sampled++; sampled == 16 {
			break
		}
	}
	delete(a.callers, least)
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
