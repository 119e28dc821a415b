package identity

import (
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of the tokens of one principal. Each issued or revoked token adds an audit record, and each revoked token adds
// a record until it would have expired, so issuing and revoking in a loop would fill every member's disk.
const (
	// tokenBurst is how many tokens one member issues to one principal at once, and how many tokens the principal can
	// revoke there at once. It allows for a program that starts many jobs, each with its own token.
	tokenBurst = 120
	// tokenEvery is the time per further token after the burst.
	tokenEvery = time.Second
	// maxRates bounds the principals whose rate one member tracks.
	maxRates = 10_000
)

// principalRates is a rate limiter per principal on this member.
type principalRates struct {
	mu     sync.Mutex
	limits map[cloud.UserID]*rate.Limiter
}

func newPrincipalRates() *principalRates {
	return &principalRates{limits: map[cloud.UserID]*rate.Limiter{}}
}

// allow takes one token of the principal's bucket. It returns false if the bucket is empty.
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

// evict removes, from a sample of principals, the one with the fullest bucket, because a removed principal starts with
// a full bucket.
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
