package cloud

import (
	"fmt"
	"net/netip"
	"strings"
)

// HostNetwork describes the network of a host, as the host's agent reported it.
type HostNetwork struct {
	// VTEP is the host's address on the underlay, to which other hosts send VXLAN packets. The zero value means that
	// the agent reported none.
	VTEP netip.Addr
	// UnderlayMTU is the MTU of the underlay, or 0 if the agent reported none.
	UnderlayMTU uint32
	// External lists the names of the external networks that the host is connected to.
	External []string
	// Missing lists what the host lacks for network interfaces of VMs, for example a kernel feature. The host can have
	// network interfaces of VMs only if the list is empty.
	Missing []string
	// Encrypt is true if the host encrypts the VXLAN packets that it sends, and drops received VXLAN packets that are
	// not encrypted.
	Encrypt bool
	// Instance identifies the running kernel, which loses the states of the encryption when the host is restarted.
	// Instance then changes.
	Instance string
	// Number distinguishes the host from all other hosts with encryption. The control plane assigns it, from 1 to
	// 2^24−1. It is 0 if the host has never encrypted.
	Number uint32
}

// VXLANOverhead is the number of bytes that VXLAN over IPv4 adds to a guest's IP packet: the inner Ethernet header,
// VXLAN, UDP and the outer IP header. vxlanOverhead6 is that of VXLAN over IPv6.
const VXLANOverhead, vxlanOverhead6 = 50, 70

// Shortage returns a text that says why a host cannot have network interfaces of VMs in VPCs with the given MTU. It
// returns "" if the host can have them. A nil HostNetwork is that of a host whose agent has not reported its network.
func (n *HostNetwork) Shortage(mtu uint16) string {
	overhead := uint32(VXLANOverhead)
	if n != nil && n.VTEP.Is6() {
		overhead = vxlanOverhead6
	}
	with := ""
	if n != nil && n.Encrypt {
		overhead += ESPOverhead
		with = " with encryption"
	}
	switch {
	case n == nil:
		return "the host has not reported its network"
	case len(n.Missing) > 0:
		return strings.Join(n.Missing, ", ")
	case !n.VTEP.IsValid():
		return "the host has reported no underlay address"
	case n.UnderlayMTU != 0 && uint32(mtu)+overhead > n.UnderlayMTU:
		return fmt.Sprintf("its underlay has an MTU of %d, and the VPC needs %d%s", n.UnderlayMTU, uint32(mtu)+overhead, with)
	}
	return ""
}
