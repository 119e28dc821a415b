package frametest

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Addresses of frames.
var (
	Any4       = netip.IPv4Unspecified()
	Any6       = netip.IPv6Unspecified()
	AllNodes   = netip.MustParseAddr("ff02::1")
	Broadcast4 = netip.MustParseAddr("255.255.255.255")
	Broadcast  = cloud.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	Multicast  = cloud.MAC{0x33, 0x33, 0, 0, 0, 1} // of AllNodes
	Virtual    = cloud.MAC{0, 0, 0x5e, 0, 1, 7}    // of a VRRP router

	metadata4 = netip.MustParseAddr("169.254.169.254")
)

var parseAddr = netip.MustParseAddr

// At returns an address with a port number.
func At(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

// Neighbor builds a neighbour solicitation (135) or advertisement (136) for target.
func Neighbor(source, destination netip.Addr, typ uint8, target netip.Addr, mac cloud.MAC, tag string) []byte {
	option := Join([]byte{2, 1}, mac[:])
	return ICMP(source, destination, typ, 0, Join(Uint32(0), target.AsSlice(), option, []byte(tag)))
}

// Forger builds frames that one port sends to another port of its subnet. The sending port must have the address
// pairs of Pairs.
type Forger struct {
	MAC, Peer                cloud.MAC // of the sending port and of the other one
	IP4, Peer4, Gateway4     netip.Addr
	IP6, Peer6, Gateway6     netip.Addr
	LinkLocal, PeerLinkLocal netip.Addr
}

// Addresses in Pairs.
var (
	pair4 = netip.MustParseAddr("10.0.0.100")
	wide4 = netip.MustParseAddr("10.9.3.4")
	wide6 = netip.MustParseAddr("fd00:0:0:9::7")
	free6 = netip.MustParseAddr("fd00::77") // with the MAC address Virtual
)

// Pairs returns the address pairs of the sending port.
func Pairs() []cloud.AddressPair {
	return []cloud.AddressPair{
		{CIDR: netip.MustParsePrefix("10.0.0.100/32")},
		{CIDR: netip.MustParsePrefix("10.9.0.0/16")},
		{CIDR: netip.MustParsePrefix("0.0.0.0/0"), MAC: Virtual},
		{CIDR: netip.MustParsePrefix("fd00:0:0:9::/64")},
		{CIDR: netip.MustParsePrefix("fd00::/64"), MAC: Virtual},
	}
}

// Forgery is a frame that the sending port may send, or, if Forged is true, may not send. The frame that Build returns
// contains the tag.
type Forgery struct {
	Name   string
	Forged bool
	Build  func(tag string) []byte
}

// Frames returns all forged and legitimate frames. The destination of a frame is the other port's MAC address, or a
// broadcast or multicast address; these frames reach only the gateway.
func (f *Forger) Frames() []Forgery {
	return slices.Concat(f.arpForgeries(), f.ipv4Forgeries(), f.ipv6Forgeries(), f.neighborForgeries(), f.otherForgeries())
}

// Legitimate builds a UDP datagram to the other port.
func (f *Forger) Legitimate(tag string) []byte {
	return f.udp(f.MAC, At(f.IP4, 1), At(f.Peer4, 2))(tag)
}

func (f *Forger) arp(source cloud.MAC, body []byte) func(string) []byte {
	return func(tag string) []byte { return Ethernet(Broadcast, source, unix.ETH_P_ARP, Join(body, []byte(tag))) }
}

func (f *Forger) udp(source cloud.MAC, from, to netip.AddrPort) func(string) []byte {
	return func(tag string) []byte {
		packet := UDP(from, to, tag)
		return Ethernet(f.Peer, source, EtherType(packet), packet)
	}
}

// redirect changes the destination MAC of a frame.
func redirect(destination cloud.MAC, build func(string) []byte) func(string) []byte {
	return func(tag string) []byte { return Join(destination[:], build(tag)[6:]) }
}

func (f *Forger) frame(destination cloud.MAC, typ uint16, build func(tag string) []byte) func(string) []byte {
	return func(tag string) []byte { return Ethernet(destination, f.MAC, typ, build(tag)) }
}

// nd builds a neighbour solicitation or advertisement.
func (f *Forger) nd(source, destination netip.Addr, typ uint8, target netip.Addr) func(string) []byte {
	return f.icmp6(func(tag string) []byte { return Neighbor(source, destination, typ, target, f.MAC, tag) })
}

// icmp6 builds a frame to a multicast address.
func (f *Forger) icmp6(build func(tag string) []byte) func(string) []byte {
	return f.frame(Multicast, unix.ETH_P_IPV6, build)
}

// routerAdvertisement builds the packet of a router advertisement.
func (f *Forger) routerAdvertisement(tag string) []byte {
	return ICMP(f.LinkLocal, AllNodes, 134, 0, Join(make([]byte, 12), []byte(tag)))
}

// vlan inserts a VLAN tag into a frame.
func vlan(outer uint16, inner func(string) []byte) func(string) []byte {
	return func(tag string) []byte {
		frame := inner(tag)
		return Join(frame[:12], Uint16(outer), Uint16(7), frame[12:])
	}
}

func (f *Forger) arpForgeries() []Forgery {
	return []Forgery{
		{"ARP request", false, f.arp(f.MAC, ARP(1, f.MAC, f.IP4, f.Peer4))},
		{"ARP reply", false, f.arp(f.MAC, ARP(2, f.MAC, f.IP4, f.Peer4))},
		{"gratuitous ARP", false, f.arp(f.MAC, ARP(1, f.MAC, f.IP4, f.IP4))},
		{"ARP probe for the own address", false, f.arp(f.MAC, ARP(1, f.MAC, Any4, f.IP4))},
		{"ARP probe for a pair with a prefix", false, f.arp(f.MAC, ARP(1, f.MAC, Any4, wide4))},
		{"ARP probe for another's address", true, f.arp(f.MAC, ARP(1, f.MAC, Any4, f.Peer4))},
		{"ARP reply from 0.0.0.0", true, f.arp(f.MAC, ARP(2, f.MAC, Any4, f.IP4))},
		{"ARP for a pair", false, f.arp(f.MAC, ARP(1, f.MAC, pair4, pair4))},
		{"ARP for a pair with a prefix", false, f.arp(f.MAC, ARP(1, f.MAC, wide4, f.Peer4))},
		{"ARP for a pair with a MAC", false, f.arp(Virtual, ARP(1, Virtual, wide4, f.Peer4))},
		{"ARP with the MAC of a pair in the frame only", true, f.arp(Virtual, ARP(1, f.MAC, f.IP4, f.Peer4))},
		{"ARP with the MAC of a pair in the body only", true, f.arp(f.MAC, ARP(1, Virtual, f.IP4, f.Peer4))},
		{"ARP with a forged sender address", true, f.arp(f.MAC, ARP(2, f.MAC, f.Peer4, f.IP4))},
		{"ARP with a forged sender MAC", true, f.arp(f.MAC, ARP(2, f.Peer, f.IP4, f.Peer4))},
		{"ARP with a forged frame MAC", true, f.arp(f.Peer, ARP(2, f.MAC, f.IP4, f.Peer4))},
		{"ARP for the gateway", true, f.arp(f.MAC, ARP(2, f.MAC, f.Gateway4, f.Peer4))},
		{"ARP for the gateway by a pair", true, f.arp(Virtual, ARP(2, Virtual, f.Gateway4, f.Peer4))},
		{"ARP with the gateway's MAC", true, f.arp(cloud.GatewayMAC, ARP(2, cloud.GatewayMAC, f.IP4, f.Peer4))},
		{"ARP of another hardware type", true, f.arp(f.MAC, Join(Uint16(6), ARP(1, f.MAC, f.IP4, f.Peer4)[2:]))},
		{"ARP of another length", true, f.arp(f.MAC, Join(Uint16(1), Uint16(0x800), []byte{8, 4},
			ARP(1, f.MAC, f.IP4, f.Peer4)[6:]))},
	}
}

func (f *Forger) ipv4Forgeries() []Forgery {
	return []Forgery{
		{"IPv4", false, f.Legitimate},
		{"IPv4 from a pair", false, f.udp(f.MAC, At(pair4, 1), At(f.Peer4, 2))},
		{"IPv4 from a pair with a prefix", false, f.udp(f.MAC, At(wide4, 1), At(f.Peer4, 2))},
		{"IPv4 from a pair with a MAC", false, f.udp(Virtual, At(wide4, 1), At(f.Peer4, 2))},
		{"IPv4 with a forged MAC", true, f.udp(f.Peer, At(f.IP4, 1), At(f.Peer4, 2))},
		{"IPv4 with a forged address", true, f.udp(f.MAC, At(parseAddr("10.0.0.9"), 1), At(f.Peer4, 2))},
		{"IPv4 with an address of another VPC", true, f.udp(f.MAC, At(parseAddr("172.16.0.5"), 1), At(f.Peer4, 2))},
		{"IPv4 with another port's address", true, f.udp(f.MAC, At(f.Peer4, 1), At(f.Peer4, 2))},
		{"IPv4 from the gateway", true, f.udp(f.MAC, At(f.Gateway4, 1), At(f.Peer4, 2))},
		{"IPv4 from the gateway by a pair", true, f.udp(Virtual, At(f.Gateway4, 1), At(f.Peer4, 2))},
		{"IPv4 from the metadata service by a pair", true, f.udp(Virtual, At(metadata4, 80), At(f.Peer4, 2))},
		{"IPv4 with the gateway's MAC", true, f.udp(cloud.GatewayMAC, At(f.IP4, 1), At(f.Peer4, 2))},
		{"IPv4 from 0.0.0.0", true, f.udp(f.MAC, At(Any4, 1), At(f.Peer4, 2))},
		{"IPv4 from 0.0.0.0 by a pair", true, f.udp(Virtual, At(Any4, 1), At(f.Peer4, 2))},
		{"DHCP request", false, redirect(Broadcast, f.udp(f.MAC, At(Any4, 68), At(Broadcast4, 67)))},
		{"DHCP request to a guest", true, f.udp(f.MAC, At(Any4, 68), At(f.Peer4, 67))},
		{"DHCP request from another port number", true, f.udp(f.MAC, At(Any4, 69), At(Broadcast4, 67))},
		{"DHCP server", true, f.udp(f.MAC, At(f.IP4, 67), At(Broadcast4, 68))},
		{"DHCP server to a guest", true, f.udp(f.MAC, At(f.IP4, 67), At(f.Peer4, 68))},
	}
}

func (f *Forger) ipv6Forgeries() []Forgery {
	return []Forgery{
		{"IPv6", false, f.udp(f.MAC, At(f.IP6, 1), At(f.Peer6, 2))},
		{"IPv6 from the link-local address", false, f.udp(f.MAC, At(f.LinkLocal, 1), At(f.PeerLinkLocal, 2))},
		{"IPv6 from a pair with a prefix", false, f.udp(f.MAC, At(wide6, 1), At(f.Peer6, 2))},
		{"IPv6 from a pair with a MAC", false, f.udp(Virtual, At(free6, 1), At(f.Peer6, 2))},
		{"IPv6 with a forged MAC", true, f.udp(f.Peer, At(f.IP6, 1), At(f.Peer6, 2))},
		{"IPv6 with a forged address", true, f.udp(f.MAC, At(free6, 1), At(f.Peer6, 2))},
		{"IPv6 with an address of another VPC", true, f.udp(f.MAC, At(parseAddr("fd77::5"), 1), At(f.Peer6, 2))},
		{"IPv6 with the gateway's MAC", true, f.udp(cloud.GatewayMAC, At(f.IP6, 1), At(f.Peer6, 2))},
		{"IPv6 with another link-local address", true, f.udp(f.MAC, At(parseAddr("fe80::9"), 1), At(f.Peer6, 2))},
		{"IPv6 with another port's link-local address", true, f.udp(f.MAC, At(f.PeerLinkLocal, 1), At(f.Peer6, 2))},
		{"IPv6 from the gateway", true, f.udp(f.MAC, At(f.Gateway6, 1), At(f.Peer6, 2))},
		{"IPv6 from the gateway by a pair", true, f.udp(Virtual, At(f.Gateway6, 1), At(f.Peer6, 2))},
		{"IPv6 from the gateway's link-local address", true,
			f.udp(f.MAC, At(cloud.LinkLocal(cloud.GatewayMAC), 1), At(f.Peer6, 2))},
		{"IPv6 from ::", true, f.udp(f.MAC, At(Any6, 1), At(f.Peer6, 2))},
		{"DHCPv6 request", false, redirect(Multicast, f.udp(f.MAC, At(f.LinkLocal, 546), At(parseAddr("ff02::1:2"), 547)))},
		{"DHCPv6 server", true, f.udp(f.MAC, At(f.LinkLocal, 547), At(f.PeerLinkLocal, 546))},
	}
}

func (f *Forger) neighborForgeries() []Forgery {
	return []Forgery{
		{"solicitation", false, f.nd(f.IP6, parseAddr("ff02::1:ff00:6"), 135, f.Peer6)},
		{"solicitation from another's address", true, f.nd(f.Peer6, parseAddr("ff02::1:ff00:6"), 135, f.Peer6)},
		{"duplicate detection of the own address", false, f.nd(Any6, parseAddr("ff02::1:ff00:5"), 135, f.IP6)},
		{"duplicate detection of the link-local address", false, f.nd(Any6, parseAddr("ff02::1:ff00:5"), 135, f.LinkLocal)},
		{"duplicate detection of a pair", false, f.nd(Any6, AllNodes, 135, wide6)},
		{"duplicate detection of another's address", true, f.nd(Any6, parseAddr("ff02::1:ff00:6"), 135, f.Peer6)},
		{"advertisement", false, f.nd(f.IP6, AllNodes, 136, f.IP6)},
		{"advertisement of the link-local address", false, f.nd(f.LinkLocal, AllNodes, 136, f.LinkLocal)},
		{"advertisement of a pair", false, f.nd(f.IP6, AllNodes, 136, wide6)},
		{"advertisement of another's address", true, f.nd(f.IP6, AllNodes, 136, f.Peer6)},
		{"advertisement of the gateway", true, f.nd(f.IP6, AllNodes, 136, f.Gateway6)},
		{"advertisement of the gateway by a pair", true, func(tag string) []byte {
			return Ethernet(Multicast, Virtual, unix.ETH_P_IPV6, Neighbor(free6, AllNodes, 136, f.Gateway6, Virtual, tag))
		}},
		{"advertisement of another's address behind an extension header", true, f.icmp6(func(tag string) []byte {
			return extended(Neighbor(f.IP6, AllNodes, 136, f.Peer6, f.MAC, tag), 0, []byte{0, 0, 1, 4, 0, 0, 0, 0})
		})},
		{"router advertisement", true, f.icmp6(f.routerAdvertisement)},
		{"router advertisement behind an extension header", true, f.icmp6(func(tag string) []byte {
			return extended(f.routerAdvertisement(tag), 60, []byte{0, 0, 1, 4, 0, 0, 0, 0})
		})},
		{"router advertisement in a fragment with an extension header", true, f.icmp6(func(tag string) []byte {
			inner := extended(f.routerAdvertisement(tag), 60, []byte{0, 0, 1, 4, 0, 0, 0, 0})
			return extended(inner, 44, []byte{0, 0, 0, 1, 0, 0, 0, 9})
		})},
		{"redirect", true, f.icmp6(func(tag string) []byte {
			return ICMP(f.LinkLocal, AllNodes, 137, 0, Join(make([]byte, 36), []byte(tag)))
		})},
		{"router advertisement to a guest", true, f.frame(f.Peer, unix.ETH_P_IPV6, func(tag string) []byte {
			return ICMP(f.LinkLocal, f.PeerLinkLocal, 134, 0, Join(make([]byte, 12), []byte(tag)))
		})},
		{"redirect to a guest", true, f.frame(f.Peer, unix.ETH_P_IPV6, func(tag string) []byte {
			return ICMP(f.LinkLocal, f.PeerLinkLocal, 137, 0, Join(make([]byte, 36), []byte(tag)))
		})},
		{"router solicitation", false, f.icmp6(func(tag string) []byte {
			return ICMP(f.LinkLocal, parseAddr("ff02::2"), 133, 0, Join(Uint32(0), []byte(tag)))
		})},
	}
}

func (f *Forger) otherForgeries() []Forgery {
	return []Forgery{
		{"VLAN tag", true, vlan(unix.ETH_P_8021Q, f.Legitimate)},
		{"VLAN tag around ARP", true, vlan(unix.ETH_P_8021Q, f.arp(f.MAC, ARP(1, f.MAC, f.IP4, f.Peer4)))},
		{"service VLAN tag", true, vlan(unix.ETH_P_8021AD, f.Legitimate)},
		{"two VLAN tags", true, vlan(unix.ETH_P_8021AD, vlan(unix.ETH_P_8021Q, f.Legitimate))},
		{"unknown EtherType", true, f.frame(f.Peer, 0x88b5, func(tag string) []byte { return []byte(tag) })},
		{"PPPoE", true, f.frame(f.Peer, unix.ETH_P_PPP_SES, func(tag string) []byte { return []byte(tag) })},
		{"802.3 length", true, f.frame(f.Peer, 40, func(tag string) []byte {
			return Join([]byte{0x42, 0x42, 3}, []byte(tag))
		})},
	}
}

// extended inserts an extension header of 8 bytes before the payload of an IPv6 packet. The first byte of header is
// replaced by the packet's next header.
func extended(packet []byte, kind byte, header []byte) []byte {
	header[0] = packet[6]
	longer := Join(packet[:40], header, packet[40:])
	longer[6] = kind
	binary.BigEndian.PutUint16(longer[4:], uint16(len(longer)-40))
	return longer
}
