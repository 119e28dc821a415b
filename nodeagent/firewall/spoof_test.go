package firewall

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	any4      = netip.IPv4Unspecified()
	any6      = netip.IPv6Unspecified()
	allNodes  = parseAddr("ff02::1")
	limited4  = parseAddr("255.255.255.255")
	virtual   = cloud.MAC{0, 0, 0x5e, 0, 1, 7} // VRRP
	multicast = cloud.MAC{0x33, 0x33, 0, 0, 0, 1}
)

func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

// neighbor builds a neighbour solicitation (135) or advertisement (136) for target.
func neighbor(source, destination netip.Addr, typ uint8, target netip.Addr, mac cloud.MAC, tag string) []byte {
	option := join([]byte{2, 1}, mac[:])
	return icmp(source, destination, typ, 0, join(be32(0), target.AsSlice(), option, []byte(tag)))
}

// forger builds frames that a port sends.
type forger struct {
	mac, other      cloud.MAC // of the sending port and of another one
	ip4, peer4, gw4 netip.Addr
	ip6, peer6, gw6 netip.Addr
	own, foreign    netip.Addr // link-local addresses of the two ports
	pair4, wide4    netip.Addr // in pairs of the sending port
	wide6           netip.Addr // in a pair of the sending port
	free6           netip.Addr // in a pair with the MAC virtual
}

// forgery is a frame and what must happen to it. The frame contains the tag that build gets.
type forgery struct {
	name, want string
	build      func(tag string) []byte
}

func (f *forger) arp(source cloud.MAC, body []byte) func(string) []byte {
	return func(tag string) []byte { return ethernet(broadcast, source, unix.ETH_P_ARP, join(body, []byte(tag))) }
}

func (f *forger) udp(source cloud.MAC, from, to netip.AddrPort) func(string) []byte {
	return func(tag string) []byte {
		packet := udp(from, to, tag)
		return ethernet(f.other, source, etherType(packet), packet)
	}
}

// redirect changes the destination MAC of a frame.
func redirect(destination cloud.MAC, build func(string) []byte) func(string) []byte {
	return func(tag string) []byte { return join(destination[:], build(tag)[6:]) }
}

func (f *forger) frame(destination cloud.MAC, typ uint16, build func(tag string) []byte) func(string) []byte {
	return func(tag string) []byte { return ethernet(destination, f.mac, typ, build(tag)) }
}

// nd builds a neighbour solicitation or advertisement.
func (f *forger) nd(source, destination netip.Addr, typ uint8, target netip.Addr) func(string) []byte {
	return f.icmp6(func(tag string) []byte { return neighbor(source, destination, typ, target, f.mac, tag) })
}

// icmp6 builds a frame to a multicast address.
func (f *forger) icmp6(build func(tag string) []byte) func(string) []byte {
	return f.frame(multicast, unix.ETH_P_IPV6, build)
}

// routerAdvertisement builds the packet of a router advertisement.
func (f *forger) routerAdvertisement(tag string) []byte {
	return icmp(f.own, allNodes, 134, 0, join(make([]byte, 12), []byte(tag)))
}

// vlan inserts a VLAN tag into a frame.
func vlan(outer uint16, inner func(string) []byte) func(string) []byte {
	return func(tag string) []byte {
		frame := inner(tag)
		return join(frame[:12], be16(outer), be16(7), frame[12:])
	}
}

func (f *forger) legitimate(tag string) []byte {
	return f.udp(f.mac, at(f.ip4, 1), at(f.peer4, 2))(tag)
}

func (f *forger) arpForgeries() []forgery {
	return []forgery{
		{"ARP request", "arrives", f.arp(f.mac, arp(1, f.mac, f.ip4, f.peer4))},
		{"ARP reply", "arrives", f.arp(f.mac, arp(2, f.mac, f.ip4, f.peer4))},
		{"gratuitous ARP", "arrives", f.arp(f.mac, arp(1, f.mac, f.ip4, f.ip4))},
		{"ARP probe for the own address", "arrives", f.arp(f.mac, arp(1, f.mac, any4, f.ip4))},
		{"ARP probe for a pair with a prefix", "arrives", f.arp(f.mac, arp(1, f.mac, any4, f.wide4))},
		{"ARP probe for another's address", "spoof", f.arp(f.mac, arp(1, f.mac, any4, f.peer4))},
		{"ARP reply from 0.0.0.0", "spoof", f.arp(f.mac, arp(2, f.mac, any4, f.ip4))},
		{"ARP for a pair", "arrives", f.arp(f.mac, arp(1, f.mac, f.pair4, f.pair4))},
		{"ARP for a pair with a prefix", "arrives", f.arp(f.mac, arp(1, f.mac, f.wide4, f.peer4))},
		{"ARP for a pair with a MAC", "arrives", f.arp(virtual, arp(1, virtual, f.wide4, f.peer4))},
		{"ARP with the MAC of a pair in the frame only", "spoof", f.arp(virtual, arp(1, f.mac, f.ip4, f.peer4))},
		{"ARP with the MAC of a pair in the body only", "spoof", f.arp(f.mac, arp(1, virtual, f.ip4, f.peer4))},
		{"ARP with a forged sender address", "spoof", f.arp(f.mac, arp(2, f.mac, f.peer4, f.ip4))},
		{"ARP with a forged sender MAC", "spoof", f.arp(f.mac, arp(2, f.other, f.ip4, f.peer4))},
		{"ARP with a forged frame MAC", "spoof", f.arp(f.other, arp(2, f.mac, f.ip4, f.peer4))},
		{"ARP for the gateway", "spoof", f.arp(f.mac, arp(2, f.mac, f.gw4, f.peer4))},
		{"ARP for the gateway by a pair", "spoof", f.arp(virtual, arp(2, virtual, f.gw4, f.peer4))},
		{"ARP with the gateway's MAC", "spoof", f.arp(cloud.GatewayMAC, arp(2, cloud.GatewayMAC, f.ip4, f.peer4))},
		{"ARP of another hardware type", "spoof", f.arp(f.mac, join(be16(6), arp(1, f.mac, f.ip4, f.peer4)[2:]))},
		{"ARP of another length", "spoof", f.arp(f.mac, join(be16(1), be16(0x800), []byte{8, 4},
			arp(1, f.mac, f.ip4, f.peer4)[6:]))},
	}
}

func (f *forger) ipv4Forgeries() []forgery {
	return []forgery{
		{"IPv4", "arrives", f.legitimate},
		{"IPv4 from a pair", "arrives", f.udp(f.mac, at(f.pair4, 1), at(f.peer4, 2))},
		{"IPv4 from a pair with a prefix", "arrives", f.udp(f.mac, at(f.wide4, 1), at(f.peer4, 2))},
		{"IPv4 from a pair with a MAC", "arrives", f.udp(virtual, at(f.wide4, 1), at(f.peer4, 2))},
		{"IPv4 with a forged MAC", "spoof", f.udp(f.other, at(f.ip4, 1), at(f.peer4, 2))},
		{"IPv4 with a forged address", "spoof", f.udp(f.mac, at(parseAddr("10.0.0.9"), 1), at(f.peer4, 2))},
		{"IPv4 with an address of another VPC", "spoof", f.udp(f.mac, at(parseAddr("172.16.0.5"), 1), at(f.peer4, 2))},
		{"IPv4 with another port's address", "spoof", f.udp(f.mac, at(f.peer4, 1), at(f.peer4, 2))},
		{"IPv4 from the gateway", "spoof", f.udp(f.mac, at(f.gw4, 1), at(f.peer4, 2))},
		{"IPv4 from the gateway by a pair", "spoof", f.udp(virtual, at(f.gw4, 1), at(f.peer4, 2))},
		{"IPv4 from the metadata service by a pair", "spoof", f.udp(virtual, at(metadata4, 80), at(f.peer4, 2))},
		{"IPv4 with the gateway's MAC", "spoof", f.udp(cloud.GatewayMAC, at(f.ip4, 1), at(f.peer4, 2))},
		{"IPv4 from 0.0.0.0", "spoof", f.udp(f.mac, at(any4, 1), at(f.peer4, 2))},
		{"IPv4 from 0.0.0.0 by a pair", "spoof", f.udp(virtual, at(any4, 1), at(f.peer4, 2))},
		{"DHCP request", "arrives", redirect(broadcast, f.udp(f.mac, at(any4, 68), at(limited4, 67)))},
		{"DHCP request to a guest", "spoof", f.udp(f.mac, at(any4, 68), at(f.peer4, 67))},
		{"DHCP request from another port number", "spoof", f.udp(f.mac, at(any4, 69), at(limited4, 67))},
		{"DHCP server", "spoof", f.udp(f.mac, at(f.ip4, 67), at(limited4, 68))},
		{"DHCP server to a guest", "spoof", f.udp(f.mac, at(f.ip4, 67), at(f.peer4, 68))},
	}
}

func (f *forger) ipv6Forgeries() []forgery {
	return []forgery{
		{"IPv6", "arrives", f.udp(f.mac, at(f.ip6, 1), at(f.peer6, 2))},
		{"IPv6 from the link-local address", "arrives", f.udp(f.mac, at(f.own, 1), at(f.foreign, 2))},
		{"IPv6 from a pair with a prefix", "arrives", f.udp(f.mac, at(f.wide6, 1), at(f.peer6, 2))},
		{"IPv6 from a pair with a MAC", "arrives", f.udp(virtual, at(f.free6, 1), at(f.peer6, 2))},
		{"IPv6 with a forged MAC", "spoof", f.udp(f.other, at(f.ip6, 1), at(f.peer6, 2))},
		{"IPv6 with a forged address", "spoof", f.udp(f.mac, at(f.free6, 1), at(f.peer6, 2))},
		{"IPv6 with an address of another VPC", "spoof", f.udp(f.mac, at(parseAddr("fd77::5"), 1), at(f.peer6, 2))},
		{"IPv6 with the gateway's MAC", "spoof", f.udp(cloud.GatewayMAC, at(f.ip6, 1), at(f.peer6, 2))},
		{"IPv6 with another link-local address", "spoof", f.udp(f.mac, at(parseAddr("fe80::9"), 1), at(f.peer6, 2))},
		{"IPv6 with another port's link-local address", "spoof", f.udp(f.mac, at(f.foreign, 1), at(f.peer6, 2))},
		{"IPv6 from the gateway", "spoof", f.udp(f.mac, at(f.gw6, 1), at(f.peer6, 2))},
		{"IPv6 from the gateway by a pair", "spoof", f.udp(virtual, at(f.gw6, 1), at(f.peer6, 2))},
		{"IPv6 from the gateway's link-local address", "spoof",
			f.udp(f.mac, at(cloud.LinkLocal(cloud.GatewayMAC), 1), at(f.peer6, 2))},
		{"IPv6 from ::", "spoof", f.udp(f.mac, at(any6, 1), at(f.peer6, 2))},
		{"DHCPv6 request", "arrives", redirect(multicast, f.udp(f.mac, at(f.own, 546), at(parseAddr("ff02::1:2"), 547)))},
		{"DHCPv6 server", "spoof", f.udp(f.mac, at(f.own, 547), at(f.foreign, 546))},
	}
}

func (f *forger) neighborForgeries() []forgery {
	return []forgery{
		{"solicitation", "arrives", f.nd(f.ip6, parseAddr("ff02::1:ff00:6"), 135, f.peer6)},
		{"solicitation from another's address", "spoof", f.nd(f.peer6, parseAddr("ff02::1:ff00:6"), 135, f.peer6)},
		{"duplicate detection of the own address", "arrives", f.nd(any6, parseAddr("ff02::1:ff00:5"), 135, f.ip6)},
		{"duplicate detection of the link-local address", "arrives", f.nd(any6, parseAddr("ff02::1:ff00:5"), 135, f.own)},
		{"duplicate detection of a pair", "arrives", f.nd(any6, allNodes, 135, f.wide6)},
		{"duplicate detection of another's address", "spoof", f.nd(any6, parseAddr("ff02::1:ff00:6"), 135, f.peer6)},
		{"advertisement", "arrives", f.nd(f.ip6, allNodes, 136, f.ip6)},
		{"advertisement of the link-local address", "arrives", f.nd(f.own, allNodes, 136, f.own)},
		{"advertisement of a pair", "arrives", f.nd(f.ip6, allNodes, 136, f.wide6)},
		{"advertisement of another's address", "spoof", f.nd(f.ip6, allNodes, 136, f.peer6)},
		{"advertisement of the gateway", "spoof", f.nd(f.ip6, allNodes, 136, f.gw6)},
		{"advertisement of the gateway by a pair", "spoof", func(tag string) []byte {
			return ethernet(multicast, virtual, unix.ETH_P_IPV6, neighbor(f.free6, allNodes, 136, f.gw6, virtual, tag))
		}},
		{"advertisement of another's address behind an extension header", "spoof", f.icmp6(func(tag string) []byte {
			return extended(neighbor(f.ip6, allNodes, 136, f.peer6, f.mac, tag), 0, []byte{0, 0, 1, 4, 0, 0, 0, 0})
		})},
		{"router advertisement", "spoof", f.icmp6(f.routerAdvertisement)},
		{"router advertisement behind an extension header", "spoof", f.icmp6(func(tag string) []byte {
			return extended(f.routerAdvertisement(tag), 60, []byte{0, 0, 1, 4, 0, 0, 0, 0})
		})},
		{"router advertisement in a fragment with an extension header", "spoof", f.icmp6(func(tag string) []byte {
			inner := extended(f.routerAdvertisement(tag), 60, []byte{0, 0, 1, 4, 0, 0, 0, 0})
			return extended(inner, 44, []byte{0, 0, 0, 1, 0, 0, 0, 9})
		})},
		{"redirect", "spoof", f.icmp6(func(tag string) []byte {
			return icmp(f.own, allNodes, 137, 0, join(make([]byte, 36), []byte(tag)))
		})},
		{"router solicitation", "arrives", f.icmp6(func(tag string) []byte {
			return icmp(f.own, parseAddr("ff02::2"), 133, 0, join(be32(0), []byte(tag)))
		})},
	}
}

func (f *forger) otherForgeries() []forgery {
	return []forgery{
		{"VLAN tag", "spoof", vlan(unix.ETH_P_8021Q, f.legitimate)},
		{"VLAN tag around ARP", "spoof", vlan(unix.ETH_P_8021Q, f.arp(f.mac, arp(1, f.mac, f.ip4, f.peer4)))},
		{"service VLAN tag", "spoof", vlan(unix.ETH_P_8021AD, f.legitimate)},
		{"two VLAN tags", "spoof", vlan(unix.ETH_P_8021AD, vlan(unix.ETH_P_8021Q, f.legitimate))},
		{"unknown EtherType", "spoof", f.frame(f.other, 0x88b5, func(tag string) []byte { return []byte(tag) })},
		{"PPPoE", "spoof", f.frame(f.other, unix.ETH_P_PPP_SES, func(tag string) []byte { return []byte(tag) })},
		{"802.3 length", "spoof", f.frame(f.other, 40, func(tag string) []byte {
			return join([]byte{0x42, 0x42, 3}, []byte(tag))
		})},
	}
}

// TestSpoofMatrix sends forged and legitimate frames from a port. Those that are not forged arrive at another port of
// the subnet, whose groups permit everything, or at the bridge. No forged one arrives.
func TestSpoofMatrix(t *testing.T) {
	l := newLab(t)
	l.group("open", allowAll(cloud.Ingress, cloud.Egress)...)
	a, b := l.add(t, 0, 5, "open"), l.add(t, 0, 6, "open")
	l.change(a, func(p *cloud.HostPort) {
		p.Pairs = []cloud.AddressPair{
			{CIDR: parsePrefix("10.0.0.100/32")},
			{CIDR: parsePrefix("10.9.0.0/16")},
			{CIDR: parsePrefix("0.0.0.0/0"), MAC: virtual},
			{CIDR: parsePrefix("fd00:0:0:9::/64")},
			{CIDR: parsePrefix("fd00::/64"), MAC: virtual},
		}
	})
	l.set(t)
	f := &forger{
		mac: a.port.MAC, other: b.port.MAC,
		ip4: a.port.IP, peer4: b.port.IP, gw4: l.vpc.Subnets[0].Gateway,
		ip6: a.port.IP6, peer6: b.port.IP6, gw6: l.vpc.Subnets[0].Gateway6(),
		own: cloud.LinkLocal(a.port.MAC), foreign: cloud.LinkLocal(b.port.MAC),
		pair4: parseAddr("10.0.0.100"), wide4: parseAddr("10.9.3.4"),
		wide6: parseAddr("fd00:0:0:9::7"), free6: parseAddr("fd00::77"),
	}
	sender := openWire(t, a.ns, "eth0")
	s := &stage{lab: l, receivers: []*wire{openWire(t, b.ns, "eth0"), openWire(t, l.ns, "br0")}}
	var forged []string
	for _, c := range slices.Concat(f.arpForgeries(), f.ipv4Forgeries(), f.ipv6Forgeries(), f.neighborForgeries(),
		f.otherForgeries()) {
		passed := t.Run(c.name, func(t *testing.T) {
			tag := s.tag()
			if c.want == "arrives" {
				s.arrives(t, sender, c.build(tag), tag)
				return
			}
			forged = append(forged, tag)
			require.Equal(t, c.want, s.verdict(t, sender, c.build(tag), tag))
		})
		if !passed {
			t.Fatal("the forged frame may have changed the bridge's FDB, so the next frames are not sent")
		}
	}
	last := s.tag()
	s.arrives(t, sender, f.legitimate(last), last)
	for _, tag := range forged {
		for _, w := range s.receivers {
			require.False(t, w.saw(tag), "%s arrived", tag)
		}
	}
}

// extended inserts an extension header of 8 bytes before the payload of an IPv6 packet. The first byte of header is
// replaced by the packet's next header.
func extended(packet []byte, kind byte, header []byte) []byte {
	header[0] = packet[6]
	longer := join(packet[:40], header, packet[40:])
	longer[6] = kind
	binary.BigEndian.PutUint16(longer[4:], uint16(len(longer)-40))
	return longer
}

// TestUnsecuredPortPasses checks that a port without port security may send what a secured one may not, and that a
// secured one may not send from a device that is no port of the VPC.
func TestUnsecuredPortPasses(t *testing.T) {
	l := newLab(t)
	a, b := l.add(t, 0, 5), l.add(t, 0, 6)
	for _, e := range []*endpoint{a, b} {
		l.change(e, func(p *cloud.HostPort) { p.Secured = false })
	}
	l.set(t)
	s := &stage{lab: l, receivers: []*wire{openWire(t, b.ns, "eth0")}}
	forged := cloud.MAC{2, 9, 9, 9, 9, 9}
	build := func(tag string) []byte {
		packet := udp(at(parseAddr("192.0.2.1"), 67), at(parseAddr("192.0.2.2"), 68), tag)
		return ethernet(b.port.MAC, forged, unix.ETH_P_IP, packet)
	}
	tag := s.tag()
	require.Equal(t, "arrives", s.verdict(t, openWire(t, a.ns, "eth0"), build(tag), tag))
	unknown := newNamespace(t, "unknown")
	sysctlIn(t, unknown, "net/ipv6/conf/default/disable_ipv6", "1")
	l.attach(t, unknown, "p-unknown", a.port.MAC, "br0")
	// The bridge's own multicasts to the unknown device are dropped too, but not as forged.
	tag = s.tag()
	before := l.drops(t).Spoof
	openWire(t, unknown, "eth0").send(t, build(tag))
	require.Eventually(t, func() bool { return l.drops(t).Spoof > before }, patience, time.Millisecond)
	require.False(t, s.receivers[0].saw(tag))
}
