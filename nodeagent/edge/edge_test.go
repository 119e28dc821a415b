package edge

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestNAT requires that guests of a VPC with a NAT gateway reach the internet with the host's address, also if another
// VPC has the same addresses, and that nothing outside reaches them.
func TestNAT(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	a, b, c := h.addVPC("a", 10), h.addVPC("b", 10), h.addVPC("c", 10)
	a.NAT, b.NAT = &cloud.HostNAT{External: internet}, &cloud.HostNAT{External: internet}
	h.apply()
	first := l.requireDial(h.guest(a, "p10"), outside, "203.0.113.2")
	second := l.requireDial(h.guest(b, "p10"), outside, "203.0.113.2")
	require.NoError(t, first.echo(patience))
	require.NoError(t, second.echo(patience))
	l.requirePing(h.guest(a, "p10"), "198.51.100.1")
	l.requirePing("internet", "203.0.113.2")
	l.requireNoDial(h.guest(c, "p10"), outside, "a guest without NAT gateway reaches the internet")
	l.IP("internet", "route add 10.0.0.0/16 via 203.0.113.2")
	l.IP("internet", "route add 169.254.0.0/16 via 203.0.113.2")
	l.requireNoDial("internet", "10.0.1.10:7000", "the internet reaches a guest's private address")

	// A NAT gateway with an address of its own.
	c.NAT = &cloud.HostNAT{External: internet, Address: parseAddr("203.0.113.50")}
	h.apply()
	l.requireDial(h.guest(c, "p10"), outside, "203.0.113.50")
	l.requireNoDial("internet", "203.0.113.50:7000", "the internet reaches the address of a NAT gateway")

	// Removal ends connections.
	a.NAT = nil
	require.Positive(t, h.apply().Revoked)
	require.Error(t, first.echo(blocked), "a connection outlives the NAT gateway")
	require.NoError(t, second.echo(patience))
	l.requireNoDial(h.guest(a, "p10"), outside, "a guest reaches the internet without NAT gateway")
}

// TestRouteTables requires that the route table of a subnet precedes the NAT gateway, and that a route to the NAT
// gateway is an exception from it.
func TestRouteTables(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	a := h.addVPC("a", 10)
	a.NAT = &cloud.HostNAT{External: internet}
	a.Subnets[0].Routes = []cloud.HostRoute{
		{Destination: parsePrefix("198.51.100.0/24"), Target: cloud.RouteBlackhole},
		{Destination: parsePrefix("198.51.100.2/32"), Target: cloud.RouteNAT},
	}
	h.applyVPC(a)
	h.apply()
	l.requireDial(h.guest(a, "p10"), "198.51.100.2:7000", "203.0.113.2")
	l.requireNoDial(h.guest(a, "p10"), outside, "the NAT gateway precedes a blackhole")
	require.Contains(t, l.IP(h.inside(a), "route show table 100000001"), "throw 198.51.100.2")
	prepared, err := h.devices.Prepare(t.Context(), *a)
	require.NoError(t, err)
	require.Empty(t, prepared.Changes)
}

// TestFloatingIPs requires that ports with floating IPs are reachable and send from them, also among one another, if
// two VPCs have the same addresses.
func TestFloatingIPs(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	a, b := h.addVPC("a", 10, 11, 12), h.addVPC("b", 10, 12)
	a.Floating = []cloud.HostFloating{floating("203.0.113.110", "10.0.1.10"), floating("203.0.113.111", "10.0.1.11")}
	a.NAT = &cloud.HostNAT{External: internet}
	b.Floating = []cloud.HostFloating{floating("203.0.113.120", "10.0.1.10")}
	h.apply()
	a10, a11, a12, b10 := h.guest(a, "p10"), h.guest(a, "p11"), h.guest(a, "p12"), h.guest(b, "p10")
	l.requireDial(a10, outside, "203.0.113.110")
	l.requireDial(a11, outside, "203.0.113.111")
	l.requireDial(a12, outside, "203.0.113.2")
	l.requireDial(b10, outside, "203.0.113.120")
	l.requireNoDial(h.guest(b, "p12"), outside, "a port reaches the internet without floating IP and NAT gateway")
	for _, to := range []string{"203.0.113.110:7000", "203.0.113.111:7000", "203.0.113.120:7000"} {
		l.requireDial("internet", to, "203.0.113.1")
	}
	l.requirePing("internet", "203.0.113.120")
	l.requireDial(a10, "203.0.113.120:7000", "203.0.113.110") // another VPC
	l.requireDial(b10, "203.0.113.111:7000", "203.0.113.120")
	l.requireDial(a12, "203.0.113.120:7000", "203.0.113.2") // from a NAT gateway
	l.requireDial(a10, "203.0.113.111:7000", "203.0.113.110")
	l.requireDial(a12, "203.0.113.111:7000", "203.0.113.2")
	l.requireDial(a10, "203.0.113.110:7000", "203.0.113.110") // itself

	// Each connection ends at the VPC that has the address.
	l.serve(a10, ":7001")
	l.requireDial("internet", "203.0.113.110:7001", "203.0.113.1")
	l.requireNoDial("internet", "203.0.113.120:7001", "a connection reached the other VPC")
}

// TestSecurityGroups requires that the rules of security groups decide about packets to a floating IP with the original
// source address.
func TestSecurityGroups(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	a := h.addVPC("a", 10)
	a.Floating = []cloud.HostFloating{floating("203.0.113.110", "10.0.1.10")}
	a.Subnets[0].Ports[0].Groups = []cloud.SecurityGroupID{"closed"}
	h.applyVPC(a)
	h.apply()
	l.requireNoDial("internet", "203.0.113.110:7000", "no rule permits the connection")
	permit := func(source string) {
		rule := cloud.Rule{Direction: cloud.Ingress, Protocol: cloud.ProtocolTCP,
			Ports: cloud.PortRange{First: 7000, Last: 7000}, CIDR: parsePrefix(source)}
		a.Groups[0].Rules = []cloud.Rule{a.Groups[0].Rules[0], rule}
		h.applyVPC(a)
	}
	permit("203.0.113.99/32")
	l.requireNoDial("internet", "203.0.113.110:7000", "the rule is for another source")
	permit("203.0.113.1/32")
	l.requireDial("internet", "203.0.113.110:7000", "203.0.113.1")
	require.Empty(t, h.apply().Changes)
}

// TestRemovedFloatingIP requires that the connections of a floating IP end when it is removed or given to another port,
// although packets of the former port still have a way out, by a NAT gateway.
func TestRemovedFloatingIP(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	a := h.addVPC("a", 10, 11)
	a.NAT = &cloud.HostNAT{External: internet}
	a.Floating = []cloud.HostFloating{floating("203.0.113.110", "10.0.1.10")}
	h.apply()
	in := l.requireDial("internet", "203.0.113.110:7000", "203.0.113.1")
	out := l.requireDial(h.guest(a, "p10"), outside, "203.0.113.110")
	require.NoError(t, in.echo(patience))

	a.Floating = []cloud.HostFloating{floating("203.0.113.110", "10.0.1.11")}
	h.apply()
	require.Error(t, in.echo(blocked), "a connection to the former port continues")
	require.Error(t, out.echo(blocked), "a connection of the former port continues")
	in = l.requireDial("internet", "203.0.113.110:7000", "203.0.113.1")
	out = l.requireDial(h.guest(a, "p11"), outside, "203.0.113.110")

	a.Floating = nil
	require.Equal(t, 2, h.apply().Revoked)
	require.Error(t, in.echo(blocked), "a connection to a removed floating IP continues")
	require.Error(t, out.echo(blocked), "a connection from a removed floating IP continues")
	l.requireNoDial("internet", "203.0.113.110:7000", "a removed floating IP is reachable")
	a.NAT = nil
	h.apply()
	require.NotContains(t, l.IP(h.inside(a), "link"), vpcDevice)
	require.Empty(t, h.apply().Changes)
}

// TestDenied requires that guests cannot open connections to denied addresses, the host and the edge, but that denied
// addresses can use floating IPs.
func TestDenied(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	a := h.addVPC("a", 10, 11)
	a.NAT = &cloud.HostNAT{External: internet}
	a.Floating = []cloud.HostFloating{floating("203.0.113.110", "10.0.1.10")}
	a.Denied = []netip.Addr{parseAddr("198.51.100.2")}
	h.applyVPC(a)
	h.apply()
	l.IP(h.name, "address add 203.0.113.90/24 dev eth1")
	l.serve(h.name, ":7000")
	l.serve(h.edgeName(), ":7000")
	for _, from := range []string{h.guest(a, "p10"), h.guest(a, "p11")} {
		l.requireDial(from, outside, map[bool]string{true: "203.0.113.110", false: "203.0.113.2"}[from == h.guest(a, "p10")])
		for _, to := range []string{"198.51.100.2:7000", "203.0.113.2:7000", "203.0.113.90:7000"} {
			l.requireNoDial(from, to, from+" reaches the denied address "+to)
		}
		near, _ := addressesOf(numberIn(t, h))
		l.requireNoDial(from, near.String()+":7000", "a guest reaches the edge")
	}
	l.requireNoDial("internet", "203.0.113.2:7000", "the internet reaches the edge")
	// Answers to a denied address.
	l.IP("internet", "route add 203.0.113.110/32 dev eth0 src 198.51.100.2")
	l.requireDial("internet", "203.0.113.110:7000", "198.51.100.2")
}

// numberIn returns the number of the only veth pair of a host.
func numberIn(t *testing.T, h *labHost) int {
	t.Helper()
	c := []*connection{{VPC: h.state().VPCs[0]}}
	s, err := openSpace(t.Context(), h.edge.path(), &Result{})
	require.NoError(t, err)
	defer s.Close()
	links, err := s.links()
	require.NoError(t, err)
	require.NoError(t, numbers(c, links))
	require.Contains(t, links, c[0].device())
	return c[0].number
}

// TestForeignSource requires that the edge namespace drops packets of a VPC with an address of another VPC,
// whatever the rules in the VPC's namespace are.
func TestForeignSource(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	a, b := h.addVPC("a", 10), h.addVPC("b", 10)
	a.Floating = []cloud.HostFloating{floating("203.0.113.110", "10.0.1.10")}
	b.Floating = []cloud.HostFloating{floating("203.0.113.120", "10.0.1.10")}
	h.apply()
	l.nft("internet", "add table ip count")
	l.nft("internet", "add chain ip count received { type filter hook prerouting priority 0; }")
	l.nft("internet", "add rule ip count received ip saddr 203.0.113.110 tcp flags & (syn | ack) == syn counter")
	received := func() string { return l.nft("internet", "list table ip count") }
	before := received()
	l.requireDial(h.guest(a, "p10"), outside, "203.0.113.110")
	require.NotEqual(t, before, received())
	l.requireDial(h.guest(b, "p10"), outside, "203.0.113.120")

	l.nft(h.inside(b), "flush chain ip trivet-edge source")
	l.nft(h.inside(b), "add rule ip trivet-edge source snat to 203.0.113.110")
	before = received()
	l.requireNoDial(h.guest(b, "p10"), outside, "a VPC sends with an address of another VPC")
	require.Equal(t, before, received(), "a packet with the address of another VPC left the host")
	h.apply()
	l.requireDial(h.guest(b, "p10"), outside, "203.0.113.120")
}
