package cloud

import (
	"net"
	"net/netip"
)

// HostVPC is the wanted state of a VPC on one host that needs it: the host has ports or a NAT gateway of the VPC, or of
// a VPC that is peered with it. The control plane sends it to the host's agent, which changes the kernel's state
// accordingly. Other hosts have no HostVPC for the VPC.
//
// All slices are sorted by their first field, so that equal states are equal values.
type HostVPC struct {
	ID VPCID
	// MTU is the MTU of the guests' interfaces.
	MTU uint16
	// CIDR and CIDR6 are the prefixes of the VPC. CIDR6 is invalid without IPv6.
	CIDR, CIDR6 netip.Prefix
	// Subnets are all subnets of the VPC, also those without ports on this host: the host routes between them.
	Subnets []HostSubnet
	// Groups are the security groups of the ports on this host.
	Groups []HostGroup
	// Members are the addresses of the groups that rules in Groups refer to, of ports on all hosts.
	Members []GroupMembers
	// Denied are sorted addresses outside of the VPC to which no packet of the VPC is forwarded: those of the cloud's
	// hosts and of the members of its control plane.
	Denied []netip.Addr
	// LooseTCP lets conntrack begin TCP connections with a segment from the middle of a connection. After a live
	// migration the VM's connections have no conntrack entries on the new host, and would end without LooseTCP. With it,
	// a revoked connection can continue if the rules still permit packets of its other direction. The agent sets the
	// field for a short time; the control plane does not.
	LooseTCP bool
	// NAT is the VPC's default NAT gateway if this host translates its connections, and otherwise nil. Each host with
	// ports of the VPC translates them if the gateway has no address of its own. Otherwise only the gateway's host
	// does.
	NAT *HostNAT
	// Gateways are the NAT gateways of the VPC that are on one host.
	Gateways []HostGateway
	// Floating are the floating IPs of the ports on this host.
	Floating []HostFloating
	// Services are the service IPs of the VPC. Every host with the VPC has all of them.
	Services []HostService
	// Peerings are the ACTIVE peerings with VPCs that the host has too.
	Peerings []HostPeering
}

// EdgeDevicePrefix starts the names of the devices in the namespace of a VPC that lead to external networks.
const EdgeDevicePrefix = "edge"

// HostNAT is the translation of the connections through a NAT gateway.
type HostNAT struct {
	// External is the name of the external network.
	External string
	// Address is the address of the external network that connections of the VPC get as their source. It is invalid if
	// they get the host's own address in the external network. If it is valid, at most one host may have the HostNAT.
	Address netip.Addr
}

// HostFloating is a floating IP of a port on this host. Only one host at a time has the HostFloating of an address.
type HostFloating struct {
	// Address is the IPv4 address in the external network.
	Address netip.Addr
	// External is the name of the external network.
	External string
	// Fixed is the IPv4 address of the port.
	Fixed netip.Addr
}

// HostSubnet is the wanted state of a subnet on a host.
type HostSubnet struct {
	ID SubnetID
	// VNI is the VXLAN network identifier.
	VNI uint32
	// CIDR and Gateway are the IPv4 prefix and the gateway's address. Every host with the VPC has the gateway's address.
	CIDR    netip.Prefix
	Gateway netip.Addr
	// CIDR6 is a /64, whose gateway is the address that ends in ::1. It is invalid without IPv6.
	CIDR6 netip.Prefix
	DHCP  bool
	// DNS are the resolvers that DHCP announces; none means Gateway.
	DNS []netip.Addr
	// Ports are the ports on this host.
	Ports []HostPort
	// Remotes are the ports on other hosts.
	Remotes []RemotePort
	// Routes are the routes of the subnet's route table. They apply to packets that the subnet's guests send to
	// destinations outside of the VPC. The route with the longest prefix decides.
	Routes []HostRoute
}

// HostRoute is a route of a subnet, with the target's address instead of its ID.
type HostRoute struct {
	// Destination is a masked prefix.
	Destination netip.Prefix
	// Target is RoutePort, RouteBlackhole, RoutePeering, or, for IPv4, RouteNAT.
	Target RouteTarget
	// Gateway is the target of RouteNAT, one of HostVPC.Gateways. It is empty for the default gateway: packets are then
	// sent like those without any route, so that the route serves as an exception from one with a shorter prefix.
	Gateway NATGatewayID
	// Via is the address of the target port that has the IP version of Destination. It is invalid for other targets.
	Via netip.Addr
	// Peering is the target of RoutePeering. It is empty for other targets.
	Peering PeeringID
}

// HostPort is a port on this host.
type HostPort struct {
	ID PortID
	// Device is the name of the network interface on the host: a tap of a VM, or one end of a veth pair.
	Device string
	// HostName is the name by which other guests of the VPC find the port in DNS, without a domain. It may be empty.
	HostName string
	MAC      MAC
	IP       netip.Addr
	IP6      netip.Addr // invalid without IPv6
	// Secured is true if the port may send only from its own addresses and Pairs, and Groups apply. False removes both
	// restrictions.
	Secured bool
	// Groups are the IDs of the port's security groups. Each is in HostVPC.Groups.
	Groups []SecurityGroupID
	// Pairs are further addresses that the port may send from.
	Pairs []AddressPair
	// Mbps limits the bandwidth in each direction, in Mbit/s; 0 means no limit.
	Mbps uint32
	// Hairpin is true if the port may receive its own packets: it is a backend of a service IP, to which it may connect.
	Hairpin bool
}

// RemotePort is a port on another host.
type RemotePort struct {
	MAC MAC
	IP  netip.Addr
	IP6 netip.Addr // invalid without IPv6
	// HostName is as in HostPort.
	HostName string
	// Pairs are further addresses that the port may send from.
	Pairs []AddressPair
	// VTEP is the underlay address of the port's host.
	VTEP netip.Addr
}

// HostGroup is a security group as a host needs it.
type HostGroup struct {
	ID    SecurityGroupID
	Rules []Rule
}

// GroupMembers are the addresses of all ports in a security group.
type GroupMembers struct {
	ID        SecurityGroupID
	Addresses []netip.Addr // IPv4 and IPv6
}

// AddressPair is a prefix, and optionally a MAC address, that a port may send from in addition to its own.
type AddressPair struct {
	CIDR netip.Prefix
	// MAC is the port's own MAC if it is the zero value.
	MAC MAC
}

// MAC is an Ethernet address.
type MAC [6]byte

// String returns the address in lower case with colons, for example 02:00:00:12:34:56.
func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// GatewayMAC is the MAC address of every gateway. It is the same on all hosts, so that a VM that moves to another host
// need not learn a new one.
var GatewayMAC = MAC{0x02, 0xff, 0, 0, 0, 1}

// Gateway6 returns the address of the subnet's IPv6 gateway, or an invalid address without IPv6.
func (s *HostSubnet) Gateway6() netip.Addr {
	if !s.CIDR6.IsValid() {
		return netip.Addr{}
	}
	a := s.CIDR6.Addr().As16()
	a[15] = 1
	return netip.AddrFrom16(a)
}
