package netdev

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// portRoute returns a route to a port of testVPC.
func portRoute(destination string, subnet, n int) cloud.HostRoute {
	r := cloud.HostRoute{Destination: netip.MustParsePrefix(destination), Target: cloud.RoutePort}
	ip, ip6 := guest(subnet, n)
	r.Via = netip.MustParseAddr(ip)
	if r.Destination.Addr().Is6() {
		r.Via = netip.MustParseAddr(ip6)
	}
	return r
}

func blackhole(destination string) cloud.HostRoute {
	return cloud.HostRoute{Destination: netip.MustParsePrefix(destination), Target: cloud.RouteBlackhole}
}

// TestRoutes requires that packets to destinations outside of the VPC follow the route table of the sender's subnet,
// also if the target is a port on another host.
func TestRoutes(t *testing.T) {
	l := newLab(t, 2)
	sender, other, near, far := place{1, 10, 0}, place{2, 40, 0}, place{2, 30, 0}, place{1, 20, 1}
	vpcs := testVPC(l, "a", 100, sender, other, near, far)
	for i := range vpcs {
		vpcs[i].Subnets[0].Routes = []cloud.HostRoute{
			portRoute("0.0.0.0/0", 2, 30), portRoute("198.51.100.0/24", 1, 20), blackhole("198.51.100.99/32"),
			portRoute("::/0", 2, 30), portRoute("2001:db8:1::/48", 1, 20), blackhole("2001:db8:1::99/128"),
		}
	}
	for i, h := range l.hosts {
		h.apply(vpcs[i])
		require.Empty(t, h.apply(vpcs[i]))
	}
	// The targets have the addresses outside of the VPC themselves.
	h := l.hosts[0]
	nearName, farName := h.endpoint("a", portID(2, 30)), l.hosts[1].endpoint("a", portID(1, 20))
	for _, a := range []string{"203.0.113.1/32", "10.0.77.1/32", "2001:db8:2::1/128", "fd00:0:0:77::1/128"} {
		l.ip(nearName, "address add %s dev eth0", a)
	}
	for _, a := range []string{"198.51.100.1/32", "198.51.100.99/32", "2001:db8:1::1/128", "2001:db8:1::99/128"} {
		l.ip(farName, "address add %s dev eth0", a)
	}
	from := h.endpoint("a", portID(1, 10))
	requirePings := func() {
		t.Helper()
		for _, to := range []string{"203.0.113.1", "198.51.100.1", "2001:db8:2::1", "2001:db8:1::1"} {
			l.requirePing(from, to)
		}
		requireReach(l, "a", sender, other)
		requireReach(l, "a", sender, far)
	}
	requirePings()

	// A blackhole, an address of the VPC without subnet, and a subnet without route table.
	unreached := func(from, to string) {
		t.Helper()
		require.Error(t, l.ping(from, netip.MustParseAddr(to), 100, 300*time.Millisecond), "%s reaches %s", from, to)
	}
	for _, to := range []string{"198.51.100.99", "2001:db8:1::99", "10.0.77.1", "fd00:0:0:77::1"} {
		unreached(from, to)
	}
	unreached(h.endpoint("a", portID(2, 40)), "203.0.113.1")

	name := h.vpcName("a")
	before := l.dump(name)
	ip := func(command string) func() { return func() { l.ip(name, "%s", command) } }
	for _, test := range []struct {
		name   string
		damage func()
		repair []string
	}{
		{"route deleted", ip("route delete 198.51.100.0/24 table 100000101"),
			[]string{"ip route replace 198.51.100.0/24 via 10.0.1.20 dev br101 table 100000101"}},
		{"IPv6 route deleted", ip("-6 route delete default table 100000101"),
			[]string{"ip route replace ::/0 via fd00:0:0:2::1e dev br102 table 100000101"}},
		{"route changed", ip("route replace blackhole default table 100000101"),
			[]string{"ip route replace 0.0.0.0/0 via 10.0.2.30 dev br102 table 100000101"}},
		{"IPv6 route changed", ip("-6 route replace 2001:db8:1::99/128 via fd00:0:0:1::14 dev br101 table 100000101"), nil},
		{"further route", ip("route add 192.0.2.0/24 via 10.0.1.20 table 100000101"),
			[]string{"ip route delete 192.0.2.0/24 metric 0 table 100000101"}},
		{"further metric", ip("route add default via 10.0.1.20 metric 5 table 100000101"),
			[]string{"ip route delete 0.0.0.0/0 metric 5 table 100000101"}},
		{"route in the table of another subnet", ip("route add blackhole default table 100000102"),
			[]string{"ip route delete 0.0.0.0/0 metric 0 table 100000102"}},
		{"rule deleted", ip("rule delete priority 33000"),
			[]string{"ip rule add iif br101 lookup 100000101 priority 33000"}},
		{"further rule", ip("-6 rule add iif br102 lookup 100000101 priority 33000"),
			[]string{"ip -6 rule delete iif br102 lookup 100000101 priority 33000"}},
		{"bridge of the target down", ip("link set br102 down"), nil},
		{"bridge of the target deleted", ip("link delete br102"), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			l.t = t
			test.damage()
			h.requireRepair(vpcs[0], test.repair, before)
			requirePings()
		})
	}
	l.t = t

	// A target that moves to another port is replaced in one step. Without routes nothing is left.
	vpcs[0].Subnets[0].Routes[0] = portRoute("0.0.0.0/0", 2, 40)
	require.Equal(t, []string{"ip route replace 0.0.0.0/0 via 10.0.2.40 dev br102 table 100000101"}, texts(h.apply(vpcs[0])))
	vpcs[0].Subnets[0].Routes = nil
	require.NotEmpty(t, h.apply(vpcs[0]))
	require.Empty(t, h.apply(vpcs[0]))
	require.NotContains(t, l.ip(name, "route show table all")+l.ip(name, "rule"), "100000101")
	require.NotContains(t, l.ip(name, "-6 route show table all")+l.ip(name, "-6 rule"), "100000101")
}

func TestRoutesAreChecked(t *testing.T) {
	for want, routes := range map[string][]cloud.HostRoute{
		"two routes for 192.0.2.0/24": {blackhole("192.0.2.0/24"), blackhole("192.0.2.0/24")},
		"not a masked prefix":         {blackhole("192.0.2.1/24")},
		"target 9 is not supported":   {{Destination: netip.MustParsePrefix("0.0.0.0/0"), Target: 9}},
		"translate IPv4 only":         {{Destination: netip.MustParsePrefix("::/0"), Target: cloud.RouteNAT}},
		"not an address of a port":    {portRoute("0.0.0.0/0", 9, 10)},
		"fd00:0:0:1::a is not an address": {{
			Destination: netip.MustParsePrefix("0.0.0.0/0"), Target: cloud.RoutePort, Via: netip.MustParseAddr("fd00:0:0:1::a"),
		}},
	} {
		vpc := testVPC(&lab{hosts: make([]*labHost, 1)}, "a", 100)[0]
		vpc.Subnets[0].Routes = routes
		_, err := render(&vpc, underlay{vtep: netip.MustParseAddr("192.0.2.1")})
		require.ErrorContains(t, err, want)
	}
}

// TestRemotePairs requires that the address pairs of a port on another host are reachable, unless several ports have
// the same address.
func TestRemotePairs(t *testing.T) {
	l := newLab(t, 2)
	neighbourOf, routed, owner, sharing := place{1, 10, 0}, place{2, 40, 0}, place{1, 20, 1}, place{1, 21, 1}
	vpcs := testVPC(l, "a", 100, neighbourOf, routed, owner, sharing)
	further := cloud.MAC{2, 9, 0, 0, 0, 1}
	pairs := []cloud.AddressPair{
		{CIDR: netip.MustParsePrefix("10.0.1.64/30")}, {CIDR: netip.MustParsePrefix("fd00:0:0:1::99/128")},
		{CIDR: netip.MustParsePrefix("10.0.1.80/32"), MAC: further},
	}
	shared := []cloud.AddressPair{
		{CIDR: netip.MustParsePrefix("10.0.1.90/32")}, {CIDR: netip.MustParsePrefix("10.0.1.10/32")}, // another port's own
		{CIDR: netip.MustParsePrefix("10.0.1.1/32")}, {CIDR: netip.MustParsePrefix("10.0.1.0/24")},
		{CIDR: netip.MustParsePrefix("203.0.113.0/24")}, {CIDR: netip.MustParsePrefix("10.0.1.91/32"), MAC: cloud.MAC{2, 0, 0, 0, 1, 10}},
	}
	for i, mac := range []cloud.MAC{{2, 0, 0, 0, 1, 20}, {2, 0, 0, 0, 1, 21}} {
		own := append([]cloud.AddressPair{}, shared...)
		if i == 0 {
			own = append(own, pairs...)
		}
		remotes := vpcs[0].Subnets[0].Remotes
		for j := range remotes {
			if remotes[j].MAC == mac {
				remotes[j].Pairs = own
			}
		}
		ports := vpcs[1].Subnets[0].Ports
		for j := range ports {
			if ports[j].MAC == mac {
				ports[j].Pairs = own
			}
		}
	}
	without := testVPC(l, "a", 100, neighbourOf, routed, owner, sharing)[0]
	l.hosts[0].apply(without)
	var repair []string
	for _, a := range []string{"10.0.1.64", "10.0.1.65", "10.0.1.66", "10.0.1.67"} {
		repair = append(repair, fmt.Sprintf("ip neighbour replace %s lladdr 02:00:00:00:01:14 dev br101 nud permanent", a))
	}
	repair = append([]string{"bridge fdb replace 02:09:00:00:00:01 dev vx101 dst 192.0.2.2 self master static sticky"}, append(repair,
		"ip neighbour replace 10.0.1.80 lladdr 02:09:00:00:00:01 dev br101 nud permanent",
		"ip neighbour replace fd00:0:0:1::99 lladdr 02:00:00:00:01:14 dev br101 nud permanent")...)
	require.Equal(t, repair, texts(l.hosts[0].apply(vpcs[0])))
	require.Empty(t, l.hosts[0].apply(vpcs[0]))
	l.hosts[1].apply(vpcs[1])

	e := l.hosts[1].endpoint("a", portID(1, 20))
	l.ip(e, "address add 10.0.1.66/32 dev eth0")
	l.ip(e, "address add fd00:0:0:1::99/128 dev eth0 nodad")
	// The further MAC address is that of a nested guest, behind a bridge of the port's guest.
	l.ip(e, "link add link eth0 name nested type macvlan mode bridge")
	l.ip(e, "link set nested address %s up", further)
	l.addNamespace("nested")
	l.ip(e, "link set nested netns %snested", l.prefix)
	l.ip("nested", "address add 10.0.1.80/24 dev nested")
	l.ip("nested", "link set nested up")
	l.ip("nested", "route add default via 10.0.1.1")
	for _, from := range []place{neighbourOf, routed} {
		name := l.hosts[0].endpoint("a", portID(from.subnet, from.n))
		for _, to := range []string{"10.0.1.66", "fd00:0:0:1::99", "10.0.1.80"} {
			l.requirePing(name, to)
		}
	}
	require.Len(t, l.hosts[0].apply(without), 8) // two FDB entries and six neighbours are deleted
}

// TestLinkLocal requires that the bridge of a subnet with IPv6 has the link-local address of the gateway, from which
// router advertisements and DHCPv6 replies are sent, and that the bridge of a subnet without IPv6 has none.
func TestLinkLocal(t *testing.T) {
	require.Equal(t, netip.MustParseAddr("fe80::ff:ff:fe00:1"), linkLocal)
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0})[0]
	vpc.Subnets[1].CIDR6 = netip.Prefix{}
	h.apply(vpc)
	name := h.vpcName("a")
	require.Contains(t, l.ip(name, "-6 -o address show dev br101"), "inet6 fe80::ff:ff:fe00:1/64 scope link")
	require.NotContains(t, l.ip(name, "-6 -o address show dev br102"), "inet6")
	l.requirePing(h.endpoint("a", "p1-10"), "fd00:0:0:1::1")
	require.NoError(t, l.in(name, func() error {
		socket, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(socket)
		device, err := net.InterfaceByName("br101")
		if err != nil {
			return err
		}
		return unix.Bind(socket, &unix.SockaddrInet6{Port: 547, Addr: linkLocal.As16(), ZoneId: uint32(device.Index)})
	}), "the address cannot be used before duplicate address detection")

	l.ip(name, "address delete fe80::ff:ff:fe00:1/64 dev br101")
	require.Equal(t, []string{"ip address add fe80::ff:ff:fe00:1/64 dev br101 nodad"}, texts(h.apply(vpc)))
}
