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
