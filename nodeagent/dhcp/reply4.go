package dhcp

import (
	"bytes"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Times of an address, for DHCPv4 and DHCPv6 (RFC 2131 section 4.4.5, RFC 8415 section 14.2). A client asks the server
// to extend its address after renewTime, and any server after rebindTime.
const (
	leaseTime   = time.Hour
	renewTime   = leaseTime / 2
	rebindTime4 = leaseTime * 7 / 8
	rebindTime6 = leaseTime * 8 / 10
)

// metadataAddress is the address of the metadata service, in every subnet.
var metadataAddress = net.IPv4(169, 254, 169, 254)

// broadcast4 is the address of all hosts on the link.
var broadcast4 = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// answer4 returns the frame that answers a DHCPv4 message from a port, or nil if it is not answered: if it is
// malformed, relayed, for another server, or needs no answer. note is a line for the log, or "".
func answer4(s Subnet, port cloud.HostPort, p packet) (reply []byte, note string) {
	request, err := dhcpv4.FromBytes(p.payload)
	if err != nil || request.OpCode != dhcpv4.OpcodeBootRequest || request.HWType != iana.HWTypeEthernet ||
		!port.IP.Is4() {
		return nil, ""
	}
	if !bytes.Equal(request.ClientHWAddr, port.MAC[:]) && !mutant.On(mutant.AnyHardwareAddress) {
		return nil, ""
	}
	if !request.GatewayIPAddr.IsUnspecified() {
		return nil, "ignored a DHCP message from a relay agent"
	}
	switch request.MessageType() {
	case dhcpv4.MessageTypeDiscover:
		return frame4(s, port, offer(s, port, request)), ""
	case dhcpv4.MessageTypeRequest:
		if m := answerRequest(s, port, request); m != nil {
			return frame4(s, port, m), ""
		}
	case dhcpv4.MessageTypeInform:
		if client := address4(request.ClientIPAddr); s.CIDR.Contains(client) {
			m := newReply4(s, request, dhcpv4.MessageTypeAck)
			m.ClientIPAddr = request.ClientIPAddr
			addConfiguration4(m, s, port)
			return frame4(s, port, m), ""
		}
	case dhcpv4.MessageTypeDecline:
		return nil, "the guest declined its IPv4 address: another device of the subnet answers to it"
	case dhcpv4.MessageTypeRelease:
		return nil, "the guest released its IPv4 address"
	}
	return nil, ""
}

// answerRequest returns the answer to a DHCPREQUEST (RFC 2131 section 4.3.2), or nil. A client that selects an offer or
// starts again with its old address names it in the option, one that renews or rebinds it in ciaddr.
func answerRequest(s Subnet, port cloud.HostPort, request *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	if server := request.ServerIdentifier(); server != nil && address4(server) != s.Gateway {
		return nil // the client selected another server
	}
	wanted := address4(request.RequestedIPAddress())
	if !wanted.IsValid() {
		wanted = address4(request.ClientIPAddr)
	}
	switch {
	case !wanted.IsValid() || wanted.IsUnspecified():
		return nil
	case wanted != port.IP:
		m := newReply4(s, request, dhcpv4.MessageTypeNak)
		m.UpdateOption(dhcpv4.OptMessage("the address is not that of this port"))
		return m
	}
	m := offer(s, port, request)
	m.UpdateOption(dhcpv4.OptMessageType(dhcpv4.MessageTypeAck))
	m.ClientIPAddr = request.ClientIPAddr
	return m
}

// offer returns a DHCPOFFER of the port's address.
func offer(s Subnet, port cloud.HostPort, request *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	m := newReply4(s, request, dhcpv4.MessageTypeOffer)
	m.YourIPAddr = port.IP.AsSlice()
	m.UpdateOption(dhcpv4.OptIPAddressLeaseTime(leaseTime))
	m.UpdateOption(dhcpv4.OptRenewTimeValue(renewTime))
	m.UpdateOption(dhcpv4.OptRebindingTimeValue(rebindTime4))
	addConfiguration4(m, s, port)
	return m
}

// newReply4 returns a reply with the fields that all replies have (RFC 2131 table 3, RFC 6842).
func newReply4(s Subnet, request *dhcpv4.DHCPv4, kind dhcpv4.MessageType) *dhcpv4.DHCPv4 {
	m := &dhcpv4.DHCPv4{
		OpCode:        dhcpv4.OpcodeBootReply,
		HWType:        request.HWType,
		ClientHWAddr:  request.ClientHWAddr,
		TransactionID: request.TransactionID,
		Flags:         request.Flags,
		Options: dhcpv4.OptionsFromList(
			dhcpv4.OptMessageType(kind),
			dhcpv4.OptServerIdentifier(s.Gateway.AsSlice()),
		),
	}
	if id := request.GetOneOption(dhcpv4.OptionClientIdentifier); id != nil {
		m.UpdateOption(dhcpv4.OptClientIdentifier(id))
	}
	return m
}

// addConfiguration4 adds the options that do not concern the address. A client that uses the classless routes ignores
// the router option (RFC 3442), so the routes include the default route.
func addConfiguration4(m *dhcpv4.DHCPv4, s Subnet, port cloud.HostPort) {
	gateway := net.IP(s.Gateway.AsSlice())
	m.UpdateOption(dhcpv4.OptSubnetMask(net.CIDRMask(s.CIDR.Bits(), 32)))
	m.UpdateOption(dhcpv4.OptRouter(gateway))
	m.UpdateOption(dhcpv4.Option{Code: dhcpv4.OptionInterfaceMTU, Value: dhcpv4.Uint16(s.MTU)})
	m.UpdateOption(dhcpv4.OptClasslessStaticRoute(
		&dhcpv4.Route{Dest: &net.IPNet{IP: metadataAddress, Mask: net.CIDRMask(32, 32)}, Router: gateway},
		&dhcpv4.Route{Dest: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Router: gateway},
	))
	if servers := s.dnsServers(false); len(servers) > 0 {
		m.UpdateOption(dhcpv4.OptDNS(servers...))
	}
	if port.HostName != "" {
		m.UpdateOption(dhcpv4.OptHostName(port.HostName))
	}
	if s.Domain != "" {
		m.UpdateOption(dhcpv4.OptDomainName(s.Domain))
	}
}

// frame4 returns the frame that carries a reply to the port. RFC 2131 section 4.1 gives the IP destination.
func frame4(s Subnet, port cloud.HostPort, m *dhcpv4.DHCPv4) []byte {
	destination := port.IP
	client := address4(m.ClientIPAddr)
	switch {
	case m.MessageType() == dhcpv4.MessageTypeNak:
		destination = broadcast4
	case client.IsValid() && !client.IsUnspecified():
		destination = client
	case m.IsBroadcast():
		destination = broadcast4
	}
	p := packet{
		sourceMAC: cloud.GatewayMAC, destinationMAC: port.MAC,
		source: s.Gateway, destination: destination,
		protocol: cloud.ProtocolUDP, hopLimit: 64,
		sourcePort: serverPort4, destinationPort: clientPort4,
		payload: m.ToBytes(),
	}
	return p.frame()
}

// address4 returns an IPv4 address of the library, or an invalid address for any other value.
func address4(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip.To4())
	return a
}
