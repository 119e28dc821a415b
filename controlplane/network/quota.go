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
	return tenant.Take(
		tx, t, tenant.Networks, more, quantity{}, func(p cloud.ProjectID) (quantity, error) { return count(tx, p) },
	)
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
		{&sum.FloatingIPs, func() (int, error) { return countExternal(r, p) }},
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

// countExternal returns the number of addresses of external networks that a project has: floating IPs, and NAT gateways
// with an address of their own.
func countExternal(r store.Reader, p cloud.ProjectID) (int, error) {
	sum, err := length(r, floatingIPs, p)
	if err != nil {
		return 0, err
	}
	gateways, _, err := natGateways.List(r, 0, string(p))
	for _, g := range gateways {
		if g.Value.Address.IsValid() {
			sum++
		}
	}
	return sum, err
}

func length[T any](r store.Reader, table store.Table[T], p cloud.ProjectID) (int, error) {
	all, _, err := table.List(r, 0, string(p))
	return len(all), err
}
