package network

import (
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// quantity is an amount of network resources.
type quantity = tenant.Amount

// chargeQuota counts new resources in the quotas of the project and of its org. It returns ResourceExhausted if they
// would exceed one of them.
func chargeQuota(tx *store.Tx, t cloud.Tenant, more quantity) error {
	return tenant.Take(tx, t, tenant.Networks, more, quantity{}, func(p cloud.ProjectID) (quantity, error) { return count(tx, p) })
}

// returnQuota counts the resources as deleted.
func returnQuota(tx *store.Tx, t cloud.Tenant, less quantity) error {
	return tenant.Give(tx, t, tenant.Networks, less)
}

// count returns the resources of a project.
func count(r store.Reader, p cloud.ProjectID) (sum quantity, err error) {
	for _, c := range []struct {
		number *uint64
		list   func() (int, error)
	}{
		{&sum.VPCs, func() (int, error) { return length(r, vpcs, p) }},
		{&sum.Subnets, func() (int, error) { return length(r, subnets, p) }},
		{&sum.Ports, func() (int, error) { return length(r, ports, p) }},
		{&sum.SecurityGroups, func() (int, error) { return length(r, groups, p) }},
		{&sum.FloatingIPs, func() (int, error) { return length(r, floatingIPs, p) }},
		{&sum.ServiceIPs, func() (int, error) { return length(r, serviceIPs, p) }},
	} {
		n, err := c.list()
		if err != nil {
			return sum, err
		}
		*c.number = uint64(n)
	}
	return sum, nil
}

func length[T any](r store.Reader, table store.Table[T], p cloud.ProjectID) (int, error) {
	all, _, err := table.List(r, 0, string(p))
	return len(all), err
}

// CheckNone returns FailedPrecondition if the project t.Project still has VPCs or floating IPs. Such a project cannot be deleted. If
// t.Project is empty it returns nil, because an org cannot be deleted while it has projects.
func CheckNone(r store.Reader, t cloud.Tenant) error {
	if t.Project == "" {
		return nil
	}
	var users []string
	all, _, err := vpcs.List(r, maxNamedUsers+1, string(t.Project))
	if err != nil {
		return err
	}
	for _, v := range all {
		users = append(users, label(kindVPC, v.Value.Name, string(v.Value.ID)))
	}
	addresses, _, err := floatingIPs.List(r, maxNamedUsers+1, string(t.Project))
	if err != nil {
		return err
	}
	for _, f := range addresses {
		users = append(users, label(kindFloating, f.Value.Name, string(f.Value.ID)))
	}
	if len(users) == 0 {
		return nil
	}
	return inUse("project "+string(t.Project), users)
}
