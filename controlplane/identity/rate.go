package identity

import (
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of the tokens of one principal. Each issued or revoked token is a record of the audit, and each revoked one is
// remembered until it would have ended, so a loop of both would grow every member's records.
const (
	// tokenBurst is how many tokens one principal can be issued at once by one member, and how many it can revoke there.
	// It is meant for a program that starts many jobs, each with a token of its own.
	tokenBurst = 120
	// tokenEvery is the time in which one more becomes possible after the burst.
	tokenEvery = time.Second
	// maxRates bounds the principals whose rate a member remembers.
	maxRates = 10_000
)

// principalRates bounds how often each principal does something on this member.
type principalRates struct {
	mu     sync.Mutex
	limits map[cloud.UserID]*rate.Limiter
}

func newPrincipalRates() *principalRates {
	return &principalRates{limits: map[cloud.UserID]*rate.Limiter{}}
}

// allow takes one turn of a principal, and is false when it has none left.
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

// evict forgets, of a few principals, the one that used its turns least: forgetting a principal gives it a new burst.
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
