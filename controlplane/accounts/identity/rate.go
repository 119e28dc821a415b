package identity

import (
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of the issue and the revocation of tokens per principal. Each issued or revoked token adds an audit record,
// and each revoked token is recorded until it would have expired. Without limits, a loop of such calls would fill the
// disk of every member.
const (
	// tokenBurst is the maximum number of tokens that one member issues to one principal without a pause, and the
	// maximum number that the principal can revoke there without a pause. It allows for a program that starts many
	// jobs, each with its own token.
	tokenBurst = 120
	// tokenEvery is the interval after which one more token can be issued or revoked when the burst is used up.
	tokenEvery = time.Second
	// maxRates is the maximum number of principals for which one member has a rate limiter.
	maxRates = 10_000
)

// principalRates holds one rate limiter for each principal that recently issued or revoked tokens on this member.
type principalRates struct {
	mu     sync.Mutex
	limits map[cloud.UserID]*rate.Limiter
}

func newPrincipalRates() *principalRates {
	return &principalRates{limits: map[cloud.UserID]*rate.Limiter{}}
}

// allow reports whether the principal id may get (or revoke) one more token at the time now. If so, allow counts the
// token.
func (p *principalRates) allow(id cloud.UserID, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	limit := p.limits[id]
	if limit == nil {
		if len(p.limits) >= maxRates {
			p.evict(now)
		}
		limit = rate.NewLimiter(rate.Every(tokenEvery), tokenBurst)
		p.limits[id] = limit
	}
	return limit.AllowN(now, 1)
}

// evict removes one rate limiter to make room for another. Of 16 arbitrary limiters, it removes the one with the most
// remaining tokens in its burst. A principal whose limiter was removed gets a full burst again, so this choice allows
// the fewest additional tokens.
func (p *principalRates) evict(now time.Time) {
	var least cloud.UserID
	most, sampled := -1.0, 0
	for id, limit := range p.limits {
		if left := limit.TokensAt(now); left > most {
			least, most = id, left
		}
		if sampled++; sampled == 16 {
			break
		}
	}
	delete(p.limits, least)
}

func errTooManyTokens(id cloud.UserID) error {
	return fault.New(fault.ResourceExhausted,
		"%s was issued too many tokens just now: a member issues %d at once and then one a second; keep a token and use it until it ends", id, tokenBurst).
		MayRetry()
}

func errTooManyRevocations(id cloud.UserID) error {
	return fault.New(fault.ResourceExhausted,
		"%s revoked too many tokens just now: a member takes %d at once and then one a second; RevokeTokens ends all tokens of a principal", id, tokenBurst).
		MayRetry()
}
