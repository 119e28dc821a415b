package tenant

import (
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// DefaultProjects is the maximum number of projects of an org whose quota sets no maximum. It is enough for a
// department, and too few for an org:admin to fill the members' disks.
const DefaultProjects = 100

// orgProjects is the kind of usage that counts the projects of an org. Only orgs have usage of this kind.
const orgProjects Kind = "projects"

// orgKinds are the kinds of usage that are counted for an org.
var orgKinds = append([]Kind{orgProjects}, kinds...)

// limits reports whether the quota of an org limits any quantity of the given kind. For orgProjects it is always true,
// because DefaultProjects applies if the quota sets no limit.
func (q *Quota) limits(kind Kind) bool {
	switch kind {
	case Machines:
		return q.VCPUs != nil || q.MemoryMiB != nil || q.StorageGiB != nil || q.VMs != nil
	case Images:
		return q.Images != nil || q.ImageMiB != nil
	case Networks:
		return q.VPCs != nil || q.Subnets != nil || q.Ports != nil || q.SecurityGroups != nil || q.FloatingIPs != nil || q.ServiceIPs != nil
	case Storage:
		return q.Volumes != nil || q.VolumeGiB != nil || q.Snapshots != nil
	}
	return true
}

var (
	orgQuotas = store.NewTable[Quota]("org-quota")
	orgUsages = store.NewTable[Amount]("org-usage")
)

// checkProject returns InvalidArgument if the quota q of a project limits the number of projects. Only the quota of an
// org can do that.
func (q *Quota) checkProject() error {
	if q.Projects != nil {
		return fault.Invalid("quota.projects", "only the quota of an org limits projects: leave project_id empty to set that")
	}
	return nil
}

// setOrgDefaults sets the limit of projects if the quota of an org does not set it.
func (q *Quota) setOrgDefaults() {
	if q.Projects == nil {
		limit := uint64(DefaultProjects)
		q.Projects = &limit
	}
}

// takeOfOrg adds the parameter more to the usage of an org and subtracts the parameter less. It returns an error if the
// org's quota does not allow that. For a kind that the quota does not limit, takeOfOrg stores nothing. So creating VMs
// in several projects of the org causes no conflicts on one usage record.
func takeOfOrg(tx *store.Tx, id cloud.OrgID, kind Kind, more, less Amount, counted Counted) error {
	q, err := OrgQuotaOf(tx, id)
	if err != nil {
		return err
	}
	if !q.limits(kind) {
		return nil
	}
	used, err := orgUsageOf(tx.GuardedUnless(mutant.StaleQuota), id, kind, counted)
	if err != nil {
		return err
	}
	q.setOrgDefaults()
	if err := q.fits(fmt.Sprintf("org %s (shared by its projects)", id), used, more, less); err != nil {
		return err
	}
	used = used.Minus(less).Plus(more)
	orgUsages.Put(tx, &used, string(id), string(kind))
	return nil
}

// giveToOrg subtracts the parameter less from the usage of an org. If the org has no usage record of the kind,
// giveToOrg does nothing.
func giveToOrg(tx *store.Tx, id cloud.OrgID, kind Kind, less Amount) error {
	used, err := orgUsages.Get(tx, string(id), string(kind))
	if err != nil || used == nil {
		return err
	}
	left := used.Minus(less)
	orgUsages.Put(tx, &left, string(id), string(kind))
	return nil
}

// orgUsageOf returns the usage of an org of one kind. It reads the org's usage record. There is none if the kind was
// not limited until now, or if an earlier version wrote the store. orgUsageOf then adds up the usage of the org's
// projects. For a project without a usage record it calls the function counted. If counted is nil, such a project
// counts as 0.
func orgUsageOf(r store.Reader, id cloud.OrgID, kind Kind, counted Counted) (sum Amount, err error) {
	recorded, err := orgUsages.Get(r, string(id), string(kind))
	if err != nil {
		return sum, err
	}
	if recorded != nil {
		return *recorded, nil
	}
	all, _, err := Projects.List(r, 0)
	if err != nil {
		return sum, err
	}
	for _, p := range all {
		if p.Value.Org != id || p.Value.DeletedAt != 0 {
			continue
		}
		if kind == orgProjects {
			sum.Projects++
			continue
		}
		used, err := usages.Get(r, string(p.Value.ID), string(kind))
		if err != nil {
			return sum, err
		}
		switch {
		case used != nil:
			sum = sum.Plus(*used)
		case counted != nil:
			n, err := counted(p.Value.ID)
			if err != nil {
				return sum, err
			}
			sum = sum.Plus(n)
		}
	}
	return sum, nil
}

// OrgUsed returns the number of projects of an org and the usage of all its projects together, according to the usage
// records.
func OrgUsed(r store.Reader, id cloud.OrgID) (sum Amount, err error) {
	for _, kind := range orgKinds {
		used, err := orgUsageOf(r, id, kind, nil)
		if err != nil {
			return sum, err
		}
		sum = sum.Plus(used)
	}
	return sum, nil
}

// OrgQuotaOf returns the quota that was set for an org. If none was set, it returns a Quota without limits. It does not
// insert DefaultProjects.
func OrgQuotaOf(r store.Reader, id cloud.OrgID) (Quota, error) {
	q, err := orgQuotas.Get(r, string(id))
	if err != nil || q == nil {
		return Quota{}, err
	}
	return *q, nil
}

// SetOrgQuota replaces the quota of an existing org. It deletes the org's usage records of the kinds that the new quota
// does not limit, because these records are no longer updated.
func SetOrgQuota(tx *store.Tx, id cloud.OrgID, q Quota) error {
	o, err := FindOrg(tx, id)
	if err != nil {
		return err
	}
	if o == nil {
		return NoOrg(id)
	}
	orgQuotas.Put(tx, &q, string(id))
	for _, kind := range orgKinds {
		if !q.limits(kind) {
			orgUsages.Delete(tx, string(id), string(kind))
		}
	}
	return nil
}
