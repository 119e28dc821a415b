package firewall

import (
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// policy decides about connections as the rendered chains do. It serves to find connections that began under other
// rules.
type policy struct {
	subjects *subjects
	rules    *ruleBook
	vpc      [2]netip.Prefix // the prefixes of the VPC: IPv4, IPv6
	peers    []netip.Prefix  // the prefixes of peered VPCs
	denied   []netip.Prefix  // see Options.Denied
	// deniedAddresses are the addresses in Denied of cloud.HostVPC.
	deniedAddresses map[netip.Addr]bool
	local           map[netip.Addr]bool // addresses of the namespace; needed for connections only, not for chains
}

// Destinations to which guests send DHCP requests (RFC 2131, part 4.4.1; RFC 8415, part 7.1).
var dhcpDestinations = map[netip.AddrPort]bool{
	netip.MustParseAddrPort("255.255.255.255:67"): true,
	netip.MustParseAddrPort("[ff02::1:2]:547"):    true,
}

// flow is a tracked connection, or an exchange of UDP packets or ICMP queries, as the chain FORWARD sees its first
// packet: with the source before translation and the destination after it.
type flow struct {
	source, destination netip.Addr
	protocol            uint8
	port                uint16 // of the destination; 0 for protocols without ports
	icmpType, icmpCode  uint8  // of the first packet
	// fromPort is true if the first packet came from a port with port security on this host. The chains store it in the
	// connection's mark, because the address alone does not show it: a pair may contain addresses outside of the VPC.
	fromPort bool
}

// permits reports whether a flow may begin. Flows of the namespace itself are always permitted: they are not forwarded,
// and the rules for them depend on the gateways only.
func (p *policy) permits(f *flow) bool {
	s := p.subjects
	if s.gateways[f.source] || s.gateways[f.destination] || p.local[f.source] || p.local[f.destination] ||
		f.protocol == cloud.ProtocolUDP && dhcpDestinations[netip.AddrPortFrom(f.destination, f.port)] {
		return true
	}
	if p.isDenied(f.destination) {
		return false
	}
	list, limited := s.own[f.source]
	if !limited && f.fromPort {
		// The source may be in an address pair of the sending port. An address pair may also contain the address of
		// another port, even of one to which no rules apply. The sender is still the port that has the pair.
		list, limited = s.pairGroupsOf(f.source)
	}
	if limited && !p.permit(list, cloud.Egress, f, f.destination) {
		return false
	}
	list, limited = s.groupsOf(f.destination)
	return !limited || p.permit(list, cloud.Ingress, f, f.source)
}

// isDenied reports whether packets to a are dropped because a is a denied address or in a denied prefix.
func (p *policy) isDenied(a netip.Addr) bool {
	contains := func(prefix netip.Prefix) bool { return prefix.Contains(a) }
	return (p.deniedAddresses[a] || slices.ContainsFunc(p.denied, contains)) &&
		!slices.ContainsFunc(p.vpc[:], contains) && !slices.ContainsFunc(p.peers, contains)
}

// groupsOf returns the groups whose rules apply to packets to an address. It returns false if no rules apply.
func (s *subjects) groupsOf(a netip.Addr) (groupList, bool) {
	if list, ok := s.own[a]; ok {
		return list, true
	}
	if s.open[a] {
		return nil, false
	}
	return s.pairGroupsOf(a)
}

// pairGroupsOf returns the groups of the address pair with the longest prefix that contains a. It returns false if no
// address pair contains a.
func (s *subjects) pairGroupsOf(a netip.Addr) (groupList, bool) {
	for _, pair := range s.pairs {
		if pair.prefix.Contains(a) {
			return pair.groups, true
		}
	}
	return nil, false
}

// permit reports whether a rule of the groups matches a flow with the given peer.
func (p *policy) permit(list groupList, direction cloud.Direction, f *flow, peer netip.Addr) bool {
	kind := ruleKind{direction, f.source.Is6()}
	for _, id := range list {
		for i := range p.rules.rules[id][kind] {
			if p.matches(&p.rules.rules[id][kind][i], f, peer) {
				return true
			}
		}
	}
	return false
}

func (p *policy) matches(m *match, f *flow, peer netip.Addr) bool {
	switch {
	case m.protocol >= 0 && m.protocol != int(f.protocol),
		m.ports != nil && (f.port < m.ports.First || f.port > m.ports.Last),
		m.icmp != nil && (f.icmpType != m.icmp.Type || !m.icmp.AnyCode && f.icmpCode != m.icmp.Code),
		m.prefix.IsValid() && !m.prefix.Contains(peer),
		m.group != "" && !p.rules.members[m.group][peer]:
		return false
	}
	return true
}
