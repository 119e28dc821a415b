package tenant_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var web = cloud.Tenant{Org: "acme", Project: "web"}

type world struct {
	t *testing.T
	s *store.Store
}

func newWorld(t *testing.T) *world {
	w := &world{t, storetest.Memory(t, time.Now)}
	require.NoError(t, w.do(func(tx *store.Tx) error {
		if _, err := tenant.CreateOrg(tx, web.Org, "Acme"); err != nil {
			return err
		}
		_, err := tenant.CreateProject(tx, web, "", tenant.Quota{})
		return err
	}))
	return w
}

func (w *world) do(f func(tx *store.Tx) error) error {
	_, err := w.s.Update(w.t.Context(), f)
	return err
}

func (w *world) take(more, less tenant.Amount) error {
	return w.do(func(tx *store.Tx) error {
		return tenant.Take(tx, web, tenant.Machines, more, less, func(cloud.ProjectID) (tenant.Amount, error) { return tenant.Amount{}, nil })
	})
}

func (w *world) used() (sum tenant.Amount) {
	require.NoError(w.t, w.s.View(w.t.Context(), func(v *store.View) (err error) {
		sum, err = tenant.Used(v, web.Project)
		return err
	}))
	return sum
}

func upTo(n uint64) *uint64 { return &n }

// TestQuota checks that Take adds usage up to the quota, and that beyond it Take returns an error with the numbers and
// changes nothing.
func TestQuota(t *testing.T) {
	w := newWorld(t)
	one := tenant.Amount{VCPUs: 2, MemoryMiB: 1024, StorageGiB: 10, VMs: 1}
	require.NoError(t, w.take(one, tenant.Amount{}), "a project without a quota must have no limit")
	require.NoError(t, w.do(func(tx *store.Tx) error {
		return tenant.SetQuota(tx, web.Project, tenant.Quota{VCPUs: upTo(4), MemoryMiB: upTo(2048), VMs: upTo(2)})
	}))
	require.NoError(t, w.take(one, tenant.Amount{}), "usage up to the quota must be allowed")
	err := w.take(one, tenant.Amount{})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.EqualError(t, err, "the quota of project web allows 4 vcpus: 4 are used, 2 more are asked for")
	f, _ := fault.From(err)
	require.Equal(t, map[string]any{"quota": "vcpus", "used": uint64(4), "limit": uint64(4)}, f.Details)
	require.Equal(t, "QUOTA_EXCEEDED", f.Reason)
	require.Equal(t, one.Plus(one), w.used())

	grown := one
	grown.VCPUs = 3
	require.True(t, fault.Is(w.take(grown, one), fault.ResourceExhausted), "a resource that grows must be refused if the difference exceeds the quota")
	require.NoError(t, w.do(func(tx *store.Tx) error {
		return tenant.SetQuota(tx, web.Project, tenant.Quota{VCPUs: upTo(1), VMs: upTo(0)})
	}), "a quota below the present usage can be set")
	shrunk := one
	shrunk.VCPUs = 1
	require.NoError(t, w.take(shrunk, one), "a resource that does not grow must not be checked against the quota")
	require.ErrorContains(t, w.take(tenant.Amount{VMs: 1}, tenant.Amount{}), "allows 0 vms")
	require.NoError(t, w.take(tenant.Amount{StorageGiB: 1 << 60}, tenant.Amount{}), "a resource without a limit must stay unlimited")
	require.NoError(t, w.do(func(tx *store.Tx) error { return tenant.Give(tx, web, tenant.Machines, w.used()) }))
	require.Zero(t, w.used())
}

// TestQuotaChecksTheOrg checks that Take returns NotFound, and adds no usage, if the tenant names another org than the
// project's.
func TestQuotaChecksTheOrg(t *testing.T) {
	w := newWorld(t)
	err := w.do(func(tx *store.Tx) error {
		return tenant.Take(tx, cloud.Tenant{Org: "evil", Project: web.Project}, tenant.Machines, tenant.Amount{VMs: 1}, tenant.Amount{}, nil)
	})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	require.Zero(t, w.used())
}

// TestQuotaDoesNotOverflow checks that Fits decides correctly for amounts near the largest uint64.
func TestQuotaDoesNotOverflow(t *testing.T) {
	q := tenant.Quota{MemoryMiB: upTo(100)}
	const all = ^uint64(0)
	for _, c := range []struct {
		used, more, less uint64
		fits             bool
	}{
		{0, 100, 0, true}, {0, 101, 0, false}, {50, all, 0, false}, {all, 1, 0, false}, {all, all, all, true}, {100, 10, 10, true},
		{100, 11, 10, false}, {200, 5, 10, true}, {0, 100, 200, true},
	} {
		err := q.Fits("web", tenant.Amount{MemoryMiB: c.used}, tenant.Amount{MemoryMiB: c.more}, tenant.Amount{MemoryMiB: c.less})
		require.Equal(t, c.fits, err == nil, "%+v: %v", c, err)
	}
}

// TestUsageIsCountedOnce checks that Take calls its Counted function only if the project has no usage record yet.
func TestUsageIsCountedOnce(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.do(func(tx *store.Tx) error {
		tenant.Projects.Put(tx, &tenant.Project{ID: "old", Org: "acme"}, "old")
		return nil
	}))
	counted := 0
	for range 2 {
		require.NoError(t, w.do(func(tx *store.Tx) error {
			return tenant.Take(tx, cloud.Tenant{Org: "acme", Project: "old"}, tenant.Machines, tenant.Amount{VMs: 1}, tenant.Amount{}, func(cloud.ProjectID) (tenant.Amount, error) {
				counted++
				return tenant.Amount{VMs: 7}, nil
			})
		}))
	}
	require.Equal(t, 1, counted)
	require.NoError(t, w.s.View(t.Context(), func(v *store.View) error {
		sum, err := tenant.Used(v, "old")
		require.Equal(t, tenant.Amount{VMs: 9}, sum)
		return err
	}))
}

// TestIDsAreUnique checks that the ID of a deleted org cannot be used again, and that of a project not while the
// project exists.
func TestIDsAreUnique(t *testing.T) {
	w := newWorld(t)
	create := func(org cloud.OrgID, id cloud.ProjectID) error {
		return w.do(func(tx *store.Tx) error {
			_, err := tenant.CreateProject(tx, cloud.Tenant{Org: org, Project: id}, "", tenant.Quota{})
			return err
		})
	}
	remove := func() error { return w.do(func(tx *store.Tx) error { return tenant.DeleteProject(tx, web.Project) }) }
	removeOrg := func() error { return w.do(func(tx *store.Tx) error { return tenant.DeleteOrg(tx, web.Org) }) }
	require.NoError(t, w.do(func(tx *store.Tx) error { _, err := tenant.CreateOrg(tx, "other", ""); return err }))
	require.ErrorContains(t, create("other", web.Project), "is taken: IDs are unique in the cloud")
	require.ErrorContains(t, create("nowhere", "x"), "no org nowhere")
	require.ErrorContains(t, removeOrg(), "has project web")

	require.NoError(t, w.take(tenant.Amount{VMs: 1, VCPUs: 2}, tenant.Amount{}))
	require.EqualError(t, remove(), "project web still has 2 vcpus, 1 vms: delete them first")
	require.NoError(t, w.take(tenant.Amount{}, tenant.Amount{VMs: 1, VCPUs: 2}))
	require.NoError(t, remove())
	require.True(t, fault.Is(remove(), fault.NotFound))
	require.True(t, fault.Is(w.take(tenant.Amount{VMs: 1}, tenant.Amount{}), fault.NotFound), "nothing can be created in a deleted project")
	require.NoError(t, removeOrg())
	require.ErrorContains(t, w.do(func(tx *store.Tx) error { _, err := tenant.CreateOrg(tx, "acme", ""); return err }), "not used again")
	require.ErrorContains(t, create("acme", "later"), "no org acme")
}

// TestAdopt checks that Adopt completes the records of a version that had no calls to create orgs and projects, and
// that a second run changes nothing.
func TestAdopt(t *testing.T) {
	s := storetest.Memory(t, time.Now)
	for range 2 {
		_, err := s.Update(t.Context(), func(tx *store.Tx) error {
			if has, err := tenant.Projects.Has(tx, "default"); err != nil || !has {
				tenant.Projects.Put(tx, &tenant.Project{Org: "default"}, "default")
			}
			return tenant.Adopt(tx)
		})
		require.NoError(t, err)
	}
	require.NoError(t, s.View(t.Context(), func(v *store.View) error {
		p, err := tenant.Find(v, "default")
		require.NoError(t, err)
		require.Equal(t, cloud.ProjectID("default"), p.ID)
		o, err := tenant.FindOrg(v, "default")
		require.NotNil(t, o)
		return err
	}))
}
