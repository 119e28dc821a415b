package dhcp

import (
	"encoding/binary"
	"net/netip"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Numbers in the headers of frames.
const (
	etherTypeIPv4 = 0x0800
	etherTypeIPv6 = 0x86dd

	serverPort4, clientPort4 = 67, 68
	serverPort6, clientPort6 = 547, 546

	routerSolicitation  = 133 // ICMPv6 types
	routerAdvertisement = 134
)

// Lengths in bytes. Requests in larger frames are cut off and therefore ignored.
const (
	ethernetHeader = 14
	ipv4Header     = 20 // without options
	ipv6Header     = 40
	udpHeader      = 8
	maxFrame       = 9216
)

// packet is a UDP datagram or an ICMPv6 message with the headers that are needed here.
type packet struct {
	sourceMAC, destinationMAC   cloud.MAC
	source, destination         netip.Addr
	protocol                    uint8
	hopLimit                    uint8
	sourcePort, destinationPort uint16 // 0 for ICMPv6
	payload                     []byte
}

func (p *packet) isDHCPv4() bool {
	return p.protocol == cloud.ProtocolUDP && p.source.Is4() &&
		p.sourcePort == clientPort4 && p.destinationPort == serverPort4
}

func (p *packet) isDHCPv6() bool {
	return p.protocol == cloud.ProtocolUDP && p.source.Is6() &&
		p.sourcePort == clientPort6 && p.destinationPort == serverPort6
}

// isRouterSolicitation checks a solicitation as RFC 4861 section 6.1.1 demands.
func (p *packet) isRouterSolicitation() bool {
	return p.protocol == cloud.ProtocolICMPv6 && p.hopLimit == 255 && len(p.payload) >= 8 &&
		p.payload[0] == routerSolicitation && p.payload[1] == 0 &&
		transportChecksum(p.source, p.destination, p.protocol, p.payload) == 0
}

// parseFrame reads an Ethernet frame. It returns false for a frame that is malformed, a fragment, or neither UDP nor
// ICMPv6. The payload refers to the memory of the frame.
func parseFrame(frame []byte) (packet, bool) {
	var p packet
	if len(frame) < ethernetHeader {
		return p, false
	}
	copy(p.destinationMAC[:], frame)
	copy(p.sourceMAC[:], frame[6:])
	b := frame[ethernetHeader:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case etherTypeIPv4:
		if len(b) < ipv4Header {
			return p, false
		}
		header, total := int(b[0]&0xf)*4, int(binary.BigEndian.Uint16(b[2:]))
		fragment := binary.BigEndian.Uint16(b[6:]) & 0x3fff // more fragments, or an offset
		if b[0]>>4 != 4 || header < ipv4Header || total < header || total > len(b) || fragment != 0 ||
			b[9] != cloud.ProtocolUDP || checksum(0, b[:header]) != 0 {
			return p, false
		}
		p.hopLimit, p.protocol = b[8], b[9]
		p.source, p.destination = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		p.payload = b[header:total]
	case etherTypeIPv6:
		if len(b) < ipv6Header {
			return p, false
		}
		length := int(binary.BigEndian.Uint16(b[4:]))
		if b[0]>>4 != 6 || length > len(b)-ipv6Header || b[6] != cloud.ProtocolUDP && b[6] != cloud.ProtocolICMPv6 {
			return p, false
		}
		p.protocol, p.hopLimit = b[6], b[7]
		p.source, p.destination = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
		p.payload = b[ipv6Header:][:length]
	default:
		return p, false
	}
	return p, p.protocol == cloud.ProtocolICMPv6 || p.parseUDP()
}

// parseUDP removes the UDP header from the payload.
func (p *packet) parseUDP() bool {
	if len(p.payload) < udpHeader {
		return false
	}
	length := int(binary.BigEndian.Uint16(p.payload[4:]))
	if length < udpHeader || length > len(p.payload) {
		return false
	}
	p.sourcePort, p.destinationPort = binary.BigEndian.Uint16(p.payload), binary.BigEndian.Uint16(p.payload[2:])
	p.payload = p.payload[udpHeader:length]
	return true
}

// frame returns the packet as an Ethernet frame with checksums.
func (p *packet) frame() []byte {
	transport := p.payload
	if p.protocol == cloud.ProtocolUDP {
		transport = binary.BigEndian.AppendUint16(nil, p.sourcePort)
		transport = binary.BigEndian.AppendUint16(transport, p.destinationPort)
		transport = binary.BigEndian.AppendUint16(transport, uint16(udpHeader+len(p.payload)))
		transport = append(append(transport, 0, 0), p.payload...)
		sum := transportChecksum(p.source, p.destination, p.protocol, transport)
		if sum == 0 {
			sum = 0xffff // 0 means that there is no checksum
		}
		binary.BigEndian.PutUint16(transport[6:], sum)
	}
	frame := append(p.destinationMAC[:], p.sourceMAC[:]...)
	if p.source.Is4() {
		frame = binary.BigEndian.AppendUint16(frame, etherTypeIPv4)
		frame = append(frame, 0x45, 0)
		frame = binary.BigEndian.AppendUint16(frame, uint16(ipv4Header+len(transport)))
		frame = append(frame, 0, 0, 0, 0, p.hopLimit, p.protocol, 0, 0)
		frame = append(append(frame, p.source.AsSlice()...), p.destination.AsSlice()...)
		header := frame[ethernetHeader:]
		binary.BigEndian.PutUint16(header[10:], checksum(0, header))
	} else {
		frame = binary.BigEndian.AppendUint16(frame, etherTypeIPv6)
		frame = append(frame, 0x60, 0, 0, 0)
		frame = binary.BigEndian.AppendUint16(frame, uint16(len(transport)))
		frame = append(frame, p.protocol, p.hopLimit)
		frame = append(append(frame, p.source.AsSlice()...), p.destination.AsSlice()...)
	}
	return append(frame, transport...)
}

// transportChecksum returns the checksum of a UDP datagram or ICMPv6 message with its pseudo header (RFC 8200 section
// 8.1). It is 0 if the message already contains its right checksum.
func transportChecksum(source, destination netip.Addr, protocol uint8, message []byte) uint16 {
	pseudo := append(source.AsSlice(), destination.AsSlice()...)
	sum := uint32(protocol) + uint32(len(message))
	for i := 0; i < len(pseudo); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(pseudo[i:]))
	}
	return checksum(sum, message)
}

// checksum returns the Internet checksum (RFC 1071) of b, starting with the given sum.
func checksum(sum uint32, b []byte) uint16 {
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
