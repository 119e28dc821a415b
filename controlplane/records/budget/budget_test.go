package budget

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const vmService = "/vmcontroller.v1.VmService/"

// timer is a clock that changes only when the test sets it.
type timer struct{ now time.Duration }

func (t *timer) elapsed() time.Duration { return t.now }

func call(method, org, project string, roles ...cloud.Binding) context.Context {
	return auth.With(context.Background(), &cloud.Caller{
		User: "mallory", Proof: cloud.ProofPassword, Method: method, Tenant: cloud.Tenant{Org: cloud.OrgID(org), Project: cloud.ProjectID(project)}, Bindings: roles,
	}, auth.RPC)
}

func member(project string) context.Context {
	return call(vmService+"UpdateVm", "evil", project, cloud.Binding{Role: cloud.ProjectMember, Org: "evil", Project: cloud.ProjectID(project)})
}

// admitted calls Admit until it refuses a call, at most a million times. It returns the number of admitted calls and
// the refusal.
func admitted(b *Budget, ctx context.Context) (n int, refusal *fault.Fault) {
	for n < 1_000_000 {
		if err := b.Admit(ctx); err != nil {
			f, _ := fault.From(err)
			return n, f
		}
		n++
	}
	return n, nil
}

// flood makes a change of the given number of bytes as one member of a project every 5 ms for ten seconds. It returns
// how many calls and how many bytes were admitted.
func flood(b *Budget, t *timer, bytes int) (calls, written int) {
	ctx := member("evil-p")
	for range 10 * 200 {
		t.now += 5 * time.Millisecond
		if b.Admit(ctx) != nil {
			continue
		}
		calls++
		if b.Spend(ctx, bytes) == nil {
			written += bytes
		}
	}
	return calls, written
}

func checkFlood() error {
	t := &timer{}
	calls, _ := flood(New(Limits{CallsPerSecond: 10, CallsBurst: 100}, t.elapsed), t, 100)
	if calls < 190 || calls > 200 {
		return fmt.Errorf("%d calls got through, want the burst of 100 and 10 in each of 10 seconds", calls)
	}
	t = &timer{}
	_, written := flood(New(Limits{BytesPerSecond: 1 << 20, BytesBurst: 4 << 20}, t.elapsed), t, 120<<10)
	if written < 13<<20 || written > 14<<20+240<<10 {
		return fmt.Errorf("%d bytes got through, want 4 MiB at once, 1 MiB in each of 10 seconds, and one debt", written)
	}
	return nil
}

func TestFloodIsLimited(t *testing.T) { require.NoError(t, checkFlood()) }

func TestRefusalHasRetryDelay(t *testing.T) {
	clock := &timer{}
	b := New(Limits{CallsPerSecond: 2, CallsBurst: 1, BytesPerSecond: 1000, BytesBurst: 1000}, clock.elapsed)
	n, f := admitted(b, member("p"))
	require.Equal(t, 1, n)
	require.Equal(t, fault.Throttled, f.Kind)
	require.Equal(t, Reason, f.Reason)
	require.True(t, f.Retry)
	require.Equal(t, time.Second, f.RetryDelay())
	require.Equal(t, "project p makes too many changes: 2 changes a second are allowed in the long run. Try again in 1s", f.Message)

	require.NoError(t, b.Spend(member("p"), 31_000), "an update may make the budget negative")
	require.Error(t, b.Spend(member("p"), 1))
	clock.now += time.Second
	_, f = admitted(b, member("p"))
	require.Equal(t, 29*time.Second, f.RetryDelay())
	require.Contains(t, f.Message, "1000 bytes of changes a second")
	clock.now += 29 * time.Second
	require.NoError(t, b.Admit(member("p")))
}

// TestProjectsOfAnOrg checks that each project has its own budget and that all projects of an org together have at most
// the org's budget: more projects do not give an org an unlimited budget.
func TestProjectsOfAnOrg(t *testing.T) {
	b := New(Limits{CallsPerSecond: 1, CallsBurst: 10}, (&timer{}).elapsed)
	total := 0
	for i := range 10 {
		n, f := admitted(b, member(fmt.Sprint("p", i)))
		if total += n; i < OrgShare {
			require.Equal(t, 10, n)
			require.Contains(t, f.Message, "project p")
		}
	}
	require.Equal(t, 10*OrgShare, total)
	_, f := admitted(b, call("/identity.v1.IdentityService/CreateProject", "evil", ""))
	require.Contains(t, f.Message, "org evil makes too many changes: 4 changes a second")
	n, _ := admitted(b, call(vmService+"UpdateVm", "acme", "p0"))
	require.Equal(t, 10, n, "a project with the same ID in another org has its own budget")
}

func TestPayers(t *testing.T) {
	admin, biller := cloud.Binding{Role: cloud.SystemAdmin}, cloud.Binding{Role: cloud.BillingAdmin}
	host := auth.With(context.Background(), &cloud.Caller{Node: "n", Method: "/agent.v1.AgentService/Report"}, auth.RPC)
	scoped := auth.CallerOf(call(vmService+"CreateVm", "o", "p", admin))
	scoped.Scope = scoped.Tenant
	for name, c := range map[string]struct {
		ctx    context.Context
		counts bool
	}{
		"a change by a project's member":                   {member("p"), true},
		"a read by a project's member":                     {call(vmService+"ListVms", "o", "p"), false},
		"a user who changes the own password":              {call("/identity.v1.IdentityService/SetPassword", "", ""), true},
		"a change without a caller":                        {context.Background(), false},
		"a host":                                           {host, false},
		"an operator":                                      {call(vmService+"CreateVm", "o", "p", admin), false},
		"an operator whose session is limited to a tenant": {auth.With(context.Background(), scoped, auth.RPC), true},
		"a user with billing:admin who tops up a wallet":   {call("/credit.v1.CreditService/TopUpWallet", "", "p", biller), false},
		"a user with billing:admin who creates a VM":       {call(vmService+"CreateVm", "o", "p", biller), true},
	} {
		b := New(Limits{CallsPerSecond: 1, CallsBurst: 5, BytesPerSecond: 1, BytesBurst: 5}, (&timer{}).elapsed)
		n := 0
		for range 10 {
			if b.Admit(c.ctx) == nil {
				n++
			}
		}
		require.Equal(t, c.counts, n == 5, name)
		require.Equal(t, !c.counts, n == 10, name)
		require.NoError(t, b.Spend(c.ctx, 100), name)
		require.Equal(t, c.counts, b.Spend(c.ctx, 100) != nil, name)
	}
}

// TestSharedUpdates charges an update to several callers. Each caller's budget must be charged an equal part, and the
// update must not be refused.
func TestSharedUpdates(t *testing.T) {
	b := New(Limits{BytesPerSecond: 1, BytesBurst: 100}, (&timer{}).elapsed)
	one, two := auth.CallerOf(member("one")), auth.CallerOf(member("two"))
	require.NoError(t, b.Spend(Shared(context.Background(), []*cloud.Caller{one, two, two, nil}), 400))
	require.NoError(t, b.Admit(member("one")), "the budget had 100 and the update cost 100")
	require.Error(t, b.Admit(member("two")), "the budget had 100 and the update cost 200")
	require.NoError(t, b.Spend(Shared(context.Background(), []*cloud.Caller{two}), 100))
}

func TestNoLimits(t *testing.T) {
	b := New(Limits{}, (&timer{}).elapsed)
	n, _ := admitted(b, member("p"))
	require.Equal(t, 1_000_000, n)
	require.NoError(t, b.Spend(member("p"), 1<<40))
	require.NoError(t, b.Spend(member("p"), 1<<40))
}

// TestBudgetsAreBounded makes calls of many projects. The number of buckets must stay within its limit, and a used-up
// bucket must not be evicted before full ones.
func TestBudgetsAreBounded(t *testing.T) {
	clock := &timer{}
	b := New(Limits{CallsPerSecond: 1, CallsBurst: 100}, clock.elapsed)
	b.most = 64
	_, f := admitted(b, member("evil"))
	require.NotNil(t, f)
	for i := range 1000 {
		clock.now += time.Millisecond
		require.NoError(t, b.Admit(call(vmService+"UpdateVm", fmt.Sprint("o", i), fmt.Sprint("p", i))))
		require.LessOrEqual(t, len(b.buckets), b.most)
	}
	n, _ := admitted(b, member("evil"))
	require.Equal(t, 1, n, "the used-up budget is kept and has refilled for one second")
	for i := range 1000 {
		_, _ = admitted(b, call(vmService+"UpdateVm", fmt.Sprint("q", i), fmt.Sprint("p", i)))
		require.LessOrEqual(t, len(b.buckets), b.most)
	}
}

// TestConcurrentCalls checks that of concurrent calls of one project exactly as many are admitted as its budget has.
func TestConcurrentCalls(t *testing.T) {
	b := New(Limits{CallsPerSecond: 1, CallsBurst: 500}, (&timer{}).elapsed)
	var work sync.WaitGroup
	got := make([]int, 8)
	for i := range got {
		work.Go(func() { got[i], _ = admitted(b, member("p")) })
	}
	work.Wait()
	total := 0
	for _, n := range got {
		total += n
	}
	require.Equal(t, 500, total)
}

func TestValidate(t *testing.T) {
	require.NoError(t, (&Limits{}).Validate())
	l := Default
	require.NoError(t, l.Validate())
	for _, bad := range []Limits{{CallsPerSecond: -1}, {CallsPerSecond: 1}, {BytesPerSecond: 1, BytesBurst: -1}} {
		require.Error(t, bad.Validate())
	}
}

// TestServiceAccountsShareTheProjectBudget checks that all service accounts of a project share the project's budget for
// calls without a tenant, because a project can create any number of accounts.
func TestServiceAccountsShareTheProjectBudget(t *testing.T) {
	b := New(Limits{CallsPerSecond: 10, CallsBurst: 20, BytesPerSecond: 100, BytesBurst: 1000}, (&timer{}).elapsed)
	n := 0
	for i := range 10 {
		admits, _ := admitted(b, auth.With(context.Background(), &cloud.Caller{
			User: cloud.UserID(fmt.Sprint("TV", i)), Proof: cloud.ProofAppCred, Method: "/identity.v1.IdentityService/RevokeToken",
			Scope: cloud.Tenant{Org: "evil", Project: "lair"},
		}, auth.RPC))
		n += admits
	}
	require.Equal(t, 20, n)
}
