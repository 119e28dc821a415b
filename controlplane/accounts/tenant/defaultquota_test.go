package tenant_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func (w *world) quota(id cloud.ProjectID) (q tenant.Quota) {
	require.NoError(w.t, w.s.View(w.t.Context(), func(v *store.View) (err error) {
		q, err = tenant.QuotaOf(v, id)
		return err
	}))
	return q
}

// TestNewProjectsGetTheDefaultQuota checks that a new project gets the default for each limit that its creator does not
// set, and that a later change of the default does not change the project.
func TestNewProjectsGetTheDefaultQuota(t *testing.T) {
	w := newWorld(t)
	setDefault := func(q tenant.Quota) {
		require.NoError(t, w.do(func(tx *store.Tx) error { return tenant.SetDefaultQuota(tx, q) }))
	}
	setDefault(tenant.Quota{VCPUs: upTo(8), VMs: upTo(4)})
	require.Equal(t, tenant.Quota{}, w.quota(web.Project), "the project is older than the default")
	_, err := w.create(web.Org, "new")
	require.NoError(t, err)
	require.Equal(t, tenant.Quota{VCPUs: upTo(8), VMs: upTo(4)}, w.quota("new"), "a new project did not get the default quota")
	require.NoError(t, w.do(func(tx *store.Tx) error {
		_, err := tenant.CreateProject(tx, cloud.Tenant{Org: web.Org, Project: "small"}, "", tenant.Quota{VMs: upTo(1), Images: upTo(2)})
		return err
	}))
	require.Equal(t, tenant.Quota{VCPUs: upTo(8), VMs: upTo(1), Images: upTo(2)}, w.quota("small"))
	setDefault(tenant.Quota{})
	require.Equal(t, tenant.Quota{VCPUs: upTo(8), VMs: upTo(4)}, w.quota("new"))
	err = w.do(func(tx *store.Tx) error { return tenant.SetDefaultQuota(tx, tenant.Quota{Projects: upTo(1)}) })
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
}

// TestDefaultQuotaBoundsRequests checks which quotas of new projects exceed the default.
func TestDefaultQuotaBoundsRequests(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.do(func(tx *store.Tx) error {
		return tenant.SetDefaultQuota(tx, tenant.Quota{VCPUs: upTo(8), Images: upTo(0)})
	}))
	check := func(q tenant.Quota) error {
		return w.s.View(t.Context(), func(v *store.View) error { return tenant.CheckWithinDefault(v, q) })
	}
	for _, q := range []tenant.Quota{{}, {VCPUs: upTo(8)}, {VCPUs: upTo(0)}, {VMs: upTo(1000)}} {
		require.NoError(t, check(q))
	}
	err := check(tenant.Quota{VCPUs: upTo(9)})
	require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
	require.EqualError(t, err, "new projects get 8 vcpus: only system:admin can give a project more, but 9 are asked for")
	require.Error(t, check(tenant.Quota{Images: upTo(1)}))
}
