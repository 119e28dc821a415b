// Package delay limits how often one caller can make a member do work. The main type is Answers. It delays the
// responses to a caller whose calls are refused often: a client that waits for each response then sends fewer calls.
// Thousands of refusals per second would slow down other callers on a small host. Answers.Allow only reports whether a
// call is within the rate of its caller, and delays nothing.
//
// The package must not know calls or callers: a key identifies the caller, such as an address or an org.
package delay

import (
	"context"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Limits configures how many responses one caller gets without delay.
type Limits struct {
	// Burst is how many responses are sent to a caller without delay at first. After these, one response per interval
	// Every is sent without delay.
	Burst int
	Every time.Duration
	// Longest is the longest delay of a response. Allow does not use it.
	Longest time.Duration
}

// Limits of Answers: the maximum number of responses that are delayed concurrently for one caller, the same in total,
// and the maximum number of callers in memory. When one of the first two is reached, further responses are not delayed,
// because each delayed response occupies a goroutine and a stream or connection.
const (
	maxDelayedOf = 256
	maxDelayed   = 2048
	maxCallers   = 10_000
)

// Answers delays responses, with a rate limit per caller. Its methods may be called concurrently.
type Answers struct {
	limits Limits
	// Now is a monotonic clock; Sleep waits for a time by that clock. Tests replace both.
	Now   func() time.Time
	Sleep func(context.Context, time.Duration)

	mu      sync.Mutex
	delayed int
	callers map[string]*caller
}

// caller holds the rate limit of one caller, and how many of its responses are being delayed.
type caller struct {
	rate    *rate.Limiter
	delayed int
}

// New returns an Answers in which no caller has used any of its limit.
func New(limits Limits) *Answers {
	return &Answers{limits: limits, Now: time.Now, Sleep: sleep, callers: map[string]*caller{}}
}

// Wait counts a response to the caller that key identifies. If the caller is above its rate, Wait blocks until the
// response is due or ctx ends.
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

// take counts a response and returns its delay. If the delay is more than 0, take also counts the response as delayed,
// both in the returned caller and in total.
func (a *Answers) take(key string) (time.Duration, *caller) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.Now()
	c := a.find(key, now)
	turn := c.rate.ReserveN(now, 1)
	wait := turn.DelayFrom(now)
	if wait > a.limits.Longest {
		// Undo the reservation, so that the delays of later responses do not grow further.
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

// Allow counts a call of the caller that key identifies, and reports whether the caller is within its rate. It does not
// count calls that it does not allow.
func (a *Answers) Allow(key string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.Now()
	return a.find(key, now).rate.AllowN(now, 1)
}

// find returns the caller with a key. It adds a caller that is not known. The caller of find must have locked a.mu.
func (a *Answers) find(key string, now time.Time) *caller {
	c := a.callers[key]
	if c == nil {
		if len(a.callers) >= maxCallers {
			a.evict(now)
		}
		c = &caller{rate: rate.NewLimiter(rate.Every(a.limits.Every), a.limits.Burst)}
		a.callers[key] = c
	}
	return c
}

// evict removes one caller that has no delayed responses. It inspects up to 16 such callers, and removes the one that
// could get the most responses without delay now.
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
