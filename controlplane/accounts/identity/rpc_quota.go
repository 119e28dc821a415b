package identity

import (
	"context"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func (r *server) SetQuota(ctx context.Context, in *identityv1.SetQuotaRequest) (*identityv1.QuotaStatus, error) {
	at, err := auth.Admit(ctx, service+"SetQuota", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return nil, err
	}
	if at.Project != "" {
		err = cloud.CheckCallerID("project_id", string(at.Project))
	} else {
		err = cloud.CheckCallerID("org_id", string(at.Org))
	}
	if err != nil {
		return nil, err
	}
	if _, err := setQuotaCommand.Call(ctx, r.s.opts.Commands, newQuota{at, quotaOf(in.GetQuota())}); err != nil {
		return nil, err
	}
	return r.s.quota(ctx, at, false)
}

func (r *server) GetQuota(ctx context.Context, in *identityv1.GetQuotaRequest) (*identityv1.QuotaStatus, error) {
	at, err := auth.Admit(ctx, service+"GetQuota", in.GetOrgId(), in.GetProjectId())
	if err != nil {
		return nil, err
	}
	return r.s.quota(ctx, at, readsOrgQuota(auth.CallerOf(ctx), at))
}

func (r *server) GetDefaultQuota(ctx context.Context, _ *identityv1.GetDefaultQuotaRequest) (*identityv1.DefaultQuota, error) {
	if err := admit(ctx, "GetDefaultQuota"); err != nil {
		return nil, err
	}
	return r.s.defaultQuota(ctx)
}

func (r *server) SetDefaultQuota(ctx context.Context, in *identityv1.SetDefaultQuotaRequest) (*identityv1.DefaultQuota, error) {
	if err := admit(ctx, "SetDefaultQuota"); err != nil {
		return nil, err
	}
	if _, err := setDefaultQuotaCommand.Call(ctx, r.s.opts.Commands, quotaOf(in.GetQuota())); err != nil {
		return nil, err
	}
	return r.s.defaultQuota(ctx)
}

// readsOrgQuota reports whether the caller c may read the quota of the org in at. This requires a role in the whole org
// or the whole cloud, and a token that is not limited to a project.
func readsOrgQuota(c *cloud.Caller, at cloud.Tenant) bool {
	return c.Scope.Project == "" &&
		(c.Has(cloud.OrgAdmin, cloud.Tenant{Org: at.Org}) || c.Has(cloud.SystemAdmin, cloud.Tenant{}) || c.Has(cloud.BillingAdmin, cloud.Tenant{}))
}

func quotaOf(q *identityv1.Quota) tenant.Quota {
	if q == nil {
		return tenant.Quota{}
	}
	return tenant.Quota{
		VCPUs: q.Vcpus, MemoryMiB: q.MemoryMib, StorageGiB: q.StorageGib, VMs: q.Vms, Images: q.Images, Projects: q.Projects,
		VPCs: q.Vpcs, Subnets: q.Subnets, Ports: q.Ports, SecurityGroups: q.SecurityGroups, FloatingIPs: q.FloatingIps, ServiceIPs: q.ServiceIps,
		Volumes: q.Volumes, VolumeGiB: q.VolumeGib, ImageMiB: q.ImageMib, Snapshots: q.Snapshots,
	}
}
