package firewall

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// groupList is a sorted list of groups without duplicates.
type groupList []cloud.SecurityGroupID

func (l groupList) id() listID {
	parts := make([]string, len(l))
	for i, id := range l {
		parts[i] = string(id)
	}
	sum := sha256.Sum256([]byte(strings.Join(parts, "\n")))
	return listID(binary.BigEndian.Uint64(sum[:]))
}

// hash returns 16 hexadecimal digits that identify s, for names of sets and comments of rules.
func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:8])
}

func newGroupList(ids []cloud.SecurityGroupID) groupList {
	l := slices.Clone(ids)
	slices.Sort(l)
	return slices.Compact(l)
}

// pairGroups are the groups that apply to the addresses of an address pair.
type pairGroups struct {
	prefix netip.Prefix
	groups groupList
}

// subjects assigns addresses to lists of groups.
type subjects struct {
	// own has the own addresses of the ports with port security on this host, link-local addresses included.
	own map[netip.Addr]groupList
	// open has the own addresses of ports without port security on this host, and of all ports on other hosts.
	open map[netip.Addr]bool
	// pairs has the address pairs of the ports with port security on this host, the longest prefix first.
	pairs []pairGroups
	// gateways are the addresses at which the namespace answers guests.
	gateways map[netip.Addr]bool
}

// Addresses of the metadata service.
var (
	metadata4 = netip.MustParseAddr("169.254.169.254")
	metadata6 = netip.MustParseAddr("fd00:ec2::254")
)

func newSubjects(vpc *cloud.HostVPC) *subjects {
	s := &subjects{
		own: map[netip.Addr]groupList{}, open: map[netip.Addr]bool{},
		gateways: map[netip.Addr]bool{metadata4: true, metadata6: true},
	}
	pairs := map[netip.Prefix][]cloud.SecurityGroupID{}
	for i := range vpc.Subnets {
		subnet := &vpc.Subnets[i]
		for _, a := range []netip.Addr{subnet.Gateway, subnet.Gateway6()} {
			if a.IsValid() {
				s.gateways[a] = true
			}
		}
		for j := range subnet.Ports {
			port := &subnet.Ports[j]
			for _, a := range ownAddresses(port) {
				if port.Secured {
					s.own[a] = newGroupList(port.Groups)
				} else {
					s.open[a] = true
				}
			}
			for _, pair := range port.Pairs {
				if port.Secured && pair.CIDR.IsValid() {
					pairs[pair.CIDR.Masked()] = append(pairs[pair.CIDR.Masked()], port.Groups...)
				}
			}
		}
		for _, remote := range subnet.Remotes {
			for _, a := range []netip.Addr{remote.IP, remote.IP6, cloud.LinkLocal(remote.MAC)} {
				if a.IsValid() {
					s.open[a] = true
				}
			}
		}
	}
	for prefix, groups := range pairs {
		s.pairs = append(s.pairs, pairGroups{prefix, newGroupList(groups)})
	}
	slices.SortFunc(s.pairs, func(a, b pairGroups) int { return comparePrefixes(a.prefix, b.prefix) })
	return s
}

// comparePrefixes orders prefixes from the longest to the shortest, and those of the same length by address.
func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(cmp.Compare(b.Bits(), a.Bits()), a.Addr().Compare(b.Addr()))
}

// ownAddresses returns the valid addresses of a port: IPv4, IPv6 and, with IPv6, the link-local one.
func ownAddresses(port *cloud.HostPort) []netip.Addr {
	var own []netip.Addr
	if port.IP.IsValid() {
		own = append(own, port.IP)
	}
	if port.IP6.IsValid() {
		own = append(own, port.IP6, cloud.LinkLocal(port.MAC))
	}
	return own
}

// match is the condition of a rule of a security group in a form that both the renderer of chains and the comparison
// with connections use.
type match struct {
	protocol int              // -1 means all
	ports    *cloud.PortRange // nil means all
	icmp     *cloud.ICMP      // nil means all
	prefix   netip.Prefix     // invalid means all
	group    cloud.SecurityGroupID
}

// newMatch returns the condition of a rule. It returns false for a rule that no packet can match, such as an IPv4 rule
// with an IPv6 prefix. Such rules must not become less specific ones: the kernel takes protocol 0 as "all protocols",
// and iptables takes ICMP type 255 as "all types".
func newMatch(r *cloud.Rule) (match, bool) {
	m := match{protocol: int(r.Protocol), group: r.Group}
	if r.AnyProtocol {
		m.protocol = -1
	}
	if r.CIDR.IsValid() && (r.CIDR.Addr().Is6() != r.IPv6 || r.Group != "") || m.protocol == 0 {
		return m, false
	}
	if r.CIDR.IsValid() && r.CIDR.Bits() > 0 {
		m.prefix = r.CIDR.Masked()
	}
	if r.Ports != (cloud.PortRange{}) {
		tcpLike := m.protocol == cloud.ProtocolTCP || m.protocol == cloud.ProtocolUDP || m.protocol == cloud.ProtocolSCTP
		if !tcpLike || r.Ports.First > r.Ports.Last {
			return m, false
		}
		if r.Ports != (cloud.PortRange{First: 0, Last: 65535}) {
			m.ports = &r.Ports
		}
	}
	if r.ICMP != nil {
		want := cloud.ProtocolICMP
		if r.IPv6 {
			want = cloud.ProtocolICMPv6
		}
		if m.protocol != want || r.ICMP.Type == 255 {
			return m, false
		}
		m.icmp = r.ICMP
	}
	return m, true
}

// ruleKind is the direction and the IP version of rules.
type ruleKind struct {
	direction cloud.Direction
	ipv6      bool
}

// ruleBook has the conditions of the groups' rules, and the members of groups.
type ruleBook struct {
	rules   map[cloud.SecurityGroupID]map[ruleKind][]match
	members map[cloud.SecurityGroupID]map[netip.Addr]bool
}

func newRuleBook(vpc *cloud.HostVPC) *ruleBook {
	b := &ruleBook{
		rules:   map[cloud.SecurityGroupID]map[ruleKind][]match{},
		members: map[cloud.SecurityGroupID]map[netip.Addr]bool{},
	}
	for i := range vpc.Groups {
		group := &vpc.Groups[i]
		kinds := map[ruleKind][]match{}
		for j := range group.Rules {
			rule := &group.Rules[j]
			if m, ok := newMatch(rule); ok {
				kind := ruleKind{rule.Direction, rule.IPv6}
				kinds[kind] = append(kinds[kind], m)
			}
		}
		b.rules[group.ID] = kinds
	}
	for _, group := range vpc.Members {
		set := map[netip.Addr]bool{}
		for _, a := range group.Addresses {
			set[a] = true
		}
		b.members[group.ID] = set
	}
	return b
}

// of returns the conditions of all groups in the list.
func (b *ruleBook) of(list groupList, kind ruleKind) []match {
	var all []match
	for _, id := range list {
		all = append(all, b.rules[id][kind]...)
	}
	return all
}
