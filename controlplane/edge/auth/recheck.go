package auth

import (
	"context"
	"crypto/sha256"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// RecheckEvery is the time between two verifications of the token of an open stream. After the token, or the role that
// admitted the stream, becomes invalid, the stream continues for at most this time plus the duration of one
// verification.
const RecheckEvery = time.Second

// Rechecker verifies the tokens of open streams every RecheckEvery. All streams of one token share one verification.
type Rechecker struct {
	verifier Verifier

	mu     sync.Mutex
	tokens map[[sha256.Size]byte]*recheck
}

// recheck is a token that is verified repeatedly, with the functions that get each result.
type recheck struct {
	text string
	end  context.CancelFunc
	done chan struct{}

	subscribers map[*func(*Check)]struct{} // guarded by Rechecker.mu
}

// Check is the result of one verification of a token. All streams of the token share it.
type Check struct {
	// Caller is the token's holder with the roles that they have now; nil if Err is set.
	Caller *cloud.Caller
	// Err is an Unauthenticated fault if the token is no longer valid, and another error if the token could not be
	// verified.
	Err error

	admitted map[admitted]error
}

// admitted is the key of the map Check.admitted: the method and the tenant for which a call was admitted.
type admitted struct {
	method Method
	tenant cloud.Tenant
}

// NewRechecker returns a Rechecker that calls verifier to verify tokens.
func NewRechecker(verifier Verifier) *Rechecker {
	return &Rechecker{verifier: verifier, tokens: map[[sha256.Size]byte]*recheck{}}
}

// Subscribe calls f with the result of each verification of token until stop is called. One goroutine makes all calls
// for a token, one after the other, so f must not block and must not call stop. f may be called once more after stop
// has returned.
func (r *Rechecker) Subscribe(token string, f func(*Check)) (stop func()) {
	sum := sha256.Sum256([]byte(token))
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.tokens[sum]
	if c == nil {
		ctx, end := context.WithCancel(context.Background())
		c = &recheck{text: token, end: end, done: make(chan struct{}), subscribers: map[*func(*Check)]struct{}{}}
		r.tokens[sum] = c
		go func() {
			defer close(c.done)
			r.run(ctx, c)
		}()
	}
	c.subscribers[&f] = struct{}{}
	return func() {
		r.mu.Lock()
		delete(c.subscribers, &f)
		last := len(c.subscribers) == 0 && r.tokens[sum] == c
		if last {
			delete(r.tokens, sum)
		}
		r.mu.Unlock()
		if last {
			c.end()
			<-c.done
		}
	}
}

// maxUnverified is how long a stream continues while this member cannot verify its token, for example because there is
// no leader.
const maxUnverified = 10 * time.Second

// WhileValid calls end with a fault when the token of an open stream becomes invalid, when its holder is no longer
// authorized for the call of ctx, or when the token could not be verified for maxUnverified. Call stop when the stream
// has ended.
func (r *Rechecker) WhileValid(ctx context.Context, token string, end context.CancelCauseFunc) (stop func()) {
	verified := time.Now()
	return r.Subscribe(token, func(c *Check) {
		if c.Err == nil {
			verified = time.Now()
		}
		err := c.Readmit(ctx)
		if mutant.On(mutant.KeepInvalidStreams) {
			return
		}
		if fault.Is(err, fault.Unauthenticated) || fault.Is(err, fault.PermissionDenied) || err != nil && time.Since(verified) > maxUnverified {
			end(err)
		}
	})
}

// run verifies the token of c every RecheckEvery, until ctx ends. It passes each result to all functions that are
// subscribed to the token.
func (r *Rechecker) run(ctx context.Context, c *recheck) {
	again := time.NewTicker(RecheckEvery)
	defer again.Stop()
	var calls []func(*Check)
	for {
		select {
		case <-again.C:
		case <-ctx.Done():
			return
		}
		check := &Check{admitted: map[admitted]error{}}
		check.Caller, check.Err = r.verifier.Verify(ctx, c.text)
		if ctx.Err() != nil {
			return
		}
		calls = calls[:0]
		r.mu.Lock()
		for f := range c.subscribers {
			calls = append(calls, *f)
		}
		r.mu.Unlock()
		for _, f := range calls {
			f(check)
		}
		clear(calls)
	}
}

// Readmit returns nil if the call of ctx would be admitted now. It returns c.Err if the token could not be verified,
// and otherwise the same error as the function Readmit. Streams of the token with the same method and tenant share one
// evaluation of the policy. Call it only within a function that was passed to Subscribe, because it is not safe for
// concurrent use.
func (c *Check) Readmit(ctx context.Context) error {
	if c.Err != nil {
		return c.Err
	}
	e, _ := ctx.Value(key{}).(entry)
	if e.let == nil {
		return nil
	}
	e.let.mu.Lock()
	what := admitted{e.let.method, e.let.tenant}
	e.let.mu.Unlock()
	if err, known := c.admitted[what]; known {
		return err
	}
	err := Readmit(ctx, c.Caller)
	c.admitted[what] = err
	return err
}
