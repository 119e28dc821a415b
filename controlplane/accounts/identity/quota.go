package identity

import (
	"context"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// defaultQuota returns the quota that new projects get.
func (s *Service) defaultQuota(ctx context.Context) (*identityv1.DefaultQuota, error) {
	out := &identityv1.DefaultQuota{}
	err := s.opts.Store.View(ctx, func(v *store.View) error {
		q, err := tenant.DefaultQuota(v)
		out.Quota = quotaOnWire(q)
		return err
	})
	return out, err
}

// quota returns the quota and the usage of a project. If withOrg is true, it adds those of the org. If no project is
// named, it returns only those of the org.
func (s *Service) quota(ctx context.Context, at cloud.Tenant, withOrg bool) (out *identityv1.QuotaStatus, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if at.Project == "" {
			out, err = orgQuota(v, at.Org)
			return err
		}
		if err := s.ofOrg(v, at); err != nil {
			return err
		}
		org, err := tenant.OrgOf(v, at.Project)
		if err != nil {
			return err
		}
		q, err := tenant.QuotaOf(v, at.Project)
		if err != nil {
			return err
		}
		used, err := tenant.Used(v, at.Project)
		if err != nil {
			return err
		}
		out = &identityv1.QuotaStatus{OrgId: string(org), ProjectId: string(at.Project), Quota: quotaOnWire(q), Used: usageOnWire(used)}
		if withOrg {
			out.Org, err = orgQuota(v, org)
		}
		return err
	})
	return out, err
}

func orgQuota(v *store.View, id cloud.OrgID) (*identityv1.QuotaStatus, error) {
	o, err := tenant.FindOrg(v, id)
	if err != nil {
		return nil, err
	}
	if o == nil {
		return nil, tenant.NoOrg(id)
	}
	q, err := tenant.OrgQuotaOf(v, id)
	if err != nil {
		return nil, err
	}
	used, err := tenant.OrgUsed(v, id)
	if err != nil {
		return nil, err
	}
	out := &identityv1.QuotaStatus{OrgId: string(id), Quota: quotaOnWire(q), Used: usageOnWire(used)}
	out.Used.Projects = &used.Projects
	return out, nil
}

func quotaOnWire(q tenant.Quota) *identityv1.Quota {
	return &identityv1.Quota{
		Vcpus: q.VCPUs, MemoryMib: q.MemoryMiB, StorageGib: q.StorageGiB, Vms: q.VMs, Images: q.Images, Projects: q.Projects,
		Vpcs: q.VPCs, Subnets: q.Subnets, Ports: q.Ports, SecurityGroups: q.SecurityGroups, FloatingIps: q.FloatingIPs, ServiceIps: q.ServiceIPs,
		Volumes: q.Volumes, VolumeGib: q.VolumeGiB, ImageMib: q.ImageMiB, Snapshots: q.Snapshots,
	}
}

func usageOnWire(a tenant.Amount) *identityv1.Usage {
	return &identityv1.Usage{
		Vcpus: a.VCPUs, MemoryMib: a.MemoryMiB, StorageGib: a.StorageGiB, Vms: a.VMs, Images: a.Images,
		Vpcs: a.VPCs, Subnets: a.Subnets, Ports: a.Ports, SecurityGroups: a.SecurityGroups, FloatingIps: a.FloatingIPs, ServiceIps: a.ServiceIPs,
		Volumes: a.Volumes, VolumeGib: a.VolumeGiB, ImageMib: a.ImageMiB, Snapshots: a.Snapshots,
	}
}
