package netdev

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// gatewayRoute returns a route to the NAT gateway with an ID.
func gatewayRoute(destination string, id cloud.NATGatewayID) cloud.HostRoute {
	return cloud.HostRoute{Destination: netip.MustParsePrefix(destination), Target: cloud.RouteNAT, Gateway: id}
}

// TestTransitGateways requires that packets to a NAT gateway reach the namespace of the VPC on the gateway's host, and that
// answers reach the guest. It requires this also if the gateway's host has no port, after the gateway has moved, and
// after changes by hand.
func TestTransitGateways(t *testing.T) {
	l := newLab(t, 3)
	a, b := place{1, 10, 0}, place{2, 20, 1}
	vpcs := testVPC(l, "a", 100, a, b)
	const world = "198.51.100.1" // an address that the gateway's host has, in place of an external network
	put := func(id cloud.NATGatewayID, vni uint32, at int, isDefault bool) {
		for i := range vpcs {
			g := cloud.HostGateway{ID: id, VNI: vni, Default: isDefault}
			if i != at {
				g.VTEP = l.hosts[at].vtep
			}
			vpcs[i].Gateways = append(vpcs[i].Gateways, g)
		}
	}
	apply := func() {
		t.Helper()
		for i, h := range l.hosts {
			h.apply(vpcs[i])
			require.Empty(t, h.apply(vpcs[i]))
		}
	}
	guestA, guestB := l.hosts[0].endpoint("a", portID(1, 10)), func() string { return l.hosts[1].endpoint("a", portID(2, 20)) }
	unreached := func(from, why string) {
		t.Helper()
		require.Error(t, l.ping(from, netip.MustParseAddr(world), 100, 300*time.Millisecond), why)
	}
	put("g", 200, 2, true)
	apply()
	l.ip(l.hosts[2].vpcName("a"), "address add %s/32 dev lo", world)
	for _, from := range []string{guestA, guestB()} {
		l.requirePing(from, world)
	}
	require.NoError(t, l.ping(guestA, netip.MustParseAddr(world), 1450, 5*time.Second))
	requireReach(l, "a", a, b)
	require.Error(t, l.ping(guestA, netip.MustParseAddr("10.0.77.1"), 100, 300*time.Millisecond),
		"an address of the VPC without subnet must not be sent to the gateway")

	h, name := l.hosts[0], l.hosts[0].vpcName("a")
	before := l.dump(name)
	const neighbour = "ip neighbour replace 169.254.0.1 lladdr 02:ff:00:00:00:01 dev vt200 nud permanent"
	for _, test := range []struct {
		name, command string
		repair        []string
	}{
		{"route deleted", "route delete default table 100000200",
			[]string{"ip route replace 0.0.0.0/0 via 169.254.0.1 dev vt200 onlink table 100000200"}},
		{"rule deleted", "rule delete priority 34100", []string{"ip rule add lookup 100000200 priority 34100"}},
		{"neighbour deleted", "neighbour delete 169.254.0.1 dev vt200", []string{neighbour}},
		{"device down", "link set vt200 down", nil},
		{"device deleted", "link delete vt200", nil},
		{"other MAC address", "link set vt200 address 02:00:00:00:00:77",
			[]string{"ip link set vt200 address 02:ff:00:00:00:02", neighbour}},
	} {
		t.Run(test.name, func(t *testing.T) {
			l.t = t
			l.ip(name, "%s", test.command)
			h.requireRepair(vpcs[0], test.repair, before)
			l.requirePing(guestA, world)
		})
	}
	l.t = t

	// The gateway moves to a host with a port, and is no longer the default.
	for i := range vpcs {
		vpcs[i].Gateways = nil
	}
	put("g", 200, 1, false)
	apply()
	unreached(guestA, "without a route, packets must not reach a gateway that is not the default")
	vpcs[0].Subnets[0].Routes = []cloud.HostRoute{gatewayRoute("198.51.100.0/24", "g")}
	apply()
	l.ip(l.hosts[2].vpcName("a"), "address delete %s/32 dev lo", world)
	unreached(guestA, "packets must not reach the former host")
	l.ip(l.hosts[1].vpcName("a"), "address add %s/32 dev lo", world)
	l.requirePing(guestA, world)

	for i := range vpcs {
		vpcs[i].Gateways, vpcs[i].Subnets[0].Routes = nil, nil
	}
	apply()
	require.NotContains(t, l.ip(name, "link")+l.ip(name, "rule")+l.ip(name, "route show table all"), "200")
}

// TestGatewaysAreChecked requires an error for gateways that are invalid or contradict each other, and for a route to a
// gateway that does not exist.
func TestGatewaysAreChecked(t *testing.T) {
	vtep := netip.MustParseAddr("192.0.2.2")
	for want, gateways := range map[string][]cloud.HostGateway{
		"VNI 0 is not between":         {{ID: "g", VTEP: vtep}},
		"both have br101":              {{ID: "g", VNI: 101, VTEP: vtep}},
		"VTEP 192.0.2.1 cannot":        {{ID: "g", VNI: 200, VTEP: netip.MustParseAddr("192.0.2.1")}},
		"two default NAT gateways":     {{ID: "g", VNI: 200, Default: true}, {ID: "h", VNI: 201, Default: true}},
		"the VPC has no NAT gateway x": {},
	} {
		vpc := testVPC(&lab{hosts: make([]*labHost, 1)}, "a", 100)[0]
		vpc.Gateways = gateways
		if len(gateways) == 0 {
			vpc.Subnets[0].Routes = []cloud.HostRoute{gatewayRoute("0.0.0.0/0", "x")}
		}
		_, err := render(&vpc, underlay{vtep: netip.MustParseAddr("192.0.2.1")})
		require.ErrorContains(t, err, want)
	}
}
