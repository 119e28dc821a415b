package cloud

import "net/netip"

// ExternalNetwork is a network outside of the cloud to which hosts are attached. Operators define it; tenants get
// addresses of its pools.
type ExternalNetwork struct {
	// Name identifies the network. The configuration of hosts refers to it.
	Name        string
	CIDR        netip.Prefix
	Pools       []AddressRange
	Gateway     netip.Addr // invalid without a gateway
	VLAN        uint16     // 0 means untagged
	Description string
	CreatedAt   Time
	UpdatedAt   Time
}

// AddressRange is a range of IPv4 addresses, both ends included.
type AddressRange struct{ First, Last netip.Addr }

// Contains reports whether an address is in the range.
func (r AddressRange) Contains(a netip.Addr) bool {
	return r.First.Compare(a) <= 0 && a.Compare(r.Last) <= 0
}

// Limits of external networks.
const (
	MaxPools = 16
	MaxVLAN  = 4094
)

// Check returns an InvalidArgument fault if the fields of the network contradict each other.
func (n *ExternalNetwork) Check() error {
	if err := CheckName("name", n.Name); err != nil {
		return err
	}
	switch {
	case !n.CIDR.Addr().Is4():
		return invalid("cidr_block", "ipv4", "must be an IPv4 prefix, got %s", n.CIDR)
	case n.Gateway.IsValid() && !n.CIDR.Contains(n.Gateway):
		return invalid("gateway_ip", "within_network", "must be within %s, got %s", n.CIDR, n.Gateway)
	case n.VLAN > MaxVLAN:
		return invalid("vlan", "range", "must be 0 to %d, got %d", MaxVLAN, n.VLAN)
	case len(n.Pools) == 0 || len(n.Pools) > MaxPools:
		return invalid("pools", "max_items", "must be 1 to %d, got %d", MaxPools, len(n.Pools))
	}
	for i, p := range n.Pools {
		if err := n.checkPool(i, p); err != nil {
			return err
		}
	}
	return CheckDescription(n.Description)
}

func (n *ExternalNetwork) checkPool(i int, p AddressRange) error {
	switch {
	case !p.First.Is4() || !p.Last.Is4() || p.Last.Less(p.First):
		return invalid("pools", "range", "first and last must be IPv4 addresses in ascending order, got %s and %s", p.First, p.Last)
	case !n.CIDR.Contains(p.First) || !n.CIDR.Contains(p.Last):
		return invalid("pools", "within_network", "must be within %s, got %s to %s", n.CIDR, p.First, p.Last)
	case n.Gateway.IsValid() && p.Contains(n.Gateway):
		return invalid("pools", "gateway", "%s to %s contains the gateway %s", p.First, p.Last, n.Gateway)
	}
	for _, o := range n.Pools[:i] {
		if p.Contains(o.First) || o.Contains(p.First) {
			return invalid("pools", "no_overlap", "%s to %s overlaps %s to %s", p.First, p.Last, o.First, o.Last)
		}
	}
	return nil
}

// NATGateway gives outgoing connections of a VPC an address of an external network.
type NATGateway struct {
	ID          NATGatewayID
	Name        string
	Org         OrgID
	Project     ProjectID
	Description string
	VPC         VPCID
	External    string // name of the external network
	// Address is invalid if each host uses its own address in the external network.
	Address netip.Addr
	// Default marks the target of the VPC's default route.
	Default bool
	Placement
	Status       NetworkStatus
	StatusReason string
	CreatedAt    Time
	UpdatedAt    Time
}

// Placement is the host of a NAT gateway that is OnOneHost, or of a floating IP. If the floating IP leads to a port,
// only Node (the port's host) and BindingGeneration are set.
type Placement struct {
	// VNI is the VXLAN network identifier of packets between the host and the other hosts of the VPC. It is 0 until the
	// resource has its first host.
	VNI uint32
	// Node is the host that the resource is on, or "". BindingGeneration grows each time Node changes.
	Node              NodeID
	BindingGeneration uint64
	// Former is the host that the resource was on, until this host has acknowledged that it no longer has the resource.
	// Otherwise Former is "". The resource gets no other host until the acknowledgment.
	Former NodeID
}

// FloatingIP is an address of an external network that a project has. It leads to a port or to a service IP, or to
// nothing.
type FloatingIP struct {
	ID          FloatingIPID
	Name        string
	Org         OrgID
	Project     ProjectID
	Description string
	External    string // name of the external network
	Address     netip.Addr
	Port        PortID
	ServiceIP   ServiceIPID
	Fixed       netip.Addr // the target's address, invalid without a target
	// VPC is the VPC of ServiceIP. It is empty for other targets, and in records of earlier versions.
	VPC VPCID
	Placement
	Status       NetworkStatus
	StatusReason string
	CreatedAt    Time
	UpdatedAt    Time
}
