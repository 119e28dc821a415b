package vpc

import (
	"maps"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// addPeering adds or replaces a peering.
func (t *tables) addPeering(p *cloud.Peering, touched map[cloud.VPCID]bool) {
	t.removePeering(p.ID, touched)
	t.peerings[p.ID] = p
	delete(t.invalid, string(p.ID))
	touched[p.VPC], touched[p.PeerVPC] = true, true
}

func (t *tables) removePeering(id cloud.PeeringID, touched map[cloud.VPCID]bool) {
	if p := t.peerings[id]; p != nil {
		delete(t.peerings, id)
		touched[p.VPC], touched[p.PeerVPC] = true, true
	}
}

// removePeeringsOf removes the peerings of a VPC.
func (t *tables) removePeeringsOf(id cloud.VPCID, touched map[cloud.VPCID]bool) {
	for _, p := range t.peerings {
		if p.VPC == id || p.PeerVPC == id {
			t.removePeering(p.ID, touched)
		}
	}
}

// touchPeers adds the peers of VPCs that an update changes to touched. The state of a VPC depends on the record of the
// peer, and, if both belong to one project, on the ports of the peer, which can be members of the VPC's groups.
func (t *tables) touchPeers(u *cloud.NetworkUpdate, touched map[cloud.VPCID]bool) {
	changed := map[cloud.VPCID]bool{}
	for i := range u.VPCs {
		changed[u.VPCs[i].ID] = true
	}
	direct := maps.Clone(touched)
	for _, p := range t.peerings {
		for _, side := range [][2]cloud.VPCID{{p.VPC, p.PeerVPC}, {p.PeerVPC, p.VPC}} {
			if changed[side[0]] || direct[side[0]] && p.Project == p.PeerProject {
				touched[side[1]] = true
			}
		}
	}
}

// peersOf returns the peerings of a VPC, sorted by ID, with the tables of the other VPCs. It leaves out peerings whose
// other VPC has no valid record.
func (t *tables) peersOf(id cloud.VPCID) (out []peer) {
	for _, key := range slices.Sorted(maps.Keys(t.peerings)) {
		p := t.peerings[key]
		other := p.PeerVPC
		if p.PeerVPC == id {
			other = p.VPC
		}
		if p.VPC != id && p.PeerVPC != id || t.vpcs[other] == nil || t.vpcs[other].record == nil {
			continue
		}
		out = append(out, peer{p, t.vpcs[other]})
	}
	return out
}

// peer is a peering of a VPC with the table of the other VPC.
type peer struct {
	peering *cloud.Peering
	vpc     *vpcTable
}

// addPeerings adds the peerings of the VPC. The control plane permits no two peerings of a VPC with overlapping
// prefixes, because a rule that permits ports of one peer would also permit those of the other. If two overlap
// nevertheless, addPeerings leaves out the one with the greater ID, in both of its VPCs.
func (w *wanted) addPeerings(t *tables, peers []peer) {
	for _, one := range peers {
		v := one.vpc.record
		if t.overlaps(one.peering) {
			w.problem("peering %s: the prefixes of the VPCs overlap one another or those of another peer", one.peering.ID)
			continue
		}
		p := cloud.HostPeering{ID: one.peering.ID, Peer: v.ID, CIDR: v.CIDR, MTU: v.MTU}
		if w.CIDR6.IsValid() {
			p.CIDR6 = v.CIDR6
		}
		w.Peerings = append(w.Peerings, p)
	}
}

// overlaps reports whether the two VPCs of a peering overlap each other, or whether one of them has another peering,
// with a lower ID, with a VPC that overlaps the other one.
func (t *tables) overlaps(p *cloud.Peering) bool {
	for _, side := range [][2]cloud.VPCID{{p.VPC, p.PeerVPC}, {p.PeerVPC, p.VPC}} {
		if t.overlap(side[0], side[1]) {
			return true
		}
		for _, other := range t.peersOf(side[0]) {
			if other.peering.ID < p.ID && t.overlap(other.vpc.record.ID, side[1]) {
				return true
			}
		}
	}
	return false
}

// overlap reports whether the prefixes of two VPCs overlap. A VPC without a valid record overlaps none.
func (t *tables) overlap(a, b cloud.VPCID) bool {
	one, other := t.vpcs[a], t.vpcs[b]
	if one == nil || other == nil || one.record == nil || other.record == nil {
		return false
	}
	v, w := one.record, other.record
	return v.CIDR.Overlaps(w.CIDR) || v.CIDR6.IsValid() && w.CIDR6.IsValid() && v.CIDR6.Overlaps(w.CIDR6)
}

// portsOfGroups returns the tables of the VPCs whose ports can be members of the VPC's groups: the VPC itself, and its
// peers of the same project.
func (w *wanted) portsOfGroups(one *vpcTable, peers []peer) []*vpcTable {
	out := []*vpcTable{one}
	for _, p := range peers {
		connected := func(h cloud.HostPeering) bool { return h.ID == p.peering.ID }
		if p.vpc.record.Project == one.record.Project && slices.ContainsFunc(w.Peerings, connected) {
			out = append(out, p.vpc)
		}
	}
	return out
}

// hasPorts reports whether the VPC has ports on this host. A host has VPCs without ports because they are peers of
// others.
func (w *wanted) hasPorts() bool {
	return slices.ContainsFunc(w.Subnets, func(s cloud.HostSubnet) bool { return len(s.Ports) > 0 })
}

// connected makes the workers of VPCs apply them again, because the application of a peer has made new devices for
// them.
func (n *Networks) connected(ids []cloud.VPCID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, id := range ids {
		if w := n.workers[id]; w != nil && !n.closed {
			w.suspect = true
			n.wake(id, n.progress.last)
		}
	}
}
