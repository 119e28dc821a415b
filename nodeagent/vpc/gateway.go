package vpc

import (
	"slices"

	"github.com/trivet-cloud/trivet/nodeagent/edge"
	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// addNAT adds or replaces a NAT gateway, or a floating IP of a service IP. It does nothing if the tables have a later
// binding of the gateway, because n is then the binding to a host that the gateway has left. A floating IP that was
// attached to a port before is removed from the port.
func (t *tables) addNAT(n *cloud.NATGatewayOnHost, touched map[cloud.VPCID]bool) {
	if one := t.vpcs[t.owners[string(n.ID)]]; one != nil && n.OnOneHost() && !mutant.On(mutant.AnnounceTwice) {
		if had := one.nats[n.ID]; had != nil && had.BindingGeneration > n.BindingGeneration {
			return
		}
	}
	t.removeFloating(cloud.FloatingIPID(n.ID), touched)
	t.own(string(n.ID), n.VPC, touched).nats[n.ID] = n
}

// addGateway adds a NAT gateway that is on one host, or a floating IP of a service IP. It leaves out a gateway that has
// no host, or whose host has an unknown underlay address. The control plane sends the gateway again when both are
// known.
func (w *wanted) addGateway(t *tables, n *cloud.NATGatewayOnHost) {
	g := cloud.HostGateway{
		ID: n.ID, ServiceIP: n.ServiceIP, VNI: n.VNI, Default: n.Default,
		HostNAT: cloud.HostNAT{External: n.External, Address: n.Address},
	}
	switch {
	case n.Node == "" || n.VNI == 0:
		return
	case n.Node == t.node && n.Default:
		w.NAT = &g.HostNAT
	case n.Node == t.node:
	case !n.VTEP.IsValid():
		return
	default:
		g.VTEP = n.VTEP
	}
	w.Gateways = append(w.Gateways, g)
}

// routeToGateway sets the target of a route to a NAT gateway. Packets to a gateway without a host are dropped: through
// another gateway, they would get another source address.
func (w *wanted) routeToGateway(r *cloud.HostRoute, n *cloud.NATGatewayOnHost) {
	if n.Default {
		return
	}
	for i := range w.Gateways {
		if w.Gateways[i].ID == n.ID {
			r.Gateway = n.ID
			return
		}
	}
	r.Target = cloud.RouteBlackhole
}

// edgeState returns the state of a VPC for package edge. It leaves out routes to NAT gateways on other hosts, which
// only package netdev sets. It also leaves out gateways and floating IPs of external networks that the host does not
// have according to connected. The control plane knows the external networks of each host, and reports such floating
// IPs as PENDING.
func edgeState(v *cloud.HostVPC, namespace string, connected func(external string) bool) edge.VPC {
	one := edge.VPCOf(v, namespace)
	if one.NAT != nil && !connected(one.NAT.External) {
		one.NAT = nil
	}
	one.Floating = slices.DeleteFunc(slices.Clone(one.Floating), func(f cloud.HostFloating) bool {
		return !connected(f.External)
	})
	here := map[cloud.NATGatewayID]bool{}
	for i := range v.Gateways {
		g := &v.Gateways[i]
		if !g.Local() || g.Default || !connected(g.External) {
			continue
		}
		here[g.ID] = true
		gateway := edge.Gateway{ID: g.ID, HostNAT: g.HostNAT, Transit: netdev.Transit(g.VNI)}
		if g.ServiceIP != "" {
			gateway.Mark = g.VNI
		}
		one.Gateways = append(one.Gateways, gateway)
	}
	for _, s := range v.Subnets {
		routes := edge.SubnetRoutes{VNI: s.VNI, Bridge: netdev.Bridge(s.VNI)}
		used := false
		for _, r := range s.Routes {
			if r.Target == cloud.RouteNAT && (r.Gateway == "" || here[r.Gateway]) {
				used = used || here[r.Gateway]
				routes.Routes = append(routes.Routes, edge.Route{Destination: r.Destination, Gateway: r.Gateway})
			}
		}
		if used {
			one.Subnets = append(one.Subnets, routes)
		}
	}
	return one
}
