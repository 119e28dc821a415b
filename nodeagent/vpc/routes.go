package vpc

import (
	"cmp"
	"maps"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// addRoutes adds the routes of the subnets' route tables. It must be called after addExternal. A route to a peering
// that is not ACTIVE drops packets.
func (w *wanted) addRoutes(one *vpcTable) {
	index := map[cloud.SubnetID]*cloud.HostSubnet{}
	for i := range w.Subnets {
		index[w.Subnets[i].ID] = &w.Subnets[i]
	}
	seen := map[cloud.SubnetID]bool{}
	for _, key := range slices.Sorted(maps.Keys(one.routes)) {
		table := one.routes[key]
		for _, id := range table.Subnets {
			s := index[id]
			switch {
			case s == nil:
				continue
			case seen[id]:
				w.problem("route table %s: subnet %s has another table", key, id)
				continue
			}
			seen[id] = true
			s.Routes = w.routes(one, table)
		}
	}
}

// routes returns the routes of a table with the addresses of their targets.
func (w *wanted) routes(one *vpcTable, table *cloud.RouteTable) []cloud.HostRoute {
	var out []cloud.HostRoute
	for _, r := range table.Routes {
		route := cloud.HostRoute{Destination: r.Destination, Target: r.Target}
		switch r.Target {
		case cloud.RouteBlackhole:
		case cloud.RoutePort:
			p := one.ports[cloud.PortID(r.ID)]
			if p != nil {
				route.Via = p.IP
				if r.Destination.Addr().Is6() {
					route.Via = p.IP6
				}
			}
			if !route.Via.IsValid() || !w.hasSubnetOf(route) {
				w.problem("route table %s: the target of the route for %s has no address of its IP version",
					table.ID, r.Destination)
				continue
			}
		case cloud.RoutePeering:
			route.Peering = cloud.PeeringID(r.ID)
		case cloud.RouteNAT:
			n := one.nats[cloud.NATGatewayID(r.ID)]
			if n == nil {
				continue
			}
			w.routeToGateway(&route, n)
		default:
			continue
		}
		if slices.ContainsFunc(out, func(o cloud.HostRoute) bool { return o.Destination == r.Destination }) {
			w.problem("route table %s has two routes for %s", table.ID, r.Destination)
			continue
		}
		out = append(out, route)
	}
	slices.SortFunc(out, func(a, b cloud.HostRoute) int {
		return cmp.Or(a.Destination.Addr().Compare(b.Destination.Addr()), a.Destination.Bits()-b.Destination.Bits())
	})
	return out
}

// hasSubnetOf reports whether the next hop of a route is in a subnet of the VPC.
func (w *wanted) hasSubnetOf(r cloud.HostRoute) bool {
	return slices.ContainsFunc(w.Subnets, func(s cloud.HostSubnet) bool {
		return s.CIDR.Contains(r.Via) || s.CIDR6.IsValid() && s.CIDR6.Contains(r.Via)
	})
}
