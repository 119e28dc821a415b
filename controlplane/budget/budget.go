// Package budget limits how many changes, and how many bytes of changes, each tenant may make. Its main type is Budget,
// which the leader of the system group asks before it carries out a command and before it proposes an update.
//
// Decisions:
//   - The leader alone keeps the budgets, in memory: three members that take calls do not triple them, and no record is
//     written to account for records. A new leader begins with full budgets.
//   - A call within a project counts for the project and, together with those of all its projects and its own, for the
//     org, which has OrgShare times as much as a project. A call that belongs to no tenant (a user's own password, their
//     own tokens) counts for the caller, and one of a service account for its project.
//   - A budget of calls is checked before the command does any work. One of bytes is charged with the size of each log
//     entry before that is proposed, and may go into debt by one entry: the next is refused until the debt is paid.
//   - system:admin with a token for the whole cloud and billing:admin on wallets of others have no budget: tenants cannot
//     give themselves these roles. Work of the cluster's own (billing, agents, expiry) has no caller and no budget.
//
// It knows no records, no transport and no command.
package budget

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Limits of a project, or of a caller outside any. A rate of 0 is no limit.
type Limits struct {
	// CallsPerSecond are calls that change something, for as long as it may be; default 50.
	CallsPerSecond int `yaml:"calls_per_second"`
	// CallsBurst are such calls at once after a quiet time; default 1,000.
	CallsBurst int `yaml:"calls_burst"`
	// BytesPerSecond are bytes of log entries, for as long as it may be; default 1 MiB.
	BytesPerSecond int `yaml:"bytes_per_second"`
	// BytesBurst are such bytes at once after a quiet time; default 32 MiB.
	BytesBurst int `yaml:"bytes_burst"`
}

// Default are the limits of a configuration that sets none: a tenant's tools are far below them, and a tenant that uses
// them up writes 90 GiB a day at most, of which compaction by size keeps little.
var Default = Limits{CallsPerSecond: 50, CallsBurst: 1000, BytesPerSecond: 1 << 20, BytesBurst: 32 << 20}

// Validate returns an error for limits that would refuse every call.
func (l *Limits) Validate() error {
	for _, f := range []struct {
		name        string
		rate, burst int
	}{{"calls", l.CallsPerSecond, l.CallsBurst}, {"bytes", l.BytesPerSecond, l.BytesBurst}} {
		if f.rate < 0 || f.rate > 0 && f.burst < 1 {
			return fmt.Errorf("limits.%s_per_second must be 0 (no limit) or more and limits.%s_burst 1 or more, got %d and %d", f.name, f.name, f.rate, f.burst)
		}
	}
	return nil
}

const (
	// OrgShare is how many times a project's limits an org has for all its projects and itself.
	OrgShare = 4
	// maxBuckets bounds the budgets in memory, about 200 bytes each. Full ones are dropped first: they are as new ones.
	maxBuckets = 65_536
	// Reason is that of the refusals.
	Reason = "RATE_LIMITED"
)

// Budget keeps the budgets of all tenants. Its methods may be called concurrently.
type Budget struct {
	limits  Limits
	elapsed func() time.Duration
	most    int

	mu      sync.Mutex
	buckets map[string]*bucket
}

// bucket is what is left of one budget.
type bucket struct {
	calls, bytes tokens
	at           time.Duration // when it was filled last
	times        float64       // how many times Limits it has
}

type tokens float64

// New returns full budgets. elapsed is a clock that goes forward only.
func New(limits Limits, elapsed func() time.Duration) *Budget {
	return &Budget{limits: limits, elapsed: elapsed, most: maxBuckets, buckets: map[string]*bucket{}}
}

// payer is whose budget a call counts for.
type payer struct {
	key, name string
	times     float64
}

// payersOf returns whom a caller's call counts for, none for calls without a budget.
func payersOf(c *cloud.Caller) []payer {
	switch {
	case c == nil || c.Method == "" || c.Node != "" || auth.Method(c.Method).Reads() || c.Governs():
		return nil
	case strings.HasPrefix(c.Method, creditService) && c.Scope == (cloud.Tenant{}) && c.Has(cloud.BillingAdmin, cloud.Tenant{}):
		return nil
	}
	var out []payer
	at := c.Payer()
	org, project := string(at.Org), string(at.Project)
	if project != "" {
		out = append(out, payer{"project\x00" + org + "\x00" + project, "project " + project, 1})
	}
	if org != "" {
		out = append(out, payer{"org\x00" + org, "org " + org, OrgShare})
	}
	if out == nil {
		out = append(out, payer{"principal\x00" + c.Name(), c.Name(), 1})
	}
	return out
}

const creditService = "/credit.v1.CreditService/"

// Admit takes one call from the budgets of the context's caller. It returns a Throttled fault, and takes nothing, when one
// of them has no call left or is in debt of bytes.
func (b *Budget) Admit(ctx context.Context) error { return b.take(auth.CallerOf(ctx), 1, 0, true) }

// Spend takes the bytes of an update from the budgets of the context's caller, or shares them between the callers that
// Shared put there. It returns a Throttled fault, and takes nothing, when a budget is in debt already; shared bytes are
// never refused, because each of their callers was admitted.
func (b *Budget) Spend(ctx context.Context, bytes int) error {
	if callers, ok := ctx.Value(sharedKey{}).([]*cloud.Caller); ok && len(callers) > 0 {
		for _, c := range callers {
			_ = b.take(c, 0, tokens(bytes)/tokens(len(callers)), false)
		}
		return nil
	}
	return b.take(auth.CallerOf(ctx), 0, tokens(bytes), true)
}

type sharedKey struct{}

// Shared returns a context whose update is made for several callers, each of which pays a part. A nil caller pays nothing.
func Shared(ctx context.Context, callers []*cloud.Caller) context.Context {
	return context.WithValue(ctx, sharedKey{}, callers)
}

// take checks, if it is asked to, and takes calls and bytes from every budget of a caller, or from none.
func (b *Budget) take(c *cloud.Caller, calls, bytes tokens, check bool) error {
	payers := payersOf(c)
	if len(payers) == 0 || mutant.On(mutant.NoWriteBudget) {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.elapsed()
	buckets := make([]*bucket, len(payers))
	for i, p := range payers {
		buckets[i] = b.bucket(p, now)
		if check {
			if err := b.refusal(buckets[i], p, calls); err != nil {
				return err
			}
		}
	}
	for _, k := range buckets {
		k.calls -= calls
		k.bytes -= bytes
	}
	return nil
}

// refusal returns why a budget does not allow so many calls, nil if it does.
func (b *Budget) refusal(k *bucket, p payer, calls tokens) error {
	var wait time.Duration
	var what string
	if rate := b.limits.CallsPerSecond; rate > 0 && k.calls < calls {
		what = fmt.Sprintf("%d changes a second", rate*int(k.times))
		wait = until(calls-k.calls, rate, k.times)
	}
	if rate := b.limits.BytesPerSecond; rate > 0 && k.bytes < 0 {
		if w := until(-k.bytes, rate, k.times); w > wait {
			what, wait = fmt.Sprintf("%d bytes of changes a second", rate*int(k.times)), w
		}
	}
	if what == "" {
		return nil
	}
	f := fault.New(fault.Throttled, "%s makes too many changes: %s are allowed in the long run", p.name, what).WithReason(Reason).MayRetryAfter(wait)
	f.Message += fmt.Sprintf(". Try again in %s", f.RetryDelay())
	return f
}

// until returns how long it takes to earn so much.
func until(missing tokens, rate int, times float64) time.Duration {
	return time.Duration(float64(missing) / (float64(rate) * times) * float64(time.Second))
}

// bucket returns a payer's bucket as it is now.
func (b *Budget) bucket(p payer, now time.Duration) *bucket {
	k := b.buckets[p.key]
	if k == nil {
		if len(b.buckets) >= b.most {
			b.evict(now)
		}
		k = &bucket{calls: tokens(float64(b.limits.CallsBurst) * p.times), bytes: tokens(float64(b.limits.BytesBurst) * p.times), at: now, times: p.times}
		b.buckets[p.key] = k
		return k
	}
	b.fill(k, now)
	return k
}

// fill adds what a bucket has earned since it was filled last.
func (b *Budget) fill(k *bucket, now time.Duration) {
	seconds := max((now - k.at).Seconds(), 0)
	k.at = now
	k.calls = min(k.calls+tokens(seconds*float64(b.limits.CallsPerSecond)*k.times), tokens(float64(b.limits.CallsBurst)*k.times))
	k.bytes = min(k.bytes+tokens(seconds*float64(b.limits.BytesPerSecond)*k.times), tokens(float64(b.limits.BytesBurst)*k.times))
}

// evict drops the full buckets, and when fewer than a sixteenth are full also the fullest of the others, so that it is
// not called again soon.
func (b *Budget) evict(now time.Duration) {
	maps.DeleteFunc(b.buckets, func(_ string, k *bucket) bool {
		b.fill(k, now)
		return k.level(&b.limits) >= 1
	})
	for level := 0.9; len(b.buckets) > b.most-b.most/16; level -= 0.1 {
		maps.DeleteFunc(b.buckets, func(_ string, k *bucket) bool {
			return len(b.buckets) > b.most-b.most/16 && (k.level(&b.limits) >= level || level < 0)
		})
	}
}

// level returns how full a bucket is: 1 when nothing is missing, less than 0 when it is in debt.
func (k *bucket) level(l *Limits) float64 {
	level := 1.0
	if l.CallsPerSecond > 0 {
		level = min(level, float64(k.calls)/(float64(l.CallsBurst)*k.times))
	}
	if l.BytesPerSecond > 0 {
		level = min(level, float64(k.bytes)/cmp.Or(float64(l.BytesBurst)*k.times, 1))
	}
	return level
}
