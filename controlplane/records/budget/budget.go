// Package budget limits the rate of changes, and of bytes of changes, of each tenant. Its main type is Budget, a set of
// token buckets that the leader of the system group checks before it runs a command and before it proposes an update.
//
// Decisions:
//   - Budgets exist only in the leader's memory. So the limits do not grow with the number of members that accept
//     calls, and counting writes no records. A new leader starts with full budgets.
//   - A call within a project is charged to the project and to its org; a call about an org is charged to the org. An
//     org has OrgShare times the limits of a project. A call without a tenant (a user's own password or tokens) is
//     charged to the caller, or to the project of a service account.
//   - Calls are checked before the command does any work. Bytes are charged with the size of each log entry before the
//     entry is proposed. One entry may exceed the budget of bytes; further calls are refused until the bucket is no
//     longer negative.
//   - system:admin with a token for the entire cloud, and billing:admin on wallets of others, have no budget: tenants
//     cannot give themselves these roles. Background work of the cluster (billing, agents, expiry) has no caller and no
//     budget.
//
// The package must not know records, transports or single commands.
package budget

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Limits configures the token buckets of a project, or of a caller for calls that concern no project or org. A rate of
// 0 means no limit.
type Limits struct {
	// CallsPerSecond is the sustained rate of calls that change something; default 50.
	CallsPerSecond int `yaml:"calls_per_second"`
	// CallsBurst is the size of the bucket that CallsPerSecond fills, in calls; default 1,000.
	CallsBurst int `yaml:"calls_burst"`
	// BytesPerSecond is the sustained rate of bytes of log entries; default 1 MiB.
	BytesPerSecond int `yaml:"bytes_per_second"`
	// BytesBurst is the size of the bucket that BytesPerSecond fills, in bytes; default 32 MiB.
	BytesBurst int `yaml:"bytes_burst"`
}

// Default holds the default limits, which are far above what a tenant's tools use. At these limits a project can write
// at most 90 GiB of log entries per day, most of which compaction by size removes soon.
var Default = Limits{CallsPerSecond: 50, CallsBurst: 1000, BytesPerSecond: 1 << 20, BytesBurst: 32 << 20}

// Validate returns an error for a negative rate, and for a rate with a burst below 1, which would refuse every call.
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
	// OrgShare is the ratio of the limits of an org to those of one project. The org's limits apply to all calls of its
	// projects together.
	OrgShare = 4
	// maxBuckets is the maximum number of buckets in memory, at about 200 bytes each. Full buckets are evicted first.
	// This changes nothing for their callers, because a new bucket is full as well.
	maxBuckets = 65_536
	// Reason is the machine-readable reason (google.rpc.ErrorInfo) in the error for a call that exceeds a limit.
	Reason = "RATE_LIMITED"
)

// Budget holds the token buckets of all projects, orgs and callers. Its methods may be called concurrently.
type Budget struct {
	limits  Limits
	elapsed func() time.Duration
	most    int

	mu      sync.Mutex
	buckets map[string]*bucket
}

// bucket holds the calls and bytes that one project, org or caller may still use.
type bucket struct {
	calls, bytes tokens
	at           time.Duration // time of the last fill, on the clock elapsed
	times        float64       // factor by which Limits are multiplied: OrgShare or 1
}

type tokens float64

// New returns a Budget in which all buckets are full. The parameter elapsed is the monotonic clock by which the buckets
// fill up.
func New(limits Limits, elapsed func() time.Duration) *Budget {
	return &Budget{limits: limits, elapsed: elapsed, most: maxBuckets, buckets: map[string]*bucket{}}
}

// payer identifies the project, org or caller that a call is charged to.
type payer struct {
	key, name string
	times     float64
}

// payersOf returns the projects, orgs or callers that a call is charged to. It returns none for reads, for calls of
// nodes and cloud administrators, for billing administrators' calls on wallets, and for work without a caller.
func payersOf(c *cloud.Caller) []payer {
	switch {
	case c == nil || c.Method == "" || c.Node != "" || auth.Method(c.Method).Reads() || c.IsCloudAdmin():
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

// Admit charges one call to the buckets of the context's caller. If one of these buckets has less than one call left or
// a negative number of bytes, Admit returns a Throttled fault and charges nothing.
func (b *Budget) Admit(ctx context.Context) error { return b.take(auth.CallerOf(ctx), 1, 0, true) }

// Spend charges the size of an update, in bytes, to the buckets of the context's caller. If Shared put several callers
// into the context, Spend charges each of them an equal part. For a single caller, Spend returns a Throttled fault and
// charges nothing if a bucket already has a negative number of bytes. An update for several callers is never refused,
// because each of them was admitted before.
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

// Shared returns a context for an update on behalf of several callers. Spend then charges each of them an equal part of
// the bytes. A nil caller stands for background work, which is not charged.
func Shared(ctx context.Context, callers []*cloud.Caller) context.Context {
	return context.WithValue(ctx, sharedKey{}, callers)
}

// take removes calls and bytes from every bucket of the caller. If the parameter check is true and one of the buckets
// has too little left, take removes nothing and returns a Throttled fault.
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

// refusal returns a Throttled fault if the bucket k has fewer calls left than required, or a negative number of bytes.
// The parameter calls is the required number of calls. Otherwise refusal returns nil.
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

// until returns the time in which a bucket gains the given number of tokens, if it gains rate × times tokens per
// second.
func until(missing tokens, rate int, times float64) time.Duration {
	return time.Duration(float64(missing) / (float64(rate) * times) * float64(time.Second))
}

// bucket returns the bucket of a project, org or caller, filled up to the time now. If there is none, it creates a full
// one.
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

// fill adds the tokens that bucket k has gained since its last fill, up to the size of the bucket.
func (b *Budget) fill(k *bucket, now time.Duration) {
	seconds := max((now - k.at).Seconds(), 0)
	k.at = now
	k.calls = min(k.calls+tokens(seconds*float64(b.limits.CallsPerSecond)*k.times), tokens(float64(b.limits.CallsBurst)*k.times))
	k.bytes = min(k.bytes+tokens(seconds*float64(b.limits.BytesPerSecond)*k.times), tokens(float64(b.limits.BytesBurst)*k.times))
}

// evict removes the full buckets. If more than 15/16 of the maximum number of buckets remain, it also removes the
// fullest of the others, so that the next eviction is not due soon.
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

// level returns the fraction of a bucket that is left: for calls or for bytes, whichever is less. It is 1 if the bucket
// is full, and below 0 if the number of calls or bytes is negative.
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
