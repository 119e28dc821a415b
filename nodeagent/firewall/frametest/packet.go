// Package frametest builds Ethernet frames for tests of port security, and sends and captures frames on devices.
// [Forger] builds the frames that a port may and may not send; a [Wire] sends and captures.
//
// The tests of package firewall send the frames from namespaces, and the end-to-end tests from guests, so that both
// check the same list. Frames are built by hand because most of them are wrong in one field.
package frametest

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Ethernet builds a frame. The arguments of all builders are in the order of the fields on the wire.
func Ethernet(destination, source cloud.MAC, typ uint16, payload []byte) []byte {
	return Join(destination[:], source[:], Uint16(typ), payload)
}

// ARP builds an ARP request (operation 1) or reply (2) whose target MAC address is zero.
func ARP(operation uint16, senderMAC cloud.MAC, sender netip.Addr, target netip.Addr) []byte {
	return Join(Uint16(1), Uint16(0x0800), []byte{6, 4}, Uint16(operation), senderMAC[:], sender.AsSlice(),
		make([]byte, 6), target.AsSlice())
}

// IP builds an IPv4 or IPv6 packet, with the checksum of the transport protocol at the given offset, if not negative.
func IP(source, destination netip.Addr, protocol uint8, checksumAt int, payload []byte) []byte {
	if checksumAt >= 0 {
		pseudo := Join(source.AsSlice(), destination.AsSlice(), []byte{0, protocol}, Uint16(uint16(len(payload))))
		if protocol == cloud.ProtocolICMP {
			pseudo = nil
		}
		binary.BigEndian.PutUint16(payload[checksumAt:], Checksum(Join(pseudo, payload)))
	}
	if source.Is6() {
		return Join([]byte{0x60, 0, 0, 0}, Uint16(uint16(len(payload))), []byte{protocol, 255},
			source.AsSlice(), destination.AsSlice(), payload)
	}
	header := Join([]byte{0x45, 0}, Uint16(uint16(20+len(payload))), []byte{0, 1, 0, 0, 64, protocol, 0, 0},
		source.AsSlice(), destination.AsSlice())
	binary.BigEndian.PutUint16(header[10:], Checksum(header))
	return Join(header, payload)
}

// UDP builds an IPv4 or IPv6 packet with a UDP datagram.
func UDP(source, destination netip.AddrPort, payload string) []byte {
	segment := Join(Uint16(source.Port()), Uint16(destination.Port()), Uint16(uint16(8+len(payload))), Uint16(0),
		[]byte(payload))
	return IP(source.Addr(), destination.Addr(), cloud.ProtocolUDP, 6, segment)
}

// ICMP builds an ICMP or ICMPv6 message. The body begins after the checksum.
func ICMP(source, destination netip.Addr, typ, code uint8, body []byte) []byte {
	protocol := uint8(cloud.ProtocolICMP)
	if source.Is6() {
		protocol = cloud.ProtocolICMPv6
	}
	return IP(source, destination, protocol, 2, Join([]byte{typ, code, 0, 0}, body))
}

// Join concatenates the parts of a frame.
func Join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// Uint16 returns n in network byte order.
func Uint16(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }

// Uint32 returns n in network byte order.
func Uint32(n uint32) []byte { return binary.BigEndian.AppendUint32(nil, n) }

// Checksum returns the internet checksum of b (RFC 1071).
func Checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i]) << 8
		if i+1 < len(b) {
			sum += uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// EtherType returns the EtherType of an IP packet.
func EtherType(packet []byte) uint16 {
	if packet[0]>>4 == 6 {
		return unix.ETH_P_IPV6
	}
	return unix.ETH_P_IP
}
