package edge

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// joinUnderlay connects the hosts of the lab to an underlay, on which each has its VTEP as its address.
func (l *lab) joinUnderlay() {
	l.t.Helper()
	l.Add("u")
	l.IP("u", "link add underlay type bridge")
	l.IP("u", "link set underlay up")
	for i, h := range l.hosts {
		l.IP(h.name, "link add eth0 type veth peer name %s netns %su", h.name, l.Prefix)
		l.IP("u", "link set %s master underlay up", h.name)
		l.IP(h.name, "address add 192.0.2.%d/24 dev eth0", i+1)
		l.IP(h.name, "link set eth0 up")
	}
}

// spread adds a VPC to each host, with one port on each: port 11 on the first, 12 on the second and so on.
func (l *lab) spread(id cloud.VPCID) (vpcs []*cloud.HostVPC) {
	l.t.Helper()
	for i, h := range l.hosts {
		vpcs = append(vpcs, h.addVPC(id, byte(11+i)))
	}
	for i, v := range vpcs {
		for j, other := range vpcs {
			if p := other.Subnets[0].Ports[0]; i != j {
				v.Subnets[0].Remotes = append(v.Subnets[0].Remotes, cloud.RemotePort{
					MAC: p.MAC, IP: p.IP, VTEP: parseAddr(fmt.Sprintf("192.0.2.%d", j+1)),
				})
			}
		}
	}
	return vpcs
}

// place puts a gateway on the host with an index, or on no host if at is negative. The other hosts send packets for the
// gateway to this host.
func place(vpcs []*cloud.HostVPC, g cloud.HostGateway, at int) {
	for i, v := range vpcs {
		var kept []cloud.HostGateway
		for _, other := range v.Gateways {
			if other.ID != g.ID {
				kept = append(kept, other)
			}
		}
		v.Gateways = kept
		if g.Default {
			v.NAT = nil
		}
		if at < 0 {
			continue
		}
		here := g
		if i != at {
			here.VTEP = parseAddr(fmt.Sprintf("192.0.2.%d", at+1))
		} else if g.Default {
			v.NAT = &here.HostNAT
		}
		v.Gateways = append(v.Gateways, here)
	}
}

// applyGateways applies the states of the hosts, in the order of order, and requires that applying them again writes
// nothing.
func (l *lab) applyGateways(order ...int) {
	l.t.Helper()
	for _, i := range order {
		h := l.hosts[i]
		for _, v := range h.vpcs {
			h.applyVPC(v)
		}
		h.apply()
		require.Empty(l.t, h.apply().Changes)
	}
}

// TestGateways requires that the guests of all hosts reach the outside with the address of a NAT gateway on one host.
// It also requires this of a VPC with several gateways and after a gateway has moved, and that ports with floating IPs
// use these instead.
func TestGateways(t *testing.T) {
	l := newLab(t, 3)
	l.joinUnderlay()
	vpcs, others := l.spread("a"), l.spread("b")
	const second = "198.51.100.2:7000"
	nat := func(address string) (n cloud.HostNAT) {
		n.External = internet
		if address != "" {
			n.Address = parseAddr(address)
		}
		return n
	}
	main := cloud.HostGateway{ID: "main", VNI: 201, Default: true, HostNAT: nat("203.0.113.50")}
	place(vpcs, main, 0)
	place(others, cloud.HostGateway{ID: "b-main", VNI: 202, Default: true, HostNAT: nat("203.0.113.51")}, 2)
	l.applyGateways(0, 1, 2)
	guest := func(i int) string { return l.hosts[i].guest(vpcs[i], vpcs[i].Subnets[0].Ports[0].ID) }
	var open []*client
	for i := range l.hosts {
		open = append(open, l.requireDial(guest(i), outside, "203.0.113.50"))
		l.requirePing(guest(i), "198.51.100.1")
		l.requireDial(l.hosts[i].guest(others[i], others[i].Subnets[0].Ports[0].ID), outside, "203.0.113.51")
	}
	l.requireDial(guest(0), "10.0.1.12:7000", "10.0.1.11")
	l.IP("internet", "route add 10.0.0.0/16 via 203.0.113.50")
	l.requireNoDial("internet", "10.0.1.12:7000", "the internet reaches a guest's private address")
	l.requireNoDial("internet", "203.0.113.50:7000", "the internet reaches the address of a NAT gateway")

	// A floating IP of a port on another host than the gateway's.
	vpcs[1].Floating = []cloud.HostFloating{floating("203.0.113.120", "10.0.1.12")}
	l.applyGateways(1)
	l.requireDial(guest(1), outside, "203.0.113.120")
	l.requireDial("internet", "203.0.113.120:7000", "203.0.113.1")
	require.NoError(t, open[2].echo(patience))

	// A second gateway with an address, and one with that of its host.
	place(vpcs, cloud.HostGateway{ID: "extra", VNI: 203, HostNAT: nat("203.0.113.60")}, 0)
	place(vpcs, cloud.HostGateway{ID: "plain", VNI: 204, HostNAT: nat("")}, 1)
	l.applyGateways(0, 1, 2)
	for i := range l.hosts {
		if i != 1 {
			l.requireDial(guest(i), second, "203.0.113.50")
		}
		vpcs[i].Subnets[0].Routes = []cloud.HostRoute{
			{Destination: parsePrefix("198.51.100.0/24"), Target: cloud.RouteNAT, Gateway: "extra"},
			{Destination: parsePrefix("198.51.100.1/32"), Target: cloud.RouteNAT},
			{Destination: parsePrefix("203.0.113.1/32"), Target: cloud.RouteNAT, Gateway: "plain"},
		}
	}
	l.serve("internet", "203.0.113.1:7000")
	l.applyGateways(0, 1, 2)
	for i := range l.hosts {
		l.requireDial(guest(i), second, "203.0.113.60")
		l.requireDial(guest(i), outside, []string{"203.0.113.50", "203.0.113.120", "203.0.113.50"}[i])
		l.requireDial(guest(i), "203.0.113.1:7000", "203.0.113.3")
	}

	// The default gateway moves: first its former host withdraws the address.
	place(vpcs, main, 2)
	l.applyGateways(0, 1, 2)
	require.NotContains(t, l.IP(l.hosts[0].edgeName(), "neighbour show proxy"), "203.0.113.50")
	for _, i := range []int{0, 2} {
		l.requireDial(guest(i), outside, "203.0.113.50")
		l.requireDial(guest(i), second, "203.0.113.60")
	}
	require.Error(t, open[0].echo(blocked), "a connection outlives the move of its gateway")

	// Without gateways nothing is left.
	for _, id := range []cloud.NATGatewayID{"main", "extra", "plain"} {
		place(vpcs, cloud.HostGateway{ID: id, Default: id == "main"}, -1)
	}
	vpcs[1].Floating = nil
	for _, v := range vpcs {
		v.Subnets[0].Routes = nil
	}
	l.applyGateways(0, 1, 2)
	l.requireNoDial(guest(0), outside, "a guest reaches the internet without NAT gateway")
	for i, h := range l.hosts {
		inside := h.inside(vpcs[i])
		left := l.IP(inside, "link") + l.IP(inside, "rule") + l.IP(inside, "route show table all") + l.nft(inside, "list tables ip")
		for _, trace := range []string{"edge", "vt20", "lookup 9", "lookup 12"} {
			require.NotContains(t, strings.ReplaceAll(left, l.Prefix, ""), trace)
		}
	}
}

// TestGatewaysAreRepaired requires that Set repairs what it made for gateways that are not the default.
func TestGatewaysAreRepaired(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	a := h.addVPC("a", 10)
	a.Gateways = []cloud.HostGateway{{ID: "extra", VNI: 203, HostNAT: cloud.HostNAT{External: internet, Address: parseAddr("203.0.113.60")}}}
	a.Subnets[0].Routes = []cloud.HostRoute{{Destination: parsePrefix("198.51.100.0/24"), Target: cloud.RouteNAT, Gateway: "extra"}}
	h.applyVPC(a)
	h.apply()
	name := h.inside(a)
	device := (&connection{gateway: &Gateway{ID: "extra"}}).inner()
	for _, damage := range []string{
		"rule delete priority 33500", "rule delete priority 33600", "route delete 198.51.100.0/24 table 120000001", "link delete " + device,
	} {
		l.IP(name, "%s", damage)
		require.NotEmpty(t, h.repair(), damage)
		require.Empty(t, h.apply().Changes, damage)
		l.requireDial(h.guest(a, "p10"), outside, "203.0.113.60")
	}
	require.Contains(t, l.IP(name, "rule"), "from all iif "+netdev.Transit(203))
}
