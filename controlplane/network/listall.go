package network

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// ListAllSecurityGroups returns a page of the security groups of the org or project t, or of all
// projects if t is empty, and the token of the next page.
func (s *Service) ListAllSecurityGroups(ctx context.Context, t cloud.Tenant, p page) ([]*cloud.SecurityGroup, string, error) {
	return listAll(ctx, s, listing[cloud.SecurityGroup]{table: groups, t: t, page: p},
		func(n *cloud.SecurityGroup) cloud.Tenant { return cloud.Tenant{Org: n.Org, Project: n.Project} })
}

// ListAllRouteTables returns a page of the route tables of the org or project t, or of all
// projects if t is empty, and the token of the next page.
func (s *Service) ListAllRouteTables(ctx context.Context, t cloud.Tenant, p page) ([]*cloud.RouteTable, string, error) {
	return listAll(ctx, s, listing[cloud.RouteTable]{table: routeTables, t: t, page: p},
		func(n *cloud.RouteTable) cloud.Tenant { return cloud.Tenant{Org: n.Org, Project: n.Project} })
}

// ListAllNATGateways returns a page of the NAT gateways of the org or project t, or of all
// projects if t is empty, and the token of the next page.
func (s *Service) ListAllNATGateways(ctx context.Context, t cloud.Tenant, p page) ([]*cloud.NATGateway, string, error) {
	return listAll(ctx, s, listing[cloud.NATGateway]{table: natGateways, t: t, page: p},
		func(n *cloud.NATGateway) cloud.Tenant { return cloud.Tenant{Org: n.Org, Project: n.Project} })
}

// ListAllFloatingIPs returns a page of the floating IPs of the org or project t, or of all
// projects if t is empty, and the token of the next page.
func (s *Service) ListAllFloatingIPs(ctx context.Context, t cloud.Tenant, p page) ([]*cloud.FloatingIP, string, error) {
	return listAll(ctx, s, listing[cloud.FloatingIP]{table: floatingIPs, t: t, page: p},
		func(n *cloud.FloatingIP) cloud.Tenant { return cloud.Tenant{Org: n.Org, Project: n.Project} })
}

// ListAllServiceIPs returns a page of the service IPs of the org or project t, or of all projects if t is empty, and the
// token of the next page. The backends of a service IP with a selector are the present ones.
func (s *Service) ListAllServiceIPs(ctx context.Context, t cloud.Tenant, p page) ([]*cloud.ServiceIP, string, error) {
	all, next, err := listAll(ctx, s, listing[cloud.ServiceIP]{table: serviceIPs, t: t, page: p},
		func(n *cloud.ServiceIP) cloud.Tenant { return cloud.Tenant{Org: n.Org, Project: n.Project} })
	if err != nil {
		return nil, "", err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		for _, n := range all {
			if err := resolveBackends(v, n); err != nil {
				return err
			}
		}
		return nil
	})
	return all, next, err
}

// ListAllPeerings returns a page of the peerings that projects of the org t, or the project t, have proposed, or all
// projects if t is empty, and the token of the next page.
func (s *Service) ListAllPeerings(ctx context.Context, t cloud.Tenant, p page) ([]*cloud.Peering, string, error) {
	return listAll(ctx, s, listing[cloud.Peering]{table: peerings, t: t, page: p},
		func(n *cloud.Peering) cloud.Tenant { return cloud.Tenant{Org: n.Org, Project: n.Project} })
}
