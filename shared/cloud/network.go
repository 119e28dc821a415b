package cloud

import (
	"net/netip"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// IDs of network resources.
type (
	VPCID           string
	SubnetID        string
	PortID          string
	SecurityGroupID string
	RuleID          string
	RouteTableID    string
	NATGatewayID    string
	FloatingIPID    string
	ServiceIPID     string
	PeeringID       string
)

// NetworkStatus is the status of a network resource. The numbers are those of network.v1.Status.
type NetworkStatus int32

const (
	NetworkPending  NetworkStatus = 1
	NetworkActive   NetworkStatus = 2
	NetworkError    NetworkStatus = 3
	NetworkDeleting NetworkStatus = 4
	// NetworkDown is the status of a port without a device.
	NetworkDown NetworkStatus = 5
)

// Limits of network resources.
const (
	MaxSecurityGroups = 16  // of a port
	MaxAddressPairs   = 10  // of a port
	MaxRules          = 200 // of a security group
	MaxRoutes         = 100 // of a route table
	MaxDNSServers     = 3   // of a subnet
	MaxServicePorts   = 32  // of a service IP
	MaxBackends       = 250 // of a service IP
	MaxDescription    = 255 // bytes
	MaxPortLabels     = 16  // of a port, and of a selector
	MaxPortLabelBytes = 1024
)

// VPC is a private network of a project. Its subnets are parts of its prefixes.
type VPC struct {
	ID          VPCID
	Name        string
	Org         OrgID
	Project     ProjectID
	Description string
	CIDR        netip.Prefix
	// CIDR6 is invalid for a VPC without IPv6.
	CIDR6 netip.Prefix
	// ServiceCIDR is a part of CIDR that no subnet overlaps. It has the addresses of the service IPs without a subnet.
	// It is invalid for a VPC in which each service IP needs a subnet.
	ServiceCIDR netip.Prefix
	MTU         uint16
	// Default marks the VPC of NICs that name neither VPC nor subnet.
	Default      bool
	Status       NetworkStatus
	StatusReason string
	CreatedAt    Time
	UpdatedAt    Time
}

// Contains reports whether an address is in one of the VPC's prefixes.
func (v *VPC) Contains(a netip.Addr) bool {
	return v.CIDR.Contains(a) || v.CIDR6.IsValid() && v.CIDR6.Contains(a)
}

// Subnet is a part of a VPC: one layer-2 segment.
type Subnet struct {
	ID          SubnetID
	Name        string
	VPC         VPCID
	Org         OrgID
	Project     ProjectID
	Description string
	CIDR        netip.Prefix
	// CIDR6 is a /64, or invalid for a subnet without IPv6.
	CIDR6   netip.Prefix
	Gateway netip.Addr
	DHCP    bool
	// DNS are the resolvers that guests use; none means the subnet's own at Gateway.
	DNS []netip.Addr
	// VNI is the VXLAN network identifier, unique in the cloud while a host may have the subnet.
	VNI          uint32
	Status       NetworkStatus
	StatusReason string
	CreatedAt    Time
	UpdatedAt    Time
}

// CheckDescription returns an InvalidArgument fault if a description is too long.
func CheckDescription(s string) error {
	if len(s) > MaxDescription {
		return fault.Invalid("description", "must have at most %d bytes, has %d", MaxDescription, len(s))
	}
	return nil
}

// ParseCIDR parses a prefix in CIDR notation. It returns an InvalidArgument fault with the constraint for an empty
// string, another notation, and bits beyond the prefix's length.
func ParseCIDR(field, s string) (netip.Prefix, error) {
	if s == "" {
		f := fault.New(fault.InvalidArgument, "%s is required", field)
		f.Field = field
		return netip.Prefix{}, f.With("constraint", "required")
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || p.Addr().Is4In6() {
		return netip.Prefix{}, invalid(field, "cidr", "must be a prefix such as 10.0.0.0/16, got %q", s)
	}
	if p != p.Masked() {
		return netip.Prefix{}, invalid(field, "cidr", "has bits beyond the length of the prefix: use %s", p.Masked())
	}
	return p, nil
}

// CheckVPCPrefix returns an InvalidArgument fault unless p may be the IPv4 prefix of a VPC.
func CheckVPCPrefix(field string, p netip.Prefix) error {
	switch {
	case !p.Addr().Is4():
		return invalid(field, "ipv4", "must be an IPv4 prefix, got %s", p)
	case p.Bits() < 8 || p.Bits() > 28:
		return invalid(field, "prefix_length", "must have a length of 8 to 28, got %s", p)
	case !private(p):
		return invalid(field, "private", "must be within 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16, got %s", p)
	}
	return nil
}

// CheckVPCPrefix6 returns an InvalidArgument fault unless p may be the IPv6 prefix of a VPC.
func CheckVPCPrefix6(field string, p netip.Prefix) error {
	switch {
	case !p.Addr().Is6():
		return invalid(field, "ipv6", "must be an IPv6 prefix, got %s", p)
	case p.Bits() < 48 || p.Bits() > 56:
		return invalid(field, "prefix_length", "must have a length of 48 to 56, got %s", p)
	case !p.Addr().IsPrivate():
		return invalid(field, "private", "must be within fd00::/8, got %s", p)
	}
	return nil
}

// CheckServicePrefix returns an InvalidArgument fault unless p is a part of its VPC's IPv4 prefix that leaves room for
// subnets.
func CheckServicePrefix(field string, vpc, p netip.Prefix) error {
	switch {
	case !p.Addr().Is4() || !within(vpc, p) || p.Bits() == vpc.Bits():
		return invalid(field, "within_vpc", "must be a part of the VPC's prefix %s, got %s", vpc, p)
	case p.Bits() > 29:
		return invalid(field, "prefix_length", "must have a length of at most 29, got %s", p)
	}
	return nil
}

// CheckSubnetPrefix returns an InvalidArgument fault unless p is a part of its VPC's IPv4 prefix that has room for a
// gateway and a guest.
func CheckSubnetPrefix(field string, vpc *VPC, p netip.Prefix) error {
	switch {
	case !p.Addr().Is4() || !within(vpc.CIDR, p):
		return invalid(field, "within_vpc", "must be within the VPC's prefix %s, got %s", vpc.CIDR, p)
	case vpc.ServiceCIDR.IsValid() && vpc.ServiceCIDR.Overlaps(p):
		return invalid(field, "no_overlap", "must not overlap %s, which has the VPC's service IPs", vpc.ServiceCIDR)
	case p.Bits() > 29:
		return invalid(field, "prefix_length", "must have a length of at most 29, got %s", p)
	}
	return nil
}

// CheckSubnetPrefix6 returns an InvalidArgument fault unless p is a /64 of its VPC's IPv6 prefix.
func CheckSubnetPrefix6(field string, vpc *VPC, p netip.Prefix) error {
	switch {
	case !vpc.CIDR6.IsValid():
		return invalid(field, "within_vpc", "must be empty: the VPC has no IPv6 prefix")
	case p.Bits() != 64 || !within(vpc.CIDR6, p):
		return invalid(field, "within_vpc", "must be a /64 of the VPC's prefix %s, got %s", vpc.CIDR6, p)
	}
	return nil
}

// CheckGateway returns an InvalidArgument fault unless a is a host address of the subnet's prefix.
func CheckGateway(field string, p netip.Prefix, a netip.Addr) error {
	switch {
	case !p.Contains(a):
		return invalid(field, "within_subnet", "must be within the subnet %s, got %s", p, a)
	case a == p.Masked().Addr():
		return invalid(field, "host_address", "must not be the network address of %s", p)
	case a == Last(p):
		return invalid(field, "host_address", "must not be the broadcast address of %s", p)
	}
	return nil
}

// Last returns the highest address of a prefix: the broadcast address of an IPv4 subnet.
func Last(p netip.Prefix) netip.Addr {
	bytes := p.Addr().AsSlice()
	for i := range bytes {
		free := 8*(i+1) - p.Bits()
		bytes[i] |= byte(1<<min(max(free, 0), 8) - 1)
	}
	a, _ := netip.AddrFromSlice(bytes)
	return a
}

// within reports whether all addresses of inner are in outer.
func within(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

func private(p netip.Prefix) bool {
	for _, s := range []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} {
		if within(netip.MustParsePrefix(s), p) {
			return true
		}
	}
	return false
}

// invalid returns an InvalidArgument fault about a field, with the constraint that its value violates.
func invalid(field, constraint, format string, args ...any) *fault.Fault {
	return fault.Invalid(field, format, args...).With("constraint", constraint)
}
