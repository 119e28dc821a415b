package cloud

import (
	"net/netip"
	"strings"
)

// HostNetwork is what a host offers to VPCs, as its agent reported it.
type HostNetwork struct {
	// VTEP is the host's address on the underlay, to which other hosts send VXLAN packets. The zero value means that
	// the agent reported none.
	VTEP netip.Addr
	// UnderlayMTU is the MTU of the underlay.
	UnderlayMTU uint32
	// External lists the names of the external networks that the host is connected to.
	External []string
	// Missing lists what the host lacks for network interfaces of VMs, for example a kernel feature. The host can have
	// network interfaces of VMs only if the list is empty.
	Missing []string
}

// Shortage returns a text that says why a host cannot have network interfaces of VMs. It returns "" if the host can
// have them. A nil HostNetwork is that of a host whose agent has not reported its network.
func (n *HostNetwork) Shortage() string {
	switch {
	case n == nil:
		return "the host has not reported its network"
	case len(n.Missing) > 0:
		return strings.Join(n.Missing, ", ")
	case !n.VTEP.IsValid():
		return "the host has reported no underlay address"
	}
	return ""
}
