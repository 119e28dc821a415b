package network

import "github.com/trivet-cloud/trivet/shared/cloud"

// peer evaluates a route to a peering. Its steps reveal nothing about ports and security groups of another project.
func (e *explanation) peer(vpc cloud.VPCID, table cloud.RouteTableID, r *cloud.Route) (bool, error) {
	destination := r.Destination.String()
	p, err := findPeering(e.r, e.t, cloud.PeeringID(r.ID))
	if err != nil {
		return false, err
	}
	peering := label(kindPeering, p.Name, string(p.ID))
	if p.Status != cloud.NetworkActive {
		return e.add(false, "route", string(table), destination, "The route for %s leads to %s, which is not accepted.", destination, peering), nil
	}
	other, project := p.PeerVPC, p.PeerProject
	if other == vpc {
		other, project = p.VPC, p.Project
	}
	e.to = nil
	if project != e.t.Project {
		return e.add(true, "route", string(table), destination,
			"The route for %s leads to VPC %s of project %s by %s. The route tables and security groups there decide, and only that project can see them.",
			destination, other, project, peering), nil
	}
	text, err := labelOf(e.r, project, kindVPC, string(other))
	if err != nil {
		return false, err
	}
	if e.to, err = e.portAt(other, project); err != nil {
		return false, err
	}
	if e.to == nil {
		return e.add(false, "route", string(table), destination, "The route for %s leads to %s, but no port of it has the address %s.",
			destination, text, e.address), nil
	}
	e.add(true, "route", string(table), destination, "The route for %s leads to %s by %s.", destination, text, peering)
	if e.to.Device.Kind == cloud.DeviceServiceIP {
		return e.add(false, "destination", string(e.to.ID), "", "%s is a service IP, which serves its own VPC only.", e.address), nil
	}
	return e.routeBack(p.ID, peering)
}

// routeBack evaluates the route from the destination's subnet to the source. Hosts drop a packet from a peering unless
// the answer would be routed to the peering too. The step is added only if the packet is dropped.
func (e *explanation) routeBack(id cloud.PeeringID, peering string) (bool, error) {
	back, table, err := e.longestRoute(e.to.Subnet, e.sourceAddress())
	if err != nil {
		return false, err
	}
	if back != nil && back.Target == cloud.RoutePeering && back.ID == string(id) {
		return true, nil
	}
	decides := string(table)
	if table == "" {
		decides = string(e.to.Subnet)
	}
	return e.add(false, "route", decides, "", "No route of the subnet of %s leads back to %s by %s.",
		portLabel(e.to), e.sourceAddress(), peering), nil
}
