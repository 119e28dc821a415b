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
	// tokenEvery is the interval at which one more token can be issued or revoked after the burst.
	tokenEvery = time.Second
	// maxRates is the maximum number of principals for which one member has a rate limiter.
	maxRates = 10_000
)

// principalRates holds a rate limiter for each principal that recently issued or revoked tokens on this member.
type principalRates struct {
	mu     sync.Mutex
	limits map[cloud.UserID]*rate.Limiter
}

func newPrincipalRates() *principalRates {
	return &principalRates{limits: map[cloud.UserID]*rate.Limiter{}}
}

// allow reports whether the principal may be issued, or may revoke, one more token now, and if so counts it.
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

// evict removes a rate limiter to make room for another: of 16 arbitrary ones, that of the principal who has used the
// least of its burst. A principal without a limiter may use a full burst again, so this choice allows the fewest
// additional tokens.
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
