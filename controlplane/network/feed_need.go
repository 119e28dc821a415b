package network

import "github.com/trivet-cloud/trivet/shared/cloud"

// need is a host's need of a VPC.
type need struct {
	node cloud.NodeID
	vpc  cloud.VPCID
}

// countPort adds n, which is 1 or -1, to the number of ports and NAT gateways of a VPC on a host.
func (x *index) countPort(v *vpcEntry, id cloud.VPCID, node cloud.NodeID, n int) {
	before := v.ports[node]
	v.ports[node] += n
	if v.ports[node] == 0 {
		delete(v.ports, node)
	}
	if (before == 0) == (v.ports[node] == 0) {
		return
	}
	x.need(id, node, n)
	for peer, peerings := range v.peers {
		x.need(peer, node, n*peerings)
	}
}

// countPeering adds n, which is 1 or -1, to the number of peerings between two VPCs.
func (x *index) countPeering(a, b cloud.VPCID, n int) {
	for _, side := range []struct{ vpc, peer cloud.VPCID }{{a, b}, {b, a}} {
		v := x.vpcs[side.vpc]
		if v.peers[side.peer] += n; v.peers[side.peer] == 0 {
			delete(v.peers, side.peer)
		}
		for node := range v.ports {
			x.need(side.peer, node, n)
		}
	}
}

// need adds n to the number of reasons for which a host needs a VPC. One reason is that the host has ports or NAT
// gateways of the VPC. Each peering with a VPC of which the host has ports or NAT gateways is another reason. So a host
// needs the peers of these VPCs, but not the peers of the peers: no packet passes two peerings.
func (x *index) need(id cloud.VPCID, node cloud.NodeID, n int) {
	v := x.vpcs[id]
	before := v.hosts[node]
	v.hosts[node] += n
	switch {
	case before == 0:
		putIn(x.needs, node, id, struct{}{})
	case v.hosts[node] == 0:
		delete(v.hosts, node)
		deleteIn(x.needs, node, id)
	default:
		return
	}
	x.changedNeeds[need{node, id}] = struct{}{}
}

// takeNeeds adds a hostChange for each changed need to out, and clears changedNeeds.
func (x *index) takeNeeds(out []hostChange) []hostChange {
	for n := range x.changedNeeds {
		c := hostChange{node: n.node}
		if _, needed := x.needs[n.node][n.vpc]; !needed {
			c.lost = n.vpc
		}
		out = append(out, c)
		out = x.peersChange(out, n.vpc)
	}
	clear(x.changedNeeds)
	return out
}

// vpcsOfPorts returns the VPCs of the ports that are bound to a host.
func (x *index) vpcsOfPorts(node cloud.NodeID) map[cloud.VPCID]bool {
	out := map[cloud.VPCID]bool{}
	for key := range x.portsOn[node] {
		if key.kind == feedPort {
			out[x.entries[key].vpc] = true
		}
	}
	return out
}

// hostsOfBoth returns the hosts that need both VPCs of a peering. It returns nil for other records.
func (x *index) hostsOfBoth(e entry) (out []cloud.NodeID) {
	if e.peer == "" {
		return nil
	}
	for node := range x.vpcs[e.vpc].hosts {
		if _, needed := x.needs[node][e.peer]; needed {
			out = append(out, node)
		}
	}
	return out
}
