package firewall

import (
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// copyVPC returns a copy of the parts of a VPC on which the wanted state depends. The copy shares no slice and no
// pointer with v, because callers may change v later.
func copyVPC(v *cloud.HostVPC) cloud.HostVPC {
	c := cloud.HostVPC{
		ID: v.ID, CIDR: v.CIDR, CIDR6: v.CIDR6, LooseTCP: v.LooseTCP,
		Denied: slices.Clone(v.Denied), Peerings: slices.Clone(v.Peerings),
		Subnets: slices.Clone(v.Subnets), Groups: slices.Clone(v.Groups), Members: slices.Clone(v.Members),
	}
	remotes := hasPairs(v)
	for i := range c.Subnets {
		s := &c.Subnets[i]
		s.Ports = slices.Clone(s.Ports)
		for j := range s.Ports {
			p := &s.Ports[j]
			p.Groups, p.Pairs = slices.Clone(p.Groups), slices.Clone(p.Pairs)
		}
		s.DNS, s.Routes = nil, nil
		if !remotes {
			s.Remotes = nil
			continue
		}
		s.Remotes = slices.Clone(s.Remotes)
		for j := range s.Remotes {
			s.Remotes[j].Pairs = nil
		}
	}
	for i := range c.Groups {
		rules := slices.Clone(c.Groups[i].Rules)
		for j := range rules {
			if rules[j].ICMP != nil {
				icmp := *rules[j].ICMP
				rules[j].ICMP = &icmp
			}
		}
		c.Groups[i].Rules = rules
	}
	for i := range c.Members {
		c.Members[i].Addresses = slices.Clone(c.Members[i].Addresses)
	}
	return c
}

// hasPairs reports whether a port with port security has address pairs. The wanted state depends on the ports on other
// hosts only if one has.
func hasPairs(v *cloud.HostVPC) bool {
	return slices.ContainsFunc(v.Subnets, func(s cloud.HostSubnet) bool {
		return slices.ContainsFunc(s.Ports, func(p cloud.HostPort) bool { return p.Secured && len(p.Pairs) > 0 })
	})
}

// equalRules reports whether the wanted states of two VPCs are equal except for the members of groups.
func equalRules(a, b *cloud.HostVPC) bool {
	return equalPorts(a, b) && slices.EqualFunc(a.Groups, b.Groups, func(x, y cloud.HostGroup) bool {
		return x.ID == y.ID && slices.EqualFunc(x.Rules, y.Rules, equalRule)
	})
}

// equalPorts reports whether the wanted states of two VPCs are equal except for groups and their members.
func equalPorts(a, b *cloud.HostVPC) bool {
	if a.ID != b.ID || a.CIDR != b.CIDR || a.CIDR6 != b.CIDR6 || a.LooseTCP != b.LooseTCP ||
		!slices.Equal(a.Denied, b.Denied) || !slices.Equal(a.Peerings, b.Peerings) || len(a.Subnets) != len(b.Subnets) {
		return false
	}
	remotes := hasPairs(a) || hasPairs(b)
	for i := range a.Subnets {
		x, y := &a.Subnets[i], &b.Subnets[i]
		if x.ID != y.ID || x.CIDR != y.CIDR || x.Gateway != y.Gateway || x.CIDR6 != y.CIDR6 ||
			len(x.Ports) != len(y.Ports) || remotes && !slices.EqualFunc(x.Remotes, y.Remotes, equalRemote) {
			return false
		}
		for j := range x.Ports {
			if !x.Ports[j].Equal(&y.Ports[j]) {
				return false
			}
		}
	}
	return true
}

func equalRemote(a, b cloud.RemotePort) bool { return a.MAC == b.MAC && a.IP == b.IP && a.IP6 == b.IP6 }

func equalRule(a, b cloud.Rule) bool {
	if a.ICMP != nil && b.ICMP != nil && *a.ICMP == *b.ICMP {
		a.ICMP = b.ICMP
	}
	return a == b
}

// mayForbid reports whether the rules of b may forbid a connection that those of a permit. It returns false if b
// differs from a only in additional rules and members.
func mayForbid(a, b *cloud.HostVPC) bool {
	if !equalPorts(a, b) || len(a.Groups) != len(b.Groups) {
		return true
	}
	for i := range a.Groups {
		x, y := &a.Groups[i], &b.Groups[i]
		if x.ID != y.ID || !slices.EqualFunc(x.Rules, y.Rules, equalRule) && !containsRules(y.Rules, x.Rules) {
			return true
		}
	}
	members := map[cloud.SecurityGroupID][]netip.Addr{}
	for _, m := range b.Members {
		members[m.ID] = m.Addresses
	}
	return slices.ContainsFunc(a.Members, func(m cloud.GroupMembers) bool {
		return !containsAll(members[m.ID], m.Addresses)
	})
}

// containsRules reports whether list has all rules of part.
func containsRules(list, part []cloud.Rule) bool {
	type content struct {
		rule   cloud.Rule // without ICMP
		icmp   cloud.ICMP
		isICMP bool
	}
	contents := func(rules []cloud.Rule) []content {
		out := make([]content, len(rules))
		for i, r := range rules {
			if r.ICMP != nil {
				out[i].icmp, out[i].isICMP, r.ICMP = *r.ICMP, true, nil
			}
			out[i].rule = r
		}
		return out
	}
	return containsAll(contents(list), contents(part))
}

// containsAll reports whether list has all elements of part.
func containsAll[T comparable](list, part []T) bool {
	if slices.Equal(list, part) {
		return true
	}
	all := make(map[T]bool, len(list))
	for _, e := range list {
		all[e] = true
	}
	return !slices.ContainsFunc(part, func(e T) bool { return !all[e] })
}
