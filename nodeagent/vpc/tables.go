package vpc

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// tables are the records of the VPCs on this host. The zero value is empty. It does no I/O.
type tables struct {
	node   cloud.NodeID
	vpcs   map[cloud.VPCID]*vpcTable
	groups map[cloud.SecurityGroupID]*cloud.SecurityGroup
	// floating are the floating IPs of ports by their IDs, and floatingAt has the ID of the floating IP of each port.
	floating   map[cloud.FloatingIPID]*cloud.FloatingIP
	floatingAt map[cloud.PortID]cloud.FloatingIPID
	peerings   map[cloud.PeeringID]*cloud.Peering
	// owners are the VPCs of subnets, ports, route tables, NAT gateways, service IPs and their floating IPs.
	owners map[string]cloud.VPCID
	// protected are the addresses of the cloud's hosts and members, sorted.
	protected []netip.Addr
	// invalid are the records that failed a check when they last changed, by ID.
	invalid map[string]cloud.InvalidRecord
}

// vpcTable has the records of one VPC. record is nil while only other records of the VPC have arrived.
type vpcTable struct {
	record  *cloud.VPCOnHost
	subnets map[cloud.SubnetID]*cloud.Subnet
	ports   map[cloud.PortID]*cloud.PortOnHost
	routes  map[cloud.RouteTableID]*cloud.RouteTable
	// nats are the NAT gateways, and the floating IPs of service IPs.
	nats     map[cloud.NATGatewayID]*cloud.NATGatewayOnHost
	services map[cloud.ServiceIPID]*cloud.ServiceIP
	// uses counts the ports that have a group.
	uses map[cloud.SecurityGroupID]int
}

// vpc returns the table of a VPC, and adds it if there is none.
func (t *tables) vpc(id cloud.VPCID) *vpcTable {
	one := t.vpcs[id]
	if one == nil {
		one = &vpcTable{
			subnets: map[cloud.SubnetID]*cloud.Subnet{}, ports: map[cloud.PortID]*cloud.PortOnHost{},
			routes: map[cloud.RouteTableID]*cloud.RouteTable{}, nats: map[cloud.NATGatewayID]*cloud.NATGatewayOnHost{}, uses: map[cloud.SecurityGroupID]int{},
			services: map[cloud.ServiceIPID]*cloud.ServiceIP{},
		}
		t.vpcs[id] = one
	}
	return one
}

// apply changes the records and returns the VPCs whose state on this host may have changed, among them those that were
// removed. An update must contain all parts of a snapshot or change up to the message with the complete mark.
func (t *tables) apply(u *cloud.NetworkUpdate) map[cloud.VPCID]bool {
	touched := map[cloud.VPCID]bool{}
	if u.Snapshot || t.vpcs == nil || t.node != u.Node {
		for id := range t.vpcs {
			touched[id] = true
		}
	}
	last := *t
	if u.Snapshot || t.vpcs == nil {
		*t = tables{
			vpcs: map[cloud.VPCID]*vpcTable{}, groups: map[cloud.SecurityGroupID]*cloud.SecurityGroup{},
			owners: map[string]cloud.VPCID{}, invalid: map[string]cloud.InvalidRecord{},
			floating: map[cloud.FloatingIPID]*cloud.FloatingIP{}, floatingAt: map[cloud.PortID]cloud.FloatingIPID{},
			protected: last.protected, // members of earlier versions send none
			peerings:  map[cloud.PeeringID]*cloud.Peering{},
		}
	}
	t.node = u.Node
	if u.Protected != nil {
		t.setProtected(u.Protected, touched)
	}
	for _, id := range u.Deleted {
		t.remove(id, touched)
	}
	for i := range u.VPCs {
		v := &u.VPCs[i]
		t.vpc(v.ID).record = v
		t.changed(string(v.ID), v.ID, touched)
	}
	for i := range u.Subnets {
		s := &u.Subnets[i]
		t.own(string(s.ID), s.VPC, touched).subnets[s.ID] = s
	}
	for i := range u.RouteTables {
		r := &u.RouteTables[i]
		t.own(string(r.ID), r.VPC, touched).routes[r.ID] = r
	}
	for i := range u.NATGateways {
		t.addNAT(&u.NATGateways[i], touched)
	}
	for i := range u.ServiceIPs {
		s := &u.ServiceIPs[i]
		t.own(string(s.ID), s.VPC, touched).services[s.ID] = s
	}
	for i := range u.FloatingIPs {
		t.addFloating(&u.FloatingIPs[i], touched)
	}
	for i := range u.Ports {
		t.addPort(&u.Ports[i], touched)
	}
	for i := range u.Peerings {
		t.addPeering(&u.Peerings[i], touched)
	}
	for i := range u.Groups {
		g := &u.Groups[i]
		t.groups[g.ID] = g
		delete(t.invalid, string(g.ID))
		t.touchUsers(g.ID, touched)
	}
	for _, r := range u.Invalid {
		if u.Snapshot && last.node == t.node {
			t.keep(&last, r.ID, touched)
		}
		t.invalid[r.ID] = r
		t.touchUsers(cloud.SecurityGroupID(r.ID), touched)
		if t.vpcs[r.VPC] != nil || r.ID == string(r.VPC) {
			touched[r.VPC] = true
		}
	}
	t.touchPeers(u, touched)
	return touched
}

// setProtected replaces the addresses of hosts and members.
func (t *tables) setProtected(addresses []netip.Addr, touched map[cloud.VPCID]bool) {
	addresses = slices.Compact(slices.SortedFunc(slices.Values(addresses), netip.Addr.Compare))
	if slices.Equal(t.protected, addresses) {
		return
	}
	t.protected = addresses
	for id := range t.vpcs {
		touched[id] = true
	}
}

// keep copies the record with an ID from last, which are the tables before a snapshot. The snapshot has the record with
// an invalid content, and must not remove what is in force: a guest does not get a deleted tap back.
func (t *tables) keep(last *tables, id string, touched map[cloud.VPCID]bool) {
	if g := last.groups[cloud.SecurityGroupID(id)]; g != nil {
		t.groups[g.ID] = g
	}
	if one := last.vpcs[cloud.VPCID(id)]; one != nil && one.record != nil {
		t.vpc(one.record.ID).record = one.record
	}
	if p := last.peerings[cloud.PeeringID(id)]; p != nil {
		t.addPeering(p, touched)
	}
	owner := last.owners[id]
	one := last.vpcs[owner]
	if one == nil {
		return
	}
	if s := one.subnets[cloud.SubnetID(id)]; s != nil {
		t.own(id, owner, touched).subnets[s.ID] = s
	}
	if r := one.routes[cloud.RouteTableID(id)]; r != nil {
		t.own(id, owner, touched).routes[r.ID] = r
	}
	if s := one.services[cloud.ServiceIPID(id)]; s != nil {
		t.own(id, owner, touched).services[s.ID] = s
	}
	if p := one.ports[cloud.PortID(id)]; p != nil {
		t.addPort(p, touched)
	}
}

// unusable returns an error if the control plane has sent a VPC to the host, but never with a valid record.
func (t *tables) unusable(id cloud.VPCID) error {
	r, invalid := t.invalid[string(id)]
	if !invalid || t.vpcs[id] != nil && t.vpcs[id].record != nil {
		return nil
	}
	return fmt.Errorf("the record of the VPC is invalid, and the VPC is left as it is: %w", r.Err)
}

// own records that a valid record belongs to a VPC and returns the VPC's table. A record that was in another VPC leaves
// it.
func (t *tables) own(id string, vpc cloud.VPCID, touched map[cloud.VPCID]bool) *vpcTable {
	if was, ok := t.owners[id]; ok && was != vpc {
		t.remove(id, touched)
	}
	t.owners[id] = vpc
	t.changed(id, vpc, touched)
	return t.vpc(vpc)
}

func (t *tables) changed(id string, vpc cloud.VPCID, touched map[cloud.VPCID]bool) {
	delete(t.invalid, id)
	touched[vpc] = true
}

// addPort adds or replaces a port, unless the tables have a later binding of it. The earlier binding is that of a host
// which the port has left.
func (t *tables) addPort(p *cloud.PortOnHost, touched map[cloud.VPCID]bool) {
	if had := t.port(p.ID); had != nil && had.BindingGeneration > p.BindingGeneration && !mutant.On(mutant.AnnounceTwice) {
		return
	}
	one := t.own(string(p.ID), p.VPC, touched)
	one.count(one.ports[p.ID], -1)
	one.ports[p.ID] = p
	one.count(p, 1)
}

// addFloating adds or replaces a floating IP of a port. If the record of the port has not arrived yet, the floating IP
// is applied together with the port.
func (t *tables) addFloating(f *cloud.FloatingIP, touched map[cloud.VPCID]bool) {
	t.remove(string(f.ID), touched) // also if it led to a service IP
	t.floating[f.ID] = f
	if f.Port != "" {
		t.floatingAt[f.Port] = f.ID
		t.touchPort(f.Port, touched)
	}
}

func (t *tables) removeFloating(id cloud.FloatingIPID, touched map[cloud.VPCID]bool) {
	had := t.floating[id]
	if had == nil {
		return
	}
	delete(t.floating, id)
	if t.floatingAt[had.Port] == id {
		delete(t.floatingAt, had.Port)
	}
	t.touchPort(had.Port, touched)
}

// touchPort adds the VPC of a port, if it is known, to touched.
func (t *tables) touchPort(id cloud.PortID, touched map[cloud.VPCID]bool) {
	if vpc, ok := t.owners[string(id)]; ok {
		touched[vpc] = true
	}
}

// port returns the record of a port, or nil.
func (t *tables) port(id cloud.PortID) *cloud.PortOnHost {
	if one := t.vpcs[t.owners[string(id)]]; one != nil {
		return one.ports[id]
	}
	return nil
}

// count adds n to the uses of a port's groups. The port may be nil.
func (v *vpcTable) count(p *cloud.PortOnHost, n int) {
	if p == nil {
		return
	}
	for _, id := range p.Groups {
		if v.uses[id] += n; v.uses[id] == 0 {
			delete(v.uses, id)
		}
	}
}

// dropGroups deletes the security groups of a project of which the host has no VPC. The control plane sends no changes
// of them, and sends them again with the next VPC of the project.
func (t *tables) dropGroups(project cloud.ProjectID) {
	for _, one := range t.vpcs {
		if one.record != nil && one.record.Project == project {
			return
		}
	}
	maps.DeleteFunc(t.groups, func(_ cloud.SecurityGroupID, g *cloud.SecurityGroup) bool { return g.Project == project })
}

// touchUsers adds the VPCs that have ports with a group to touched.
func (t *tables) touchUsers(group cloud.SecurityGroupID, touched map[cloud.VPCID]bool) {
	for id, one := range t.vpcs {
		if one.uses[group] > 0 {
			touched[id] = true
		}
	}
}

// remove deletes the record of any kind with an ID. Deleting a VPC deletes its records. An unknown ID changes nothing.
func (t *tables) remove(id string, touched map[cloud.VPCID]bool) {
	delete(t.invalid, id)
	if _, ok := t.groups[cloud.SecurityGroupID(id)]; ok {
		delete(t.groups, cloud.SecurityGroupID(id))
		t.touchUsers(cloud.SecurityGroupID(id), touched)
		return
	}
	if one := t.vpcs[cloud.VPCID(id)]; one != nil {
		delete(t.vpcs, cloud.VPCID(id))
		if one.record != nil {
			t.dropGroups(one.record.Project)
		}
		maps.DeleteFunc(t.owners, func(_ string, vpc cloud.VPCID) bool { return vpc == cloud.VPCID(id) })
		maps.DeleteFunc(t.invalid, func(_ string, r cloud.InvalidRecord) bool { return r.VPC == cloud.VPCID(id) })
		touched[cloud.VPCID(id)] = true
		t.removePeeringsOf(cloud.VPCID(id), touched)
		return
	}
	t.removePeering(cloud.PeeringID(id), touched)
	t.removeFloating(cloud.FloatingIPID(id), touched)
	vpc, ok := t.owners[id]
	if !ok {
		return
	}
	delete(t.owners, id)
	touched[vpc] = true
	one := t.vpcs[vpc]
	one.count(one.ports[cloud.PortID(id)], -1)
	delete(one.ports, cloud.PortID(id))
	delete(one.subnets, cloud.SubnetID(id))
	delete(one.routes, cloud.RouteTableID(id))
	delete(one.nats, cloud.NATGatewayID(id))
	delete(one.services, cloud.ServiceIPID(id))
}
