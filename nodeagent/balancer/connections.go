package balancer

import (
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/trivet-cloud/trivet/nodeagent/netfilter"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// endpoint is a port of a service IP.
type endpoint struct {
	address  netip.Addr
	protocol uint8
	port     uint16
}

// obsolete selects the tracked connections to service IPs that are to be deleted: those whose service IP, port or
// backend was removed, those that were not translated, and the UDP entries of unhealthy backends. The reply of a
// connection comes from the backend.
func obsolete(vpc *cloud.HostVPC) netfilter.Selection {
	services := map[netip.Addr]bool{}
	targets := map[endpoint]uint16{}
	usable := map[netip.Addr]map[netip.Addr]bool{} // by service IP and backend
	for i := range vpc.Services {
		s := &vpc.Services[i]
		backends := map[netip.Addr]bool{}
		for j := range s.Backends {
			b := &s.Backends[j]
			backends[b.Address] = backends[b.Address] || isUsable(b)
		}
		for _, a := range addressesOf(s) {
			services[a], usable[a] = true, backends
			for _, p := range s.Ports {
				targets[endpoint{a, p.Protocol, p.Port}] = p.Target
			}
		}
	}
	return func(f *netlink.ConntrackFlow) bool {
		address := netfilter.Address(f.Forward.DstIP)
		if f.Mark&connectionMark == 0 && !services[address] {
			return false
		}
		target, exists := targets[endpoint{address, f.Forward.Protocol, f.Forward.DstPort}]
		healthy, isBackend := usable[address][netfilter.Address(f.Reverse.SrcIP)]
		return !exists || !isBackend || f.Reverse.SrcPort != target || f.Forward.Protocol == cloud.ProtocolUDP && !healthy
	}
}
