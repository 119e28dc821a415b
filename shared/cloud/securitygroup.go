package cloud

import "net/netip"

// DefaultSecurityGroup is the name of the group that each project has. It permits all traffic between its own ports and
// all outgoing traffic.
const DefaultSecurityGroup = "default"

// SecurityGroup is a set of rules for the traffic of ports. A port with several groups may send and receive what any
// of them permits. A port with port security and without groups may neither send nor receive.
type SecurityGroup struct {
	ID          SecurityGroupID
	Name        string
	Org         OrgID
	Project     ProjectID
	Description string
	// Default marks the group DefaultSecurityGroup of the project.
	Default   bool
	Rules     []Rule
	CreatedAt Time
	UpdatedAt Time
}

// Direction is the direction of traffic as the port's device sees it. The numbers are those of network.v1.Direction.
type Direction uint8

const (
	Ingress Direction = 1
	Egress  Direction = 2
)

// Numbers of IP protocols, as in the protocol field of IPv4 and the next-header field of IPv6.
const (
	ProtocolICMP   = 1
	ProtocolTCP    = 6
	ProtocolUDP    = 17
	ProtocolICMPv6 = 58
	ProtocolSCTP   = 132
)

// Rule permits traffic in one direction. Replies of permitted connections pass too.
type Rule struct {
	ID        RuleID
	Direction Direction
	// IPv6 is true for rules for IPv6 and false for rules for IPv4.
	IPv6 bool
	// Protocol is the number of an IP protocol. AnyProtocol is true if the rule is for all protocols.
	Protocol    uint8
	AnyProtocol bool
	// Ports is the range of destination ports; the zero value means all. Only for TCP, UDP and SCTP.
	Ports PortRange
	// ICMP is the type and code; nil means all. Only for ICMP and ICMPv6.
	ICMP *ICMP
	// CIDR and Group restrict the source of ingress and the destination of egress. At most one of them is set; without
	// both the rule is for all addresses. Group means the addresses of the ports that have this group.
	CIDR        netip.Prefix
	Group       SecurityGroupID
	Description string
}

// PortRange is a range of TCP, UDP or SCTP ports, both ends included.
type PortRange struct{ First, Last uint16 }

// ICMP is a type of ICMP or ICMPv6 messages. AnyCode is true for all codes of the type.
type ICMP struct {
	Type, Code uint8
	AnyCode    bool
}

// Check returns an InvalidArgument fault if the fields of a rule contradict each other. It does not check the ID.
func (r *Rule) Check() error {
	if r.Direction != Ingress && r.Direction != Egress {
		return invalid("rule.direction", "required", "must be ingress or egress")
	}
	if err := r.checkProtocol(); err != nil {
		return err
	}
	if r.CIDR.IsValid() && r.Group != "" {
		return invalid("rule.remote_cidr", "exclusive", "must be empty if remote_group_id is set")
	}
	if r.CIDR.IsValid() && r.CIDR.Addr().Is6() != r.IPv6 {
		return invalid("rule.remote_cidr", "ethertype", "%s is not a prefix of the rule's ethertype", r.CIDR)
	}
	if r.Group != "" {
		if err := CheckUUID("rule.remote_group_id", string(r.Group)); err != nil {
			return err
		}
	}
	return CheckDescription(r.Description)
}

func (r *Rule) checkProtocol() error {
	hasPorts := !r.AnyProtocol && (r.Protocol == ProtocolTCP || r.Protocol == ProtocolUDP || r.Protocol == ProtocolSCTP)
	hasICMP := !r.AnyProtocol && (r.Protocol == ProtocolICMP && !r.IPv6 || r.Protocol == ProtocolICMPv6 && r.IPv6)
	switch {
	case r.Ports != PortRange{} && !hasPorts:
		return invalid("rule.port_min", "protocol", "ports are only for tcp, udp and sctp")
	case r.Ports.First > r.Ports.Last:
		return invalid("rule.port_max", "range", "must not be less than port_min, %d, got %d", r.Ports.First, r.Ports.Last)
	case r.Ports != PortRange{} && r.Ports.First == 0:
		return invalid("rule.port_min", "range", "must be 1 to 65535")
	case r.ICMP != nil && !hasICMP:
		return invalid("rule.icmp_type", "protocol", "ICMP types are only for icmp with IPv4 and icmpv6 with IPv6")
	case !r.AnyProtocol && (r.Protocol == ProtocolICMP && r.IPv6 || r.Protocol == ProtocolICMPv6 && !r.IPv6):
		return invalid("rule.protocol", "ethertype", "icmp is for IPv4 and icmpv6 is for IPv6")
	}
	return nil
}

// Equal reports whether two rules permit the same traffic in the same words. It ignores the IDs and descriptions.
func (r *Rule) Equal(o *Rule) bool {
	if (r.ICMP == nil) != (o.ICMP == nil) || r.ICMP != nil && *r.ICMP != *o.ICMP {
		return false
	}
	a, b := *r, *o
	a.ID, a.Description, a.ICMP = b.ID, b.Description, b.ICMP
	return a == b
}
