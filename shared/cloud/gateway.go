package cloud

import "net/netip"

// HostGateway is a NAT gateway that is on one host at a time, the gateway's host, as a host with the VPC needs it.
// Other hosts send packets for the gateway to its host through VXLAN devices with a VNI of their own. The gateway's
// host forwards them to the external network. Packets from outside reach a port by the VNI of the port's subnet.
type HostGateway struct {
	ID NATGatewayID
	// VNI is the VXLAN network identifier of packets to the gateway. No subnet has the same one.
	VNI uint32
	// VTEP is the underlay address of the gateway's host. It is invalid if this host is the gateway's host.
	VTEP netip.Addr
	// Default is true if packets for which a subnet has no route go to the gateway. At most one gateway of a VPC is the
	// default.
	Default bool
	// HostNAT describes the translation. Only the gateway's host uses it.
	HostNAT
}

// Local reports whether this host is the gateway's host.
func (g *HostGateway) Local() bool { return !g.VTEP.IsValid() }

// OnOneHost reports whether a NAT gateway is on one host at a time. Otherwise it is the VPC's default without an
// address of its own, and each host translates the connections of its own ports.
func (n *NATGateway) OnOneHost() bool { return !n.Default || n.Address.IsValid() }

// NATGatewayOnHost is a NAT gateway as the hosts that have its VPC need it.
type NATGatewayOnHost struct {
	NATGateway
	// VTEP is the underlay address of the gateway's host. It is invalid if the gateway has no host or its address is
	// unknown.
	VTEP netip.Addr
}
