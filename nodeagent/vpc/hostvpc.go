package vpc

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// wanted is the wanted state of a VPC on this host.
type wanted struct {
	cloud.HostVPC
	// Domain is the DNS domain of the host names.
	Domain string
	// Withhold is true if the host must not answer for external addresses that another host can take over.
	Withhold bool
	// Moving is true if a port of the VPC belongs to a VM that is being migrated from or to this host.
	Moving bool
	// Problems are the reasons why records are not part of HostVPC.
	Problems []string
}

// hostVPC returns the wanted state of a VPC on the host with the ID t.node and the underlay address vtep. It returns
// false if the host is to have nothing of the VPC.
//
//   - Records that contradict others are left out and named in Problems, so that one wrong record does not stop the
//     changes of all others, for example the revocation of a rule.
//   - A group that is unknown has no rules, and therefore permits nothing.
//   - The members of a group are the addresses of all ports of the VPC, and of its peers of the same project, that
//     have the group, and their address pairs with a single address: such pairs are virtual addresses, which the
//     ports use like their own. The addresses of a longer range do not become members.
//   - Ports without a host are members of their groups, but not remote ports.
func (t *tables) hostVPC(id cloud.VPCID, vtep netip.Addr) (wanted, bool) {
	one := t.vpcs[id]
	if one == nil || one.record == nil {
		return wanted{}, false
	}
	v := one.record
	w := wanted{HostVPC: cloud.HostVPC{ID: v.ID, MTU: v.MTU, CIDR: v.CIDR, CIDR6: v.CIDR6}, Domain: v.Domain}
	if !mutant.On(mutant.ReachHosts) {
		w.Denied = t.protected
	}
	w.addSubnets(one)
	index := map[cloud.SubnetID]*cloud.HostSubnet{}
	for i := range w.Subnets {
		index[w.Subnets[i].ID] = &w.Subnets[i]
	}
	used := map[cloud.SecurityGroupID]bool{}
	taken := stations{}
	for _, key := range slices.Sorted(maps.Keys(one.ports)) {
		p := one.ports[key]
		if p.Node == "" {
			continue
		}
		s := index[p.Subnet]
		switch {
		case s == nil || !s.CIDR.Contains(p.IP) || p.IP6.IsValid() && !s.CIDR6.Contains(p.IP6):
			w.problem("port %s has no subnet with its addresses", p.ID)
		case !taken.add(p, p.Node == t.node):
			w.problem("port %s has an address of another port, or a MAC address that no port can have", p.ID)
		case p.Node == t.node:
			w.Moving = w.Moving || p.MigrationNode != ""
			addLocal(s, p, used)
		case !p.VTEP.IsValid():
			// The port's host has never connected to the control plane, so its underlay address is unknown. The control
			// plane sends the port again when that host connects.
		case vtep.IsValid() && (p.VTEP == vtep || p.VTEP.Is4() != vtep.Is4()):
			w.problem("port %s: host %s has the underlay address %s, and this host has %s", p.ID, p.Node, p.VTEP, vtep)
		default:
			// A port of a VM that is being migrated to this host, or from this host after the switchover, has a device
			// here too. Package netdev sends packets for the port to the other host.
			if p.MigrationNode == t.node {
				w.Moving = true
				if !taken.add(p, true) {
					w.problem("port %s has an address of another port", p.ID)
					continue
				}
				addLocal(s, p, used)
			}
			s.Remotes = append(s.Remotes, cloud.RemotePort{
				MAC: p.MAC, IP: p.IP, IP6: p.IP6, HostName: p.HostName, Pairs: sortedPairs(p.Pairs), VTEP: p.VTEP,
			})
		}
	}
	for i := range w.Subnets {
		slices.SortFunc(w.Subnets[i].Remotes, func(a, b cloud.RemotePort) int {
			return cmp.Or(bytes.Compare(a.MAC[:], b.MAC[:]), a.IP.Compare(b.IP))
		})
	}
	w.addExternal(t, one)
	w.addRoutes(one)
	w.addServices(t.node, one)
	peers := t.peersOf(id)
	w.addPeerings(t, peers)
	w.addGroups(t, w.portsOfGroups(one, peers), used)
	for _, key := range slices.Sorted(maps.Keys(t.invalid)) {
		if r := t.invalid[key]; r.VPC == id || one.uses[cloud.SecurityGroupID(key)] > 0 {
			w.problem("record %s: %v", r.ID, r.Err)
		}
	}
	return w, true
}

// stations are the addresses that are in use, by subnet. The ports on this host and those on others are separate, as in
// package netdev, which refuses a VPC in which an address is used twice.
type stations map[stationsOf]addresses

type stationsOf struct {
	subnet cloud.SubnetID
	local  bool
}

// addresses are the addresses of ports.
type addresses struct {
	macs map[cloud.MAC]bool
	ips  map[netip.Addr]bool
}

// add adds the addresses of a port. It returns false, and adds nothing, if one is in use or cannot be that of a port.
func (s stations) add(p *cloud.PortOnHost, local bool) bool {
	if p.MAC == cloud.GatewayMAC || p.MAC == (cloud.MAC{}) || p.MAC[0]&1 != 0 {
		return false
	}
	of := stationsOf{p.Subnet, local}
	used, ok := s[of]
	if !ok {
		used = addresses{map[cloud.MAC]bool{}, map[netip.Addr]bool{}}
		s[of] = used
	}
	if used.macs[p.MAC] || used.ips[p.IP] || p.IP6.IsValid() && used.ips[p.IP6] {
		return false
	}
	used.macs[p.MAC], used.ips[p.IP] = true, true
	if p.IP6.IsValid() {
		used.ips[p.IP6] = true
	}
	return true
}

func (w *wanted) problem(format string, args ...any) {
	w.Problems = append(w.Problems, fmt.Sprintf(format, args...))
}

func (w *wanted) addSubnets(one *vpcTable) {
	for _, key := range slices.Sorted(maps.Keys(one.subnets)) {
		s := one.subnets[key]
		err := cloud.CheckSubnetPrefix("cidr_block", &one.record.VPC, s.CIDR)
		if err == nil && s.CIDR6.IsValid() {
			err = cloud.CheckSubnetPrefix6("ipv6_cidr_block", &one.record.VPC, s.CIDR6)
		}
		for i := range w.Subnets {
			o := &w.Subnets[i]
			same := o.VNI == s.VNI || o.CIDR.Overlaps(s.CIDR) || o.CIDR6.IsValid() && o.CIDR6 == s.CIDR6
			if err == nil && same {
				err = fmt.Errorf("has the VNI or prefix of subnet %s", o.ID)
			}
		}
		if err != nil {
			w.problem("subnet %s: %v", s.ID, err)
			continue
		}
		w.Subnets = append(w.Subnets, cloud.HostSubnet{
			ID: s.ID, VNI: s.VNI, CIDR: s.CIDR, Gateway: s.Gateway, CIDR6: s.CIDR6, DHCP: s.DHCP, DNS: s.DNS,
		})
	}
}

// addLocal adds a port whose device is on this host, and its groups to used.
func addLocal(s *cloud.HostSubnet, p *cloud.PortOnHost, used map[cloud.SecurityGroupID]bool) {
	s.Ports = append(s.Ports, localPort(p))
	for _, group := range p.Groups {
		used[group] = true
	}
}

func localPort(p *cloud.PortOnHost) cloud.HostPort {
	out := cloud.HostPort{
		ID: p.ID, Device: DeviceName(p.ID), HostName: p.HostName, MAC: p.MAC, IP: p.IP, IP6: p.IP6, Secured: p.Secured,
		Groups: slices.Compact(slices.Sorted(slices.Values(p.Groups))), Pairs: sortedPairs(p.Pairs), Mbps: p.Mbps,
	}
	return out
}

func sortedPairs(pairs []cloud.AddressPair) []cloud.AddressPair {
	out := slices.Clone(pairs)
	slices.SortFunc(out, func(a, b cloud.AddressPair) int {
		return cmp.Or(a.CIDR.Addr().Compare(b.CIDR.Addr()), a.CIDR.Bits()-b.CIDR.Bits(), bytes.Compare(a.MAC[:], b.MAC[:]))
	})
	return out
}

// addGroups adds the groups in used, and the members of the groups that their rules refer to. Members are the ports of
// the VPCs in all.
func (w *wanted) addGroups(t *tables, all []*vpcTable, used map[cloud.SecurityGroupID]bool) {
	remote := map[cloud.SecurityGroupID][]netip.Addr{}
	for _, key := range slices.Sorted(maps.Keys(used)) {
		group := cloud.HostGroup{ID: key}
		if g := t.groups[key]; g != nil {
			group.Rules = g.Rules
		} else {
			w.problem("security group %s is unknown", key)
		}
		for i := range group.Rules {
			if id := group.Rules[i].Group; id != "" {
				remote[id] = nil
			}
		}
		w.Groups = append(w.Groups, group)
	}
	for _, one := range all {
		for _, p := range one.ports {
			addMember(remote, p)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(remote)) {
		slices.SortFunc(remote[key], netip.Addr.Compare)
		w.Members = append(w.Members, cloud.GroupMembers{ID: key, Addresses: slices.Compact(remote[key])})
	}
}

// addMember adds the addresses of a port to the members of its groups, except for groups that are not in remote.
func addMember(remote map[cloud.SecurityGroupID][]netip.Addr, p *cloud.PortOnHost) {
	for _, id := range p.Groups {
		members, wanted := remote[id]
		if !wanted {
			continue
		}
		members = append(members, p.IP)
		if p.IP6.IsValid() {
			members = append(members, p.IP6)
		}
		for _, pair := range p.Pairs {
			if pair.CIDR.IsSingleIP() {
				members = append(members, pair.CIDR.Addr())
			}
		}
		remote[id] = members
	}
}

// DeviceName returns the name of a port's network interface in the VPC's namespace. It does not depend on anything but
// the ID, so that a restarted agent finds the interface. Interface names have at most 15 bytes. The name has 55 bits of
// a hash of the ID, because the first digits of IDs that were made at the same time are equal.
func DeviceName(id cloud.PortID) string {
	sum := sha256.Sum256([]byte(id))
	return "port" + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:])[:11])
}
