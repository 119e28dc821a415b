package firewall

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// call is a packet from one endpoint to another, which is the first of its connection.
type call struct {
	from, to *endpoint
	ipv6     bool
	build    func(source, destination netip.Addr, tag string) []byte
}

func udpTo(port uint16) func(source, destination netip.Addr, tag string) []byte {
	return func(source, destination netip.Addr, tag string) []byte {
		return udp(at(source, 4000), at(destination, port), tag)
	}
}

func tcpTo(port uint16) func(source, destination netip.Addr, tag string) []byte {
	return func(source, destination netip.Addr, tag string) []byte {
		return tcp(at(source, 4000), at(destination, port), flagSYN, 1, 0, tag)
	}
}

func icmpOf(typ, code uint8) func(source, destination netip.Addr, tag string) []byte {
	return func(source, destination netip.Addr, tag string) []byte {
		return icmp(source, destination, typ, code, join(be32(1), []byte(tag)))
	}
}

func protocol(number uint8) func(source, destination netip.Addr, tag string) []byte {
	return func(source, destination netip.Addr, tag string) []byte {
		return ip(source, destination, number, -1, join(make([]byte, 8), []byte(tag)))
	}
}

// callStage is a lab with raw access to its endpoints.
type callStage struct {
	*lab
	wires map[*endpoint]*wire
	sent  int
}

func newCallStage(t *testing.T) *callStage {
	return &callStage{lab: newLab(t), wires: map[*endpoint]*wire{}}
}

func (s *callStage) add(t *testing.T, subnet, number int, groups ...cloud.SecurityGroupID) *endpoint {
	t.Helper()
	e := s.lab.add(t, subnet, number, groups...)
	s.wires[e] = openWire(t, e.ns, "eth0")
	// The gateway's kernel knows the neighbour, because the endpoint's kernel does not answer.
	for _, a := range []netip.Addr{e.port.IP, e.port.IP6} {
		runIn(t, s.ns, "", "ip", "neighbor", "replace", a.String(), "lladdr", e.port.MAC.String(),
			"dev", bridgeName(subnet), "nud", "permanent")
	}
	return e
}

// verdict sends the packet of a call, through the gateway if the endpoints are in different subnets.
func (s *callStage) verdict(t *testing.T, c call) string {
	t.Helper()
	s.sent++
	source, destination := c.from.port.IP, c.to.port.IP
	if c.ipv6 {
		source, destination = c.from.port.IP6, c.to.port.IP6
	}
	tag := fmt.Sprintf("<call %06d>", s.sent)
	packet := c.build(source, destination, tag)
	next := c.to.port.MAC
	if c.from.subnet != c.to.subnet {
		next = cloud.GatewayMAC
	}
	st := &stage{lab: s.lab, receivers: []*wire{s.wires[c.to]}}
	return st.verdict(t, s.wires[c.from], ethernet(next, c.from.port.MAC, etherType(packet), packet), tag)
}

// forget deletes all tracked connections, so that the next packet is the first of its connection.
func (s *callStage) forget(t *testing.T) {
	t.Helper()
	handle, err := netlink.NewHandleAt(s.ns, unix.NETLINK_NETFILTER)
	require.NoError(t, err)
	defer handle.Close()
	require.NoError(t, handle.ConntrackTableFlush(netlink.ConntrackTable))
}

// permits returns what the package decides about the connection that a call begins.
func (s *callStage) permits(t *testing.T, c call) bool {
	t.Helper()
	want, err := render(&s.vpc, &testOptions)
	require.NoError(t, err)
	f := flow{source: c.from.port.IP, destination: c.to.port.IP}
	header, next := 20, 9
	if c.ipv6 {
		f.source, f.destination, header, next = c.from.port.IP6, c.to.port.IP6, 40, 6
	}
	packet := c.build(f.source, f.destination, "")
	f.protocol, f.fromPort = packet[next], true
	switch payload := packet[header:]; f.protocol {
	case cloud.ProtocolICMP, cloud.ProtocolICMPv6:
		f.icmpType, f.icmpCode = payload[0], payload[1]
	case cloud.ProtocolTCP, cloud.ProtocolUDP, cloud.ProtocolSCTP:
		f.port = binary.BigEndian.Uint16(payload[2:])
	}
	return want.policy.permits(&f)
}

func TestDefaultDeny(t *testing.T) {
	s := newCallStage(t)
	s.group("out", allowAll(cloud.Egress)...)
	s.group("in", allowAll(cloud.Ingress)...)
	none, out := s.add(t, 0, 5), s.add(t, 0, 6, "out")
	in, far := s.add(t, 0, 7, "in"), s.add(t, 1, 8, "in")
	s.set(t)
	for _, ipv6 := range []bool{false, true} {
		require.Equal(t, "group", s.verdict(t, call{none, in, ipv6, udpTo(1)}), "no egress rule")
		require.Equal(t, "group", s.verdict(t, call{none, far, ipv6, udpTo(1)}), "no egress rule, routed")
		require.Equal(t, "group", s.verdict(t, call{out, none, ipv6, udpTo(1)}), "no ingress rule")
		require.Equal(t, "group", s.verdict(t, call{in, out, ipv6, udpTo(1)}), "neither egress nor ingress rules")
		require.Equal(t, "arrives", s.verdict(t, call{out, in, ipv6, udpTo(1)}))
		require.Equal(t, "arrives", s.verdict(t, call{out, far, ipv6, udpTo(1)}), "routed")
	}
}

// TestReplies checks that the replies of a permitted connection pass, and that other packets in their direction do not.
func TestReplies(t *testing.T) {
	s := newCallStage(t)
	s.group("out", allowAll(cloud.Egress)...)
	s.group("in", allowAll(cloud.Ingress)...)
	client, server := s.add(t, 0, 5, "out"), s.add(t, 1, 6, "in")
	s.set(t)
	reply := func(source, destination netip.Addr, tag string) []byte {
		return udp(at(source, 53), at(destination, 4000), tag)
	}
	for _, ipv6 := range []bool{false, true} {
		require.Equal(t, "group", s.verdict(t, call{server, client, ipv6, reply}))
		require.Equal(t, "arrives", s.verdict(t, call{client, server, ipv6, udpTo(53)}))
		require.Equal(t, "arrives", s.verdict(t, call{server, client, ipv6, reply}))
	}
	middle := func(source, destination netip.Addr, tag string) []byte {
		return tcp(at(source, 4001), at(destination, 80), flagACK, 1000, 1000, tag)
	}
	require.Equal(t, "invalid", s.verdict(t, call{client, server, false, middle}), "a segment of no connection")
}

// TestRules checks each kind of condition with packets that match and packets that do not.
func TestRules(t *testing.T) {
	s := newCallStage(t)
	s.group("out", allowAll(cloud.Egress)...)
	client, server := s.add(t, 0, 5, "out"), s.add(t, 0, 6, "in")
	other := s.add(t, 0, 7, "out")
	cidr := func(text string) netip.Prefix { return parsePrefix(text) }
	type expectation struct {
		call
		want string
	}
	both := func(e ...expectation) []expectation { return e }
	v4 := func(build func(netip.Addr, netip.Addr, string) []byte, want string) expectation {
		return expectation{call{client, server, false, build}, want}
	}
	v6 := func(build func(netip.Addr, netip.Addr, string) []byte, want string) expectation {
		return expectation{call{client, server, true, build}, want}
	}
	from := func(e *endpoint, ipv6 bool, want string) expectation {
		return expectation{call{e, server, ipv6, udpTo(9)}, want}
	}
	s.members("friends", client.port.IP, client.port.IP6)
	for _, c := range []struct {
		name string
		rule cloud.Rule
		want []expectation
	}{
		{"one TCP port", cloud.Rule{Protocol: cloud.ProtocolTCP, Ports: cloud.PortRange{First: 80, Last: 80}},
			both(v4(tcpTo(80), "arrives"), v4(tcpTo(79), "group"), v4(tcpTo(81), "group"), v4(udpTo(80), "group"),
				v6(tcpTo(80), "group"))},
		{"UDP ports", cloud.Rule{Protocol: cloud.ProtocolUDP, Ports: cloud.PortRange{First: 100, Last: 200}},
			both(v4(udpTo(99), "group"), v4(udpTo(100), "arrives"), v4(udpTo(200), "arrives"), v4(udpTo(201), "group"))},
		{"SCTP port", cloud.Rule{Protocol: cloud.ProtocolSCTP, Ports: cloud.PortRange{First: 5, Last: 5}},
			both(v4(func(a, b netip.Addr, tag string) []byte { return sctp(at(a, 1), at(b, 5), tag) }, "arrives"),
				v4(func(a, b netip.Addr, tag string) []byte { return sctp(at(a, 1), at(b, 6), tag) }, "group"))},
		{"all TCP", cloud.Rule{Protocol: cloud.ProtocolTCP},
			both(v4(tcpTo(1), "arrives"), v4(tcpTo(65535), "arrives"), v4(udpTo(1), "group"))},
		{"another protocol", cloud.Rule{Protocol: 47}, both(v4(protocol(47), "arrives"), v4(protocol(50), "group"))},
		{"protocol 0 is not all protocols", cloud.Rule{Protocol: 0}, both(v4(udpTo(1), "group"), v4(protocol(47), "group"))},
		{"ICMP type", cloud.Rule{Protocol: cloud.ProtocolICMP, ICMP: &cloud.ICMP{Type: 8, AnyCode: true}},
			both(v4(icmpOf(8, 0), "arrives"), v4(icmpOf(13, 0), "group"), v6(icmpOf(128, 0), "group"))},
		{"ICMP type and code", cloud.Rule{Protocol: cloud.ProtocolICMP, ICMP: &cloud.ICMP{Type: 13, Code: 0}},
			both(v4(icmpOf(13, 0), "arrives"), v4(icmpOf(8, 0), "group"))},
		{"ICMP type 255 is not all types",
			cloud.Rule{Protocol: cloud.ProtocolICMP, ICMP: &cloud.ICMP{Type: 255, AnyCode: true}},
			both(v4(icmpOf(8, 0), "group"))},
		{"all ICMP", cloud.Rule{Protocol: cloud.ProtocolICMP},
			both(v4(icmpOf(8, 0), "arrives"), v4(icmpOf(13, 0), "arrives"), v4(udpTo(1), "group"))},
		{"ICMPv6 type", cloud.Rule{IPv6: true, Protocol: cloud.ProtocolICMPv6, ICMP: &cloud.ICMP{Type: 128, AnyCode: true}},
			both(v6(icmpOf(128, 0), "arrives"), v6(icmpOf(139, 0), "group"), v4(icmpOf(8, 0), "group"))},
		{"IPv6 UDP", cloud.Rule{IPv6: true, Protocol: cloud.ProtocolUDP, Ports: cloud.PortRange{First: 9, Last: 9}},
			both(v6(udpTo(9), "arrives"), v6(udpTo(10), "group"), v4(udpTo(9), "group"))},
		{"IPv4 prefix", cloud.Rule{AnyProtocol: true, CIDR: cidr("10.0.0.4/31")},
			both(from(client, false, "arrives"), from(other, false, "group"), from(client, true, "group"))},
		{"IPv6 prefix", cloud.Rule{IPv6: true, AnyProtocol: true, CIDR: cidr("fd00::5/128")},
			both(from(client, true, "arrives"), from(other, true, "group"), from(client, false, "group"))},
		{"all IPv4 addresses", cloud.Rule{AnyProtocol: true, CIDR: cidr("0.0.0.0/0")},
			both(from(client, false, "arrives"), from(other, false, "arrives"), from(client, true, "group"))},
		{"prefix of the other IP version", cloud.Rule{AnyProtocol: true, CIDR: cidr("::/0")},
			both(from(client, false, "group"))},
		{"remote group", cloud.Rule{AnyProtocol: true, Group: "friends"},
			both(from(client, false, "arrives"), from(other, false, "group"), from(client, true, "group"))},
		{"remote group with IPv6", cloud.Rule{IPv6: true, AnyProtocol: true, Group: "friends"},
			both(from(client, true, "arrives"), from(other, true, "group"), from(client, false, "group"))},
		{"remote group without members", cloud.Rule{AnyProtocol: true, Group: "nobody"}, both(from(client, false, "group"))},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.rule.Direction = cloud.Ingress
			s.group("in", c.rule)
			s.set(t)
			require.Equal(t, Result{}, s.set(t), "the kernel lists the rules as they were written")
			for i, e := range c.want {
				s.forget(t)
				require.Equal(t, e.want, s.verdict(t, e.call), "packet %d", i)
				require.Equal(t, e.want == "arrives", s.permits(t, e.call), "packet %d: the comparison with connections", i)
			}
		})
	}
}

// TestEgressRules checks that egress rules restrict the destination.
func TestEgressRules(t *testing.T) {
	s := newCallStage(t)
	s.group("in", allowAll(cloud.Ingress)...)
	s.group("web", cloud.Rule{Direction: cloud.Egress, Protocol: cloud.ProtocolTCP,
		Ports: cloud.PortRange{First: 443, Last: 443}, CIDR: parsePrefix("10.0.1.0/24")})
	client, near, far := s.add(t, 0, 5, "web"), s.add(t, 0, 6, "in"), s.add(t, 1, 7, "in")
	s.set(t)
	require.Equal(t, "arrives", s.verdict(t, call{client, far, false, tcpTo(443)}))
	require.Equal(t, "group", s.verdict(t, call{client, far, false, tcpTo(80)}))
	require.Equal(t, "group", s.verdict(t, call{client, near, false, tcpTo(443)}))
}

// TestUnionOfGroups checks that a port with several groups may receive what any of them permits.
func TestUnionOfGroups(t *testing.T) {
	s := newCallStage(t)
	s.group("out", allowAll(cloud.Egress)...)
	for i, id := range []cloud.SecurityGroupID{"web", "dns"} {
		port := []uint16{80, 53}[i]
		ports := cloud.PortRange{First: port, Last: port}
		s.group(id, cloud.Rule{Direction: cloud.Ingress, Protocol: cloud.ProtocolUDP, Ports: ports})
	}
	client := s.add(t, 0, 5, "out")
	web, dns, all := s.add(t, 0, 6, "web"), s.add(t, 0, 7, "dns"), s.add(t, 0, 8, "dns", "web")
	same := s.add(t, 1, 9, "web", "dns")
	s.set(t)
	for _, c := range []struct {
		to               *endpoint
		wantWeb, wantDNS string
	}{{web, "arrives", "group"}, {dns, "group", "arrives"}, {all, "arrives", "arrives"}, {same, "arrives", "arrives"}} {
		require.Equal(t, c.wantWeb, s.verdict(t, call{client, c.to, false, udpTo(80)}), c.to.port.ID)
		require.Equal(t, c.wantDNS, s.verdict(t, call{client, c.to, false, udpTo(53)}), c.to.port.ID)
	}
}

// TestPairGroups checks which groups apply to addresses of address pairs.
func TestPairGroups(t *testing.T) {
	s := newCallStage(t)
	s.group("open", allowAll(cloud.Ingress, cloud.Egress)...)
	s.group("closed")
	client, router := s.add(t, 0, 5, "open"), s.add(t, 0, 6, "closed")
	neighbour, free := s.add(t, 0, 7, "open"), s.add(t, 0, 8)
	s.change(free, func(p *cloud.HostPort) { p.Secured = false })
	s.change(router, func(p *cloud.HostPort) {
		p.Pairs = []cloud.AddressPair{{CIDR: parsePrefix("10.0.0.0/16")}}
	})
	s.set(t)
	// A destination within the pair that is no port's own address is subject to the groups of the port with the pair.
	through := func(source, _ netip.Addr, tag string) []byte {
		return udp(at(source, 1), at(parseAddr("10.0.7.7"), 2), tag)
	}
	as := func(source string) func(netip.Addr, netip.Addr, string) []byte {
		return func(_, destination netip.Addr, tag string) []byte {
			return udp(at(parseAddr(source), 1), at(destination, 2), tag)
		}
	}
	require.Equal(t, "group", s.verdict(t, call{client, router, false, through}))
	require.Equal(t, "group", s.verdict(t, call{router, client, false, as("10.0.7.7")}))
	require.Equal(t, "arrives", s.verdict(t, call{client, neighbour, false, udpTo(1)}), "the own address of another port")
	require.Equal(t, "arrives", s.verdict(t, call{client, free, false, udpTo(1)}), "a port without port security")
	s.group("closed", allowAll(cloud.Ingress, cloud.Egress)...)
	s.set(t)
	require.Equal(t, "arrives", s.verdict(t, call{client, router, false, through}))
	require.Equal(t, "arrives", s.verdict(t, call{router, client, false, as("10.0.7.7")}))
}

// TestRulesWithinPairs has address pairs whose prefixes contain own addresses of other ports and prefixes of smaller
// pairs. The groups of such a pair must not apply to these addresses. The order in which the chains compare lists
// depends on the names of the groups, so the test has many of them.
func TestRulesWithinPairs(t *testing.T) {
	s := newCallStage(t)
	s.group("open", allowAll(cloud.Ingress, cloud.Egress)...)
	s.group("out", allowAll(cloud.Egress)...)
	router, client := s.add(t, 0, 2, "open"), s.add(t, 0, 3, "open")
	s.change(router, func(p *cloud.HostPort) {
		p.Pairs = []cloud.AddressPair{{CIDR: parsePrefix("0.0.0.0/0")}, {CIDR: parsePrefix("::/0")}}
	})
	var closed []*endpoint
	for i := range 6 {
		in, none := cloud.SecurityGroupID(fmt.Sprintf("in-%d", i)), cloud.SecurityGroupID(fmt.Sprintf("none-%d", i))
		s.group(in, cloud.Rule{Direction: cloud.Ingress, Protocol: cloud.ProtocolUDP, Ports: cloud.PortRange{First: 53, Last: 53}})
		s.group(none)
		closed = append(closed, s.add(t, 0, 10+i, in, "out"), s.add(t, 1, 10+i, none))
	}
	// The last of these ports has a pair within that of the router.
	inner := closed[len(closed)-1]
	s.change(inner, func(p *cloud.HostPort) { p.Pairs = []cloud.AddressPair{{CIDR: parsePrefix("192.0.2.0/24")}} })
	s.set(t)
	for _, e := range closed {
		for _, ipv6 := range []bool{false, true} {
			require.Equal(t, "group", s.verdict(t, call{client, e, ipv6, udpTo(80)}), "%s, IPv6: %v", e.port.ID, ipv6)
		}
	}
	require.Equal(t, "group", s.verdict(t, call{inner, client, false, udpTo(80)}))
	as := func(source string) func(netip.Addr, netip.Addr, string) []byte {
		return func(_, destination netip.Addr, tag string) []byte {
			return udp(at(parseAddr(source), 1), at(destination, 2), tag)
		}
	}
	require.Equal(t, "group", s.verdict(t, call{inner, client, false, as("192.0.2.7")}))
	require.Equal(t, "arrives", s.verdict(t, call{router, client, false, as("192.0.3.7")}))
	require.Equal(t, Result{}, s.set(t), "a repeat changes nothing")
}

// TestNoBypass checks that a port receives no packets with destinations that its rules are not consulted for.
func TestNoBypass(t *testing.T) {
	s := newCallStage(t)
	s.group("out", allowAll(cloud.Egress)...)
	client, target := s.add(t, 0, 5, "out"), s.add(t, 0, 6)
	s.set(t)
	to := func(destination string) func(netip.Addr, netip.Addr, string) []byte {
		return func(source, _ netip.Addr, tag string) []byte {
			return udp(at(source, 1), at(parseAddr(destination), 2), tag)
		}
	}
	for _, destination := range []string{"224.0.0.251", "10.0.0.255", "255.255.255.255", "192.0.2.1", "10.0.1.7"} {
		require.Equal(t, "group", s.verdict(t, call{client, target, false, to(destination)}), destination)
	}
	for _, destination := range []string{"ff02::fb", "ff02::1", "2001:db8::1"} {
		require.Equal(t, "group", s.verdict(t, call{client, target, true, to(destination)}), destination)
	}
}

// TestNamespaceIsClosed checks which packets the namespace itself accepts, from a port without groups.
func TestNamespaceIsClosed(t *testing.T) {
	s := newCallStage(t)
	client := s.add(t, 0, 5)
	s.set(t)
	runIn(t, s.ns, "", "ip", "address", "add", "169.254.169.254/32", "dev", "br0")
	runIn(t, s.ns, "", "ip", "address", "add", "fd00:ec2::254/128", "dev", "br0", "nodad")
	// A device accepts what arrives; whether the namespace does shows the counter of refused packets.
	gateway, far, gateway6 := s.vpc.Subnets[0].Gateway, s.vpc.Subnets[1].Gateway, s.vpc.Subnets[0].Gateway6()
	w := s.wires[client]
	closed := func(packet []byte) uint64 {
		before := s.drops(t).Closed
		w.Send(t, ethernet(cloud.GatewayMAC, client.port.MAC, etherType(packet), packet))
		// The marker is refused always, so it is counted after the packet.
		marker := udp(at(client.port.IP, 1), at(gateway, 9), "marker")
		w.Send(t, ethernet(cloud.GatewayMAC, client.port.MAC, etherType(marker), marker))
		var refused uint64
		require.Eventually(t, func() bool { refused = s.drops(t).Closed - before; return refused > 0 }, patience, 1)
		return refused - 1
	}
	a, a6, own := client.port.IP, client.port.IP6, cloud.LinkLocal(client.port.MAC)
	for name, packet := range map[string][]byte{
		"ping": echo(a, gateway, "x"), "ping to another subnet's gateway": echo(a, far, "x"),
		"ping over IPv6":        echo(a6, gateway6, "x"),
		"DNS":                   udp(at(a, 1), at(gateway, 53), "x"),
		"DNS over TCP":          tcp(at(a, 1), at(gateway, 53), flagSYN, 1, 0, ""),
		"DNS over IPv6":         udp(at(a6, 1), at(gateway6, 53), "x"),
		"DNS over IPv6 and TCP": tcp(at(a6, 1), at(gateway6, 53), flagSYN, 1, 0, ""),
		"DHCP":                  udp(at(a, 68), at(gateway, 67), "x"),
		"DHCP discovery":        udp(at(any4, 68), at(limited4, 67), "x"),
		"DHCP rebinding":        udp(at(a, 68), at(limited4, 67), "x"),
		"DHCPv6":                udp(at(own, 546), at(parseAddr("ff02::1:2"), 547), "x"),
		"solicitation":          neighbor(a6, gateway6, 135, gateway6, client.port.MAC, "x"),
		"router solicitation":   icmp(own, parseAddr("ff02::2"), 133, 0, be32(0)),
		"metadata":              tcp(at(a, 2), at(metadata4, 80), flagSYN, 1, 0, ""),
		"metadata over IPv6":    tcp(at(a6, 2), at(metadata6, 80), flagSYN, 1, 0, ""),
	} {
		require.Zero(t, closed(packet), name)
	}
	for name, packet := range map[string][]byte{
		"another UDP port": udp(at(a, 1), at(gateway, 54), "x"), "SSH": tcp(at(a, 1), at(gateway, 22), flagSYN, 1, 0, ""),
		"HTTP at the gateway":   tcp(at(a, 1), at(gateway, 80), flagSYN, 1, 0, ""),
		"timestamp":             icmp(a, gateway, 13, 0, make([]byte, 16)),
		"SSH over IPv6":         tcp(at(a6, 1), at(gateway6, 22), flagSYN, 1, 0, ""),
		"another protocol":      ip(a, gateway, 47, -1, make([]byte, 20)),
		"SSH at the metadata":   tcp(at(a, 3), at(metadata4, 22), flagSYN, 1, 0, ""),
		"ping of the metadata":  echo(a, metadata4, "x"),
		"DNS at the metadata":   udp(at(a, 3), at(metadata4, 53), "x"),
		"DHCP to another port":  udp(at(a, 69), at(gateway, 67), "x"),
		"SNMP over IPv6":        udp(at(a6, 1), at(gateway6, 161), "x"),
		"node information":      icmp(a6, gateway6, 139, 0, make([]byte, 16)),
		"link-local SSH":        tcp(at(own, 1), at(cloud.LinkLocal(cloud.GatewayMAC), 22), flagSYN, 1, 0, ""),
		"ping of all nodes":     echo(own, allNodes, "x"),
		"another port's answer": tcp(at(a, 53), at(gateway, 4000), flagSYN, 1, 0, ""),
	} {
		require.EqualValues(t, 1, closed(packet), name)
	}
	require.Equal(t, Result{}, s.set(t), "connections to the namespace are permitted without rules of groups")
}
