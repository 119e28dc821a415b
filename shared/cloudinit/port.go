package cloudinit

import (
	"net"
	"net/netip"
)

// Port is the configuration of a virtual network port. [NICs] derives the configuration of the guest's interface from
// it.
type Port struct {
	MAC net.HardwareAddr
	MTU uint16 // bytes
	// DHCP is true if the network has DHCP servers and router advertisements.
	DHCP bool
	// Addresses are the port's addresses, at most one of each family, with the length of the subnet's prefix.
	Addresses []netip.Prefix
	// Gateways are the subnet's gateways. A gateway of a family in which the port has no address is ignored.
	Gateways []netip.Addr
	// DNS and Search are used without DHCP, like the fields of [NIC]. A search domain that is not a DNS name is left
	// out: its value may come from a name that need not be one.
	DNS    []netip.Addr
	Search []string
}

// NICs returns the interfaces of a guest with the given ports. With DHCP, an interface asks for an address of each
// family that its port has. Without DHCP, it gets the port's addresses, resolvers and search domains. It gets the
// default route of a family only if no earlier port has an address of the family: as with DHCP, the first interface
// is used for destinations outside of the subnets.
func NICs(ports []Port) []NIC {
	var out []NIC
	routed4, routed6 := false, false // an earlier port has an address of the family
	for _, p := range ports {
		n := NIC{MAC: p.MAC, MTU: p.MTU}
		has4, has6 := false, false
		for _, a := range p.Addresses {
			has4, has6 = has4 || a.Addr().Is4(), has6 || a.Addr().Is6()
		}
		if p.DHCP {
			n.DHCP4, n.DHCP6 = has4, has6
		} else {
			n.Addresses, n.DNS = p.Addresses, p.DNS
			for _, domain := range p.Search {
				if isHostName(domain) {
					n.Search = append(n.Search, domain)
				}
			}
			for _, g := range p.Gateways {
				switch {
				case g.Is4() && has4 && !routed4:
					n.Gateway4 = g
				case g.Is6() && has6 && !routed6:
					n.Gateway6 = g
				}
			}
		}
		routed4, routed6 = routed4 || has4, routed6 || has6
		out = append(out, n)
	}
	return out
}
