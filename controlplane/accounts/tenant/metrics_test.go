package tenant_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/metricstest"
)

// TestQuotaMetrics checks the limits and the usage of projects and orgs in the metrics, and which resources have series.
func TestQuotaMetrics(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	now := time.Unix(1_700_000_000, 0)
	w := &world{t, storetest.Memory(t, func() time.Time { return now })}
	require.NoError(t, w.do(func(tx *store.Tx) error {
		for _, org := range []cloud.OrgID{web.Org, "idle"} {
			if _, err := tenant.CreateOrg(tx, org, ""); err != nil {
				return err
			}
		}
		for id, q := range map[cloud.ProjectID]tenant.Quota{
			"web": {VCPUs: upTo(8), MemoryMiB: upTo(2048), StorageGiB: upTo(0)}, "free": {}, "gone": {VMs: upTo(7)},
		} {
			if _, err := tenant.CreateProject(tx, cloud.Tenant{Org: web.Org, Project: id}, "", q); err != nil {
				return err
			}
		}
		return tenant.DeleteProject(tx, "gone")
	}))
	w.limitOrg(tenant.Quota{Images: upTo(3), ImageMiB: upTo(100)})
	one := tenant.Amount{VCPUs: 2, MemoryMiB: 1024, VMs: 1}
	require.NoError(t, w.take(one, tenant.Amount{}))
	require.NoError(t, w.takeIn("free", tenant.Machines, one, tenant.Amount{}))
	require.NoError(t, w.takeIn("free", tenant.Images, tenant.Amount{Images: 1, ImageMiB: 5}, tenant.Amount{}))
	require.NoError(t, w.takeIn("free", tenant.Networks, tenant.Amount{VPCs: 2}, tenant.Amount{}))
	require.NoError(t, w.takeIn("free", tenant.Storage, tenant.Amount{Volumes: 1, VolumeGiB: 6}, tenant.Amount{}))

	leads := true
	c := tenant.NewQuotaCollector(w.s, func() bool { return leads })
	want := map[string]float64{
		"trivet_project_quota_limit acme web vcpus": 8, "trivet_project_quota_used acme web vcpus": 2,
		"trivet_project_quota_limit acme web memory_bytes": 2048 * mib, "trivet_project_quota_used acme web memory_bytes": 1024 * mib,
		"trivet_project_quota_limit acme web storage_bytes": 0, "trivet_project_quota_used acme web storage_bytes": 0,
		"trivet_project_quota_used acme web vms": 1,

		"trivet_project_quota_used acme free vcpus": 2, "trivet_project_quota_used acme free memory_bytes": 1024 * mib,
		"trivet_project_quota_used acme free vms": 1, "trivet_project_quota_used acme free images": 1,
		"trivet_project_quota_used acme free image_bytes": 5 * mib, "trivet_project_quota_used acme free volume_bytes": 6 * gib,
		"trivet_project_quota_used acme free vpcs": 2, "trivet_project_quota_limit acme free vpcs": tenant.DefaultVPCs,
		"trivet_project_quota_used acme free volumes": 1, "trivet_project_quota_limit acme free volumes": tenant.DefaultVolumes,

		"trivet_org_quota_used acme projects": 2, "trivet_org_quota_limit acme projects": tenant.DefaultProjects,
		"trivet_org_quota_used acme vcpus": 4, "trivet_org_quota_used acme memory_bytes": 2048 * mib, "trivet_org_quota_used acme vms": 2,
		"trivet_org_quota_used acme images": 1, "trivet_org_quota_limit acme images": 3,
		"trivet_org_quota_used acme image_bytes": 5 * mib, "trivet_org_quota_limit acme image_bytes": 100 * mib,
		"trivet_org_quota_used acme vpcs": 2, "trivet_org_quota_used acme volumes": 1, "trivet_org_quota_used acme volume_bytes": 6 * gib,
	}
	require.Equal(t, want, metricstest.Values(t, c))

	require.NoError(t, w.take(one, tenant.Amount{}))
	now = now.Add(29 * time.Second)
	require.Equal(t, want, metricstest.Values(t, c), "all quotas were read again before 30 seconds had passed")
	now = now.Add(time.Second)
	require.EqualValues(t, 4, metricstest.Values(t, c)["trivet_project_quota_used acme web vcpus"])
	leads = false
	require.Empty(t, metricstest.Values(t, c), "a member that does not lead exports quotas")
}
