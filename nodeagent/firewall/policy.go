package firewall

import (
	"net/netip"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// policy decides about connections as the rendered chains do. It serves to find connections that began under other
// rules.
type policy struct {
	subjects *subjects
	rules    *ruleBook
}

// flow is a tracked connection, or an exchange of UDP packets or ICMP queries, as the chain FORWARD sees its first
// packet: with the source before translation and the destination after it.
type flow struct {
	source, destination netip.Addr
	protocol            uint8
	port                uint16 // of the destination; 0 for protocols without ports
	icmpType, icmpCode  uint8  // of the first packet
}

// permits reports whether a flow may begin. Flows of the namespace itself are always permitted: they are not forwarded,
// and the rules for them depend on the gateways only.
func (p *policy) permits(f *flow) bool {
	s := p.subjects
	if s.gateways[f.source] || s.gateways[f.destination] {
		return true
	}
	if list, limited := s.groupsOf(f.source); limited && !p.permit(list, cloud.Egress, f, f.destination) {
		return false
	}
	list, limited := s.groupsOf(f.destination)
	return !limited || p.permit(list, cloud.Ingress, f, f.source)
}

// groupsOf returns the groups whose rules apply to the packets of an address. It returns false if no rules apply.
func (s *subjects) groupsOf(a netip.Addr) (groupList, bool) {
	if list, ok := s.own[a]; ok {
		return list, true
	}
	if s.open[a] {
		return nil, false
	}
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
