// Package delay delays responses to callers whose calls a member refuses often, so that a client that waits for each
// response sends fewer calls. A refusal costs little, but on a small host thousands of them per second slow down other
// callers. The main type is Answers.
//
// The package must not know calls or callers: a key identifies the caller, such as an address or an org.
package delay

import (
	"context"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Limits are the limits of the responses to one caller.
type Limits struct {
	// Burst is how many responses may be sent at once without delay. Above Burst, one per Every is sent without delay.
	Burst int
	Every time.Duration
	// Longest is the longest delay of a response.
	Longest time.Duration
}

// Bounds of Answers: the delayed responses per caller and in total, and the callers in memory. A response beyond the
// first two bounds is not delayed, because each delayed one holds a goroutine and a stream or a connection.
const (
	maxDelayedOf = 256
	maxDelayed   = 2048
	maxCallers   = 10_000
)

// Answers delays responses by caller. Its methods may be called concurrently.
type Answers struct {
	limits Limits
	// Now is a monotonic clock and Sleep waits on it. Tests replace them.
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

// New returns Answers without any callers.
func New(limits Limits) *Answers {
	return &Answers{limits: limits, Now: time.Now, Sleep: sleep, callers: map[string]*caller{}}
}

// Wait counts a response to a caller. If the caller is above its rate, Wait waits until the response is due or the
// context ends.
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

// take counts a response and returns its delay. If that is more than 0, the response counts as delayed.
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
		// Do not let later responses wait even longer.
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

// evict removes one caller without delayed responses: of a sample of up to 16, the one furthest below its rate.
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
