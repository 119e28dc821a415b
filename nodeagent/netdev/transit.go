package netdev

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// transitPriority is the priority of the rule for packets to the default NAT gateway if it is on another host. The
// rules of package edge precede this rule, so that packets of a port with a floating IP have the floating IP as their
// source.
const transitPriority = 34100

var (
	// transitHop is the next hop of routes to gateways on other hosts. No device has this address. RFC 3927 reserves
	// it, and package edge does not use it.
	transitHop = netip.AddrFrom4([4]byte{169, 254, 0, 1})
	// transitMAC is the MAC address of the transit devices of hosts that send to a gateway. The transit device of the
	// gateway's host has cloud.GatewayMAC. The addresses differ because a VXLAN device drops frames that have its own
	// address as their source.
	transitMAC = cloud.MAC{0x02, 0xff, 0, 0, 0, 2}
)

// Transit returns the name of the transit device of the NAT gateway or floating IP with a VNI. On the gateway's host,
// packets from other hosts arrive from this device. On the other hosts, packets to the gateway leave through it.
func Transit(vni uint32) string { return cloud.TransitDevice(vni) }

// addTransit renders the transit device of a gateway. If the gateway is on another host, addTransit also renders the
// forwarding entry, the neighbour, and for the default gateway the routes and the rule.
func (w *state) addTransit(vpc *cloud.HostVPC, g *cloud.HostGateway, u *underlay) {
	device := Transit(g.VNI)
	l := link{
		kind: transitLink, mtu: int(vpc.MTU), up: true, mac: cloud.GatewayMAC, underlay: u.deviceName,
		vxlan:    vxlan{vni: g.VNI, vtep: u.vtep, port: u.port, device: u.device},
		settings: transitSettings(device),
	}
	if !g.Local() {
		l.mac = transitMAC
		w.tunnels[station{device, cloud.GatewayMAC}] = g.VTEP
		w.neighbours[neighbour{device, transitHop}] = cloud.GatewayMAC
	}
	w.links[device] = l
	if g.ServiceIP != "" {
		w.addServiceTransit(vpc, g, u)
		return
	}
	if g.Local() || !g.Default {
		return
	}
	table := Bridge(g.VNI)
	everywhere := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	w.tables[tableRoute{bridge: table, destination: everywhere}] = hopToGateway(vpc, g.ID)
	if vpc.CIDR.IsValid() {
		w.tables[tableRoute{bridge: table, destination: vpc.CIDR.Masked()}] = nextHop{kind: unix.RTN_UNREACHABLE}
	}
	w.rules[tableRule{table: tableOf(table), priority: transitPriority}] = true
}

// hopToGateway returns the next hop of packets to a NAT gateway. For a gateway on this host and for id "", the default
// gateway, it returns a throw route: the kernel then continues with the next rule. The routes to gateways on this host
// are those of package edge.
func hopToGateway(vpc *cloud.HostVPC, id cloud.NATGatewayID) nextHop {
	if g := gatewayOf(vpc, id); g != nil && !g.Local() {
		return nextHop{kind: unix.RTN_UNICAST, via: transitHop, bridge: Transit(g.VNI)}
	}
	return nextHop{kind: unix.RTN_THROW}
}

// gatewayOf returns the gateway with an ID, or nil.
func gatewayOf(vpc *cloud.HostVPC, id cloud.NATGatewayID) *cloud.HostGateway {
	i := slices.IndexFunc(vpc.Gateways, func(g cloud.HostGateway) bool { return g.ID == id })
	if i < 0 {
		return nil
	}
	return &vpc.Gateways[i]
}

// checkGateways returns an error for a gateway that the kernel would refuse or that contradicts another gateway.
func checkGateways(vpc *cloud.HostVPC, u *underlay, seen uses) error {
	defaults := 0
	for i := range vpc.Gateways {
		g := &vpc.Gateways[i]
		switch {
		case g.VNI == 0 || g.VNI > maxVNI:
			return fmt.Errorf("NAT gateway %s: VNI %d is not between 1 and %d", g.ID, g.VNI, maxVNI)
		case !g.Local() && (g.VTEP.Is4() != u.vtep.Is4() || g.VTEP == u.vtep):
			return fmt.Errorf("NAT gateway %s: VTEP %s cannot be reached from VTEP %s", g.ID, g.VTEP, u.vtep)
		}
		if err := seen.add(Bridge(g.VNI), "NAT gateway "+string(g.ID)); err != nil {
			return err
		}
		if g.Default {
			defaults++
		}
	}
	if defaults > 1 {
		return errors.New("the VPC has two default NAT gateways")
	}
	return nil
}

// transitSettings returns the sysctls of a transit device.
func transitSettings(name string) []sysctl {
	v4 := "net/ipv4/conf/" + name
	return []sysctl{
		{v4 + "/forwarding", "1"},
		{v4 + "/rp_filter", "0"},
		{v4 + "/send_redirects", "0"},
		{v4 + "/accept_redirects", "0"},
		{"net/ipv6/conf/" + name + "/disable_ipv6", "1"},
	}
}

// addTransitEntries adds and replaces the forwarding entries of transit devices.
func (p *planner) addTransitEntries() {
	for _, s := range slices.SortedFunc(maps.Keys(p.want.tunnels), compareStations) {
		if p.want.links[s.device].kind != transitLink {
			continue
		}
		vtep := p.want.tunnels[s]
		old, exists := p.have.tunnels[s]
		if exists && !old.IsValid() {
			p.add(deleteFDB{device: s.device, mac: s.mac, overlay: true})
		}
		if old != vtep {
			p.add(replaceFDB{device: s.device, mac: s.mac, vtep: vtep})
		}
	}
}
