package dhcp

import (
	"bytes"
	"encoding/binary"
	"iter"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/rfc1035label"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// routerLifetime is the time for which guests use the content of a router advertisement, the longest that RFC 4861
// section 6.2.1 permits.
const routerLifetime = 9000 * time.Second

// allNodes is the multicast group of all nodes on the link.
var allNodes = netip.MustParseAddr("ff02::1")

// Options of router advertisements (RFC 4861 section 4.6, RFC 8106 section 5).
const (
	optionSourceLinkLayer = 1
	optionPrefix          = 3
	optionMTU             = 5
	optionDNSServers      = 25
	optionDNSSearch       = 31
)

// advertisement returns the ICMPv6 message that advertises the gateway of s as a router. Its length is that of an IPv6
// payload; options have a length in units of 8 bytes.
func advertisement(s Subnet) []byte {
	const managedAddress, otherConfiguration, onLink = 0x80, 0x40, 0x80
	lifetime := uint32(routerLifetime / time.Second)
	order := binary.BigEndian

	m := []byte{routerAdvertisement, 0, 0, 0, 64, managedAddress | otherConfiguration}
	m = order.AppendUint16(m, uint16(lifetime))
	m = append(m, make([]byte, 8)...) // reachable time and retransmission timer are left to the guest
	m = append(m, optionSourceLinkLayer, 1)
	m = append(m, cloud.GatewayMAC[:]...)
	m = append(m, optionMTU, 1, 0, 0)
	m = order.AppendUint32(m, uint32(s.MTU))
	m = append(m, optionPrefix, 4, byte(s.CIDR6.Bits()), onLink)
	m = order.AppendUint32(m, lifetime) // valid
	m = order.AppendUint32(m, lifetime) // preferred; without meaning as there is no autonomous configuration
	m = append(m, 0, 0, 0, 0)
	m = append(m, s.CIDR6.Masked().Addr().AsSlice()...)
	if servers := s.dnsServers(true); len(servers) > 0 {
		m = append(m, optionDNSServers, byte(1+2*len(servers)), 0, 0)
		m = order.AppendUint32(m, lifetime)
		for _, a := range servers {
			m = append(m, a...)
		}
	}
	if s.Domain != "" {
		domain := (&rfc1035label.Labels{Labels: []string{s.Domain}}).ToBytes()
		domain = append(domain, make([]byte, -len(domain)&7)...)
		m = append(m, optionDNSSearch, byte(1+len(domain)/8), 0, 0)
		m = order.AppendUint32(m, lifetime)
		m = append(m, domain...)
	}
	order.PutUint16(m[2:], transportChecksum(cloud.LinkLocal(cloud.GatewayMAC), allNodes, cloud.ProtocolICMPv6, m))
	return m
}

// advertisementFrame returns the frame that carries an advertisement to one port.
func advertisementFrame(message []byte, to cloud.MAC) []byte {
	p := packet{
		sourceMAC: cloud.GatewayMAC, destinationMAC: to,
		source: cloud.LinkLocal(cloud.GatewayMAC), destination: allNodes,
		protocol: cloud.ProtocolICMPv6, hopLimit: 255,
		payload: message,
	}
	return p.frame()
}

// advertisements returns a frame for each port with an IPv6 address.
func (t *table) advertisements() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		if t.advertised == nil {
			return
		}
		for _, c := range t.clients {
			if c.port.IP6.IsValid() && !yield(advertisementFrame(t.advertised, c.port.MAC)) {
				return
			}
		}
	}
}

// sameAdvertisement reports whether the routers of both tables advertise the same. other may be nil.
func (t *table) sameAdvertisement(other *table) bool {
	return other != nil && bytes.Equal(t.advertised, other.advertised)
}
