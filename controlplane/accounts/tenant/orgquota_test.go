package tenant_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func (w *world) create(org cloud.OrgID, id cloud.ProjectID) (p *tenant.Project, err error) {
	err = w.do(func(tx *store.Tx) (err error) {
		p, err = tenant.CreateProject(tx, cloud.Tenant{Org: org, Project: id}, "", tenant.Quota{})
		return err
	})
	return p, err
}

func (w *world) remove(id cloud.ProjectID) error {
	return w.do(func(tx *store.Tx) error { return tenant.DeleteProject(tx, id) })
}

func (w *world) limitOrg(q tenant.Quota) {
	require.NoError(w.t, w.do(func(tx *store.Tx) error { return tenant.SetOrgQuota(tx, web.Org, q) }))
}

func (w *world) takeIn(id cloud.ProjectID, kind tenant.Kind, more, less tenant.Amount) error {
	return w.do(func(tx *store.Tx) error {
		return tenant.Take(tx, cloud.Tenant{Org: web.Org, Project: id}, kind, more, less, nothing)
	})
}

func nothing(cloud.ProjectID) (tenant.Amount, error) { return tenant.Amount{}, nil }

func (w *world) orgUsed() (sum tenant.Amount) {
	require.NoError(w.t, w.s.View(w.t.Context(), func(v *store.View) (err error) {
		sum, err = tenant.OrgUsed(v, web.Org)
		return err
	}))
	return sum
}

// TestOrgQuotaIsSharedByItsProjects checks that the quota of an org limits the sum of its projects' usage, including
// that of projects without a quota.
func TestOrgQuotaIsSharedByItsProjects(t *testing.T) {
	w := newWorld(t)
	one := tenant.Amount{VCPUs: 2, MemoryMiB: 1024, VMs: 1}
	w.limitOrg(tenant.Quota{VCPUs: upTo(4), Images: upTo(1)})
	_, err := w.create(web.Org, "unlimited")
	require.NoError(t, err)
	require.NoError(t, w.take(one, tenant.Amount{}))
	require.NoError(t, w.takeIn("unlimited", tenant.Machines, one, tenant.Amount{}))
	err = w.takeIn("unlimited", tenant.Machines, one, tenant.Amount{})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.EqualError(t, err, "the quota of org acme (shared by its projects) allows 4 vcpus: 4 are used, 2 more are asked for")
	require.NoError(t, w.takeIn("unlimited", tenant.Images, tenant.Amount{Images: 1}, tenant.Amount{}))
	require.ErrorContains(t, w.takeIn("web", tenant.Images, tenant.Amount{Images: 1}, tenant.Amount{}), "allows 1 images")
	require.Equal(t, tenant.Amount{VCPUs: 4, MemoryMiB: 2048, VMs: 2, Images: 1, Projects: 2}, w.orgUsed())

	w.limitOrg(tenant.Quota{VCPUs: upTo(1)})
	require.NoError(t, w.takeIn("web", tenant.Machines, tenant.Amount{VCPUs: 1}, tenant.Amount{VCPUs: 2}), "only resources whose use grows are checked")
	require.NoError(t, w.do(func(tx *store.Tx) error {
		return tenant.Give(tx, cloud.Tenant{Org: web.Org, Project: "unlimited"}, tenant.Machines, one)
	}))
	require.Equal(t, uint64(1), w.orgUsed().VCPUs)
	require.True(t, fault.Is(w.do(func(tx *store.Tx) error { return tenant.SetOrgQuota(tx, "nowhere", tenant.Quota{}) }), fault.NotFound))
}

// TestProjectsOfAnOrgAreLimited checks that an org whose quota sets no limit for projects can have DefaultProjects
// projects and no more.
func TestProjectsOfAnOrgAreLimited(t *testing.T) {
	w := newWorld(t)
	for i := 1; i < tenant.DefaultProjects; i++ {
		_, err := w.create(web.Org, cloud.ProjectID(fmt.Sprintf("p%d", i)))
		require.NoError(t, err)
	}
	_, err := w.create(web.Org, "more")
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.EqualError(t, err, "the quota of org acme (shared by its projects) allows 100 projects: 100 are used, 1 more are asked for")
	require.NoError(t, w.remove("p1"))
	_, err = w.create(web.Org, "more")
	require.NoError(t, err)
	w.limitOrg(tenant.Quota{Projects: upTo(101)})
	_, err = w.create(web.Org, "even-more")
	require.NoError(t, err)
	w.limitOrg(tenant.Quota{Projects: upTo(0)})
	_, err = w.create(web.Org, "last")
	require.ErrorContains(t, err, "allows 0 projects: 101 are used")

	err = w.do(func(tx *store.Tx) error { return tenant.SetQuota(tx, "web", tenant.Quota{Projects: upTo(1)}) })
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
}

// TestOrgUsageOfOldRecordsIsCounted checks that, without a usage record of an org, the org's usage is the sum of its
// projects' usage records or, for projects without one, of their objects.
func TestOrgUsageOfOldRecordsIsCounted(t *testing.T) {
	s := storetest.Memory(t, time.Now)
	w := &world{t, s}
	require.NoError(t, w.do(func(tx *store.Tx) error {
		tenant.Orgs.Put(tx, &tenant.Org{ID: web.Org}, "acme")
		for _, p := range []tenant.Project{{ID: "web", Org: "acme"}, {ID: "old", Org: "acme"}, {ID: "lair", Org: "evil"}, {ID: "gone", Org: "acme", DeletedAt: 1}} {
			tenant.Projects.Put(tx, &p, string(p.ID))
		}
		return nil
	}))
	has := func(id cloud.ProjectID) (tenant.Amount, error) {
		return map[cloud.ProjectID]tenant.Amount{"web": {VMs: 3}, "old": {VMs: 4}, "lair": {VMs: 50}}[id], nil
	}
	take := func(more uint64) error {
		return w.do(func(tx *store.Tx) error {
			return tenant.Take(tx, web, tenant.Machines, tenant.Amount{VMs: more}, tenant.Amount{}, has)
		})
	}
	w.limitOrg(tenant.Quota{VMs: upTo(8)})
	require.ErrorContains(t, take(2), "7 are used, 2 more")
	require.NoError(t, take(1))
	require.ErrorContains(t, take(1), "8 are used, 1 more")
	require.Equal(t, tenant.Amount{VMs: 8, Projects: 2}, w.orgUsed())
}

// TestLimitCountsExistingResources checks that a limit set for an org includes what its projects used while there was
// no limit, also when the limit is removed and set again.
func TestLimitCountsExistingResources(t *testing.T) {
	w := newWorld(t)
	_, err := w.create(web.Org, "other")
	require.NoError(t, err)
	one := tenant.Amount{VMs: 1}
	for round := range uint64(3) {
		for _, id := range []cloud.ProjectID{"web", "other"} {
			require.NoError(t, w.takeIn(id, tenant.Machines, one, tenant.Amount{}))
		}
		used := 2*round + 2
		require.Equal(t, used, w.orgUsed().VMs)
		w.limitOrg(tenant.Quota{VMs: upTo(used)})
		require.ErrorContains(t, w.takeIn("other", tenant.Machines, one, tenant.Amount{}), fmt.Sprintf("allows %d vms: %d are used", used, used))
		require.NoError(t, w.takeIn("web", tenant.Machines, tenant.Amount{}, one))
		require.NoError(t, w.takeIn("other", tenant.Machines, one, tenant.Amount{}), "the limit is no longer reached")
		require.Equal(t, used, w.orgUsed().VMs)
		w.limitOrg(tenant.Quota{Images: upTo(0)})
	}
}
