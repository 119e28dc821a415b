package netdev

import (
	"crypto/sha256"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// servicePriority is the priority of the rules for packets of connections to floating IPs of service IPs. They precede
// the rule of the main table, because the main table leads to a backend on another host by the VNI of the backend's
// subnet.
const servicePriority = 32700

// markMask selects the bits of a packet's mark that have the VNI of a floating IP. Package balancer sets them.
const markMask = maxVNI

// addServiceTransit renders the routes, rules and entries that only the transit device of a floating IP of a service IP
// has, and that of a NAT gateway does not have.
//
// On the host with the floating IP, it renders routes, neighbours and forwarding entries for the backends on other
// hosts. On the other hosts, it renders the route for the answers of backends to the host with the floating IP. In both
// cases, the routes apply only to packets that package balancer has marked with the VNI.
func (w *state) addServiceTransit(vpc *cloud.HostVPC, g *cloud.HostGateway, u *underlay) {
	device, table := Transit(g.VNI), Bridge(g.VNI)
	w.rules[tableRule{table: tableOf(table), priority: servicePriority, mark: g.VNI}] = true
	if !g.Local() {
		l := w.links[device]
		l.mac = transitMACOf(u.vtep)
		w.links[device] = l
		everywhere := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		w.tables[tableRoute{bridge: table, destination: everywhere}] = nextHop{unix.RTN_UNICAST, transitHop, device}
		return
	}
	for i := range vpc.Services {
		s := &vpc.Services[i]
		if s.ID != g.ServiceIP {
			continue
		}
		for _, b := range s.Backends {
			r := remoteAt(vpc, b.Address)
			if r == nil {
				continue
			}
			mac := transitMACOf(r.VTEP)
			destination := netip.PrefixFrom(b.Address, b.Address.BitLen())
			w.tables[tableRoute{bridge: table, destination: destination}] = nextHop{unix.RTN_UNICAST, b.Address, device}
			w.neighbours[neighbour{device, b.Address}] = mac
			w.tunnels[station{device, mac}] = r.VTEP
		}
	}
}

// transitMACOf returns the MAC address of transit devices of floating IPs on the host with a VTEP. The host with the
// floating IP sends packets for a backend to the MAC address of the backend's host, so each host has its own MAC
// address. It is a locally administered address with the bytes of an IPv4 VTEP, or a hash of an IPv6 VTEP.
func transitMACOf(vtep netip.Addr) cloud.MAC {
	mac := cloud.MAC{0x02, 0xfe}
	if vtep.Is4() {
		copy(mac[2:], vtep.AsSlice())
		return mac
	}
	sum := sha256.Sum256(vtep.AsSlice())
	copy(mac[2:], sum[:])
	return mac
}

// remoteAt returns the port on another host that has an address, as its own or in an address pair. It returns nil if
// there is none, or if a port on this host has the address as its own.
func remoteAt(vpc *cloud.HostVPC, a netip.Addr) (found *cloud.RemotePort) {
	for i := range vpc.Subnets {
		s := &vpc.Subnets[i]
		for j := range s.Ports {
			if s.Ports[j].IP == a {
				return nil
			}
		}
		for j := range s.Remotes {
			r := &s.Remotes[j]
			if r.IP == a {
				return r
			}
			for _, p := range r.Pairs {
				if found == nil && p.CIDR.Contains(a) {
					found = r
				}
			}
		}
	}
	return found
}
