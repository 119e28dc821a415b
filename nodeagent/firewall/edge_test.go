package firewall

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// addEdge connects the namespace of the VPC with a new one by a veth pair, as the edge of a host is connected, routes
// everything there, and returns the far end.
func (s *callStage) addEdge(t *testing.T) *wire {
	t.Helper()
	ns, mac, gateway := newNamespace(t, "edge"), cloud.MAC{2, 0, 0, 0, 9, 1}, cloud.GatewayMAC
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "edge", HardwareAddr: gateway[:]},
		PeerName: "eth0", PeerHardwareAddr: mac[:], PeerNamespace: netlink.NsFd(int(ns))}
	require.NoError(t, s.handle.LinkAdd(veth))
	require.NoError(t, s.handle.LinkSetUp(veth))
	runIn(t, ns, "", "ip", "link", "set", "eth0", "up")
	for _, hop := range []struct{ near, far string }{
		{"192.168.255.0/31", "192.168.255.1"}, {"fd99::/127", "fd99::1"},
	} {
		runIn(t, s.ns, "", "ip", "address", "add", hop.near, "dev", "edge", "nodad")
		runIn(t, s.ns, "", "ip", "neighbor", "add", hop.far, "lladdr", mac.String(), "dev", "edge", "nud", "permanent")
		runIn(t, s.ns, "", "ip", "route", "add", "default", "via", hop.far)
	}
	return openWire(t, ns, "eth0")
}

// outside returns a stand-in for a host at the other end of the edge.
func (s *callStage) outside(edge *wire, ip, ip6 string) *endpoint {
	e := &endpoint{subnet: -1, port: cloud.HostPort{IP: parseAddr(ip), IP6: parseAddr(ip6)}}
	s.wires[e] = edge
	return e
}

// TestDeniedPrefixes checks that ports reach other networks but not the denied prefixes, whatever their groups permit,
// and that a connection to a prefix that is denied later ends.
func TestDeniedPrefixes(t *testing.T) {
	s := newCallStage(t)
	s.group("open", allowAll(cloud.Ingress, cloud.Egress)...)
	client, free := s.add(t, 0, 5, "open"), s.add(t, 0, 6)
	near := s.add(t, 1, 7, "open")
	s.change(free, func(p *cloud.HostPort) { p.Secured = false })
	edge := s.addEdge(t)
	internet := s.outside(edge, "203.0.113.9", "2001:db8:2::9")
	host := s.outside(edge, "10.77.0.1", "2001:db8:1::1")
	denied := s.firewall
	var err error
	s.firewall, err = New(Options{Trusted: testOptions.Trusted})
	require.NoError(t, err)
	s.set(t)
	for _, ipv6 := range []bool{false, true} {
		require.Equal(t, "arrives", s.verdict(t, call{client, host, ipv6, udpTo(1)}), "before the prefix is denied")
		require.Equal(t, "arrives", s.verdict(t, call{client, internet, ipv6, udpTo(1)}))
	}
	s.firewall = denied
	require.Equal(t, 2, s.set(t).Revoked, "the connections to the denied prefixes")
	require.Equal(t, Result{}, s.set(t))
	for _, ipv6 := range []bool{false, true} {
		for _, port := range []uint16{1, 2} {
			for _, from := range []*endpoint{client, free} {
				require.Equal(t, "denied", s.verdict(t, call{from, host, ipv6, udpTo(port)}), "to a denied prefix")
				require.Equal(t, "arrives", s.verdict(t, call{from, internet, ipv6, udpTo(port)}), "to the internet")
			}
		}
		require.Equal(t, "arrives", s.verdict(t, call{client, near, ipv6, udpTo(1)}), "within the VPC")
	}
}

// TestDeniedAddresses checks that ports do not reach the addresses in Denied of cloud.HostVPC, such as those of hosts,
// that connections to an address end when the address becomes a denied one, and that a denied address within the VPC's
// own prefix stays reachable.
func TestDeniedAddresses(t *testing.T) {
	s := newCallStage(t)
	s.group("open", allowAll(cloud.Ingress, cloud.Egress)...)
	client, near := s.add(t, 0, 5, "open"), s.add(t, 1, 7, "open")
	edge := s.addEdge(t)
	internet := s.outside(edge, "203.0.113.9", "2001:db8:2::9")
	host := s.outside(edge, "198.51.100.1", "2001:db8:2::1")
	s.set(t)
	for _, ipv6 := range []bool{false, true} {
		require.Equal(t, "arrives", s.verdict(t, call{client, host, ipv6, udpTo(1)}), "before the address is denied")
		require.Equal(t, "arrives", s.verdict(t, call{client, internet, ipv6, udpTo(1)}))
	}
	s.vpc.Denied = []netip.Addr{near.port.IP, host.port.IP, host.port.IP6, near.port.IP6}
	require.Equal(t, 2, s.set(t).Revoked, "the connections to the denied addresses")
	require.Equal(t, Result{}, s.set(t))
	s.restart(t)
	require.Equal(t, Result{}, s.set(t))
	for _, ipv6 := range []bool{false, true} {
		for _, port := range []uint16{1, 2} {
			require.Equal(t, "denied", s.verdict(t, call{client, host, ipv6, udpTo(port)}), "to a denied address")
		}
		require.Equal(t, "arrives", s.verdict(t, call{client, internet, ipv6, udpTo(1)}), "to the internet")
		require.Equal(t, "arrives", s.verdict(t, call{client, near, ipv6, udpTo(1)}), "within the VPC")
	}
	s.vpc.Denied = nil
	s.set(t)
	require.Equal(t, "arrives", s.verdict(t, call{client, host, false, udpTo(2)}), "no longer denied")
}

// TestPairOfAllAddresses checks a port whose address pair contains all addresses, such as a router's. A connection from
// outside to the port does not begin at the port, although its source is in the pair: the port's egress rules do not
// apply to it.
func TestPairOfAllAddresses(t *testing.T) {
	s := newCallStage(t)
	in := allowAll(cloud.Ingress)
	s.group("router", in...)
	router := s.add(t, 0, 5, "router")
	s.change(router, func(p *cloud.HostPort) {
		p.Pairs = []cloud.AddressPair{{CIDR: parsePrefix("0.0.0.0/0")}, {CIDR: parsePrefix("::/0")}}
	})
	internet := s.outside(s.addEdge(t), "203.0.113.9", "2001:db8:2::9")
	forward := func(source, destination netip.Addr, tag string) []byte {
		transit := parseAddr("198.51.100.7")
		if source.Is6() {
			transit = parseAddr("2001:db8:3::7")
		}
		return udp(at(transit, 7), at(destination, 8), tag)
	}
	s.set(t)
	for _, ipv6 := range []bool{false, true} {
		require.Equal(t, "arrives", s.verdict(t, call{internet, router, ipv6, udpTo(1)}))
		require.Equal(t, "group", s.verdict(t, call{router, internet, ipv6, forward}))
	}
	require.Equal(t, Result{}, s.set(t), "the connections from outside")
	s.group("router", append(in, allowAll(cloud.Egress)...)...)
	s.set(t)
	for _, ipv6 := range []bool{false, true} {
		require.Equal(t, "arrives", s.verdict(t, call{router, internet, ipv6, forward}))
	}
	s.group("router", in...)
	require.Equal(t, 2, s.set(t).Revoked, "the connections that the router forwarded")
	for _, ipv6 := range []bool{false, true} {
		require.Equal(t, "group", s.verdict(t, call{router, internet, ipv6, forward}))
	}
}

// TestOptionsAreChecked checks that New refuses options that would disable the rules.
func TestOptionsAreChecked(t *testing.T) {
	for _, o := range []Options{
		{Trusted: []string{`vx" accept`}},
		{Denied: []netip.Prefix{{}}},
		{Denied: []netip.Prefix{parsePrefix("0.0.0.0/0")}},
	} {
		_, err := New(o)
		require.Error(t, err)
	}
}
