package cloud

import (
	"net/netip"
	"strconv"
)

// HostGateway is a NAT gateway that is on one host at a time, the gateway's host, as a host with the VPC needs it.
// Other hosts send packets for the gateway to its host through VXLAN devices with a VNI of their own. The gateway's
// host forwards them to the external network. Packets from outside reach a port by the VNI of the port's subnet.
//
// A HostGateway with a ServiceIP is the floating IP of this service IP. Its host distributes connections from outside
// over the backends. Packets in both directions between this host and the backends on other hosts have the VNI of the
// gateway, by which the backend's host recognizes the connections whose answers it must send to the gateway's host.
type HostGateway struct {
	// ID is the ID of the NAT gateway, or that of the floating IP.
	ID NATGatewayID
	// ServiceIP is empty for a NAT gateway.
	ServiceIP ServiceIPID
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

// TransitDevice returns the name of the VXLAN device for packets with the VNI of a HostGateway.
func TransitDevice(vni uint32) string { return "vt" + strconv.FormatUint(uint64(vni), 10) }

// Local reports whether this host is the gateway's host.
func (g *HostGateway) Local() bool { return !g.VTEP.IsValid() }

// OnOneHost reports whether a NAT gateway is on one host at a time. Otherwise it is the VPC's default without an
// address of its own, and each host translates the connections of its own ports.
func (n *NATGateway) OnOneHost() bool { return !n.Default || n.Address.IsValid() }

// NATGatewayOnHost is a NAT gateway, or the floating IP of a service IP, as the hosts that have its VPC need it.
type NATGatewayOnHost struct {
	NATGateway
	// ServiceIP is empty for a NAT gateway.
	ServiceIP ServiceIPID
	// VTEP is the underlay address of the gateway's host. It is invalid if the gateway has no host or its address is
	// unknown.
	VTEP netip.Addr
}
