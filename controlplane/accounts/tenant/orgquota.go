package tenant

import (
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// DefaultProjects is the limit of projects of an org whose quota sets none: enough for a department, and too few for an
// org:admin to fill the members' disks.
const DefaultProjects = 100

// orgProjects is the kind under which the number of an org's projects is counted. Projects have no usage of this kind.
const orgProjects Kind = "projects"

// orgKinds are the kinds of usage that are counted for an org.
var orgKinds = append([]Kind{orgProjects}, kinds...)

// limits reports whether an org's quota sets a limit for any quantity that is counted under a kind. The number of
// projects is always limited.
func (q *Quota) limits(kind Kind) bool {
	switch kind {
	case Machines:
		return q.VCPUs != nil || q.MemoryMiB != nil || q.StorageGiB != nil || q.VMs != nil
	case Pictures:
		return q.Images != nil
	}
	return true
}

var (
	orgQuotas = store.NewTable[Quota]("org-quota")
	orgUsages = store.NewTable[Amount]("org-usage")
)

// checkProject returns InvalidArgument if a project's quota sets a limit that only an org can have.
func (q *Quota) checkProject() error {
	if q.Projects != nil {
		return fault.Invalid("quota.projects", "only the quota of an org limits projects: leave project_id empty to set that")
	}
	return nil
}

// takeOfOrg adds more to the usage of an org and subtracts less from it, if the org's quota allows it. It stores no
// usage record for kinds that the quota does not limit, so that creating VMs in its projects does not contend for that
// record.
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
	if q.Projects == nil {
		limit := uint64(DefaultProjects)
		q.Projects = &limit
	}
	if err := q.fits(fmt.Sprintf("org %s (shared by its projects)", id), used, more, less); err != nil {
		return err
	}
	used = used.Minus(less).Plus(more)
	orgUsages.Put(tx, &used, string(id), string(kind))
	return nil
}

// giveToOrg subtracts less from the usage of an org. If the org has no usage record of the kind, it writes nothing.
func giveToOrg(tx *store.Tx, id cloud.OrgID, kind Kind, less Amount) error {
	used, err := orgUsages.Get(tx, string(id), string(kind))
	if err != nil || used == nil {
		return err
	}
	left := used.Minus(less)
	orgUsages.Put(tx, &left, string(id), string(kind))
	return nil
}

// orgUsageOf returns what an org uses of a kind. If there is no usage record (the kind was not limited until now, or an
// earlier version stored none), it sums the usage of the org's projects. For a project without a usage record it calls
// counted; if counted is nil, such a project counts as 0.
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

// OrgUsed returns the usage of all projects of an org together, from the usage records, and the number of projects.
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

// OrgQuotaOf returns the quota that was set for an org, or a Quota without limits. It does not add DefaultProjects.
func OrgQuotaOf(r store.Reader, id cloud.OrgID) (Quota, error) {
	q, err := orgQuotas.Get(r, string(id))
	if err != nil || q == nil {
		return Quota{}, err
	}
	return *q, nil
}

// SetOrgQuota replaces the quota of an org that exists. It deletes the usage records of kinds that the quota no longer
// limits, because they are no longer updated.
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
