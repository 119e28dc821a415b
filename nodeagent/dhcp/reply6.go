package dhcp

import (
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/insomniacslk/dhcp/rfc1035label"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// serverDUID identifies the server to DHCPv6 clients. It is the same on all hosts and for all subnets.
var serverDUID = &dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: cloud.GatewayMAC[:]}

// serverIDRequired has an entry for each DHCPv6 message that is answered: true if the message must name the server that
// it is for, false if it is for all servers (RFC 8415 section 16).
var serverIDRequired = map[dhcpv6.MessageType]bool{
	dhcpv6.MessageTypeSolicit: false,
	dhcpv6.MessageTypeConfirm: false,
	dhcpv6.MessageTypeRebind:  false,
	dhcpv6.MessageTypeRequest: true,
	dhcpv6.MessageTypeRenew:   true,
	dhcpv6.MessageTypeRelease: true,
	dhcpv6.MessageTypeDecline: true,
}

// answer6 returns the frame that answers a DHCPv6 message from a port, or nil if it is not answered. note is a line
// for the log, or "".
func answer6(s Subnet, port cloud.HostPort, p packet) (reply []byte, note string) {
	if !s.CIDR6.IsValid() || p.destination != allServers || !p.source.IsLinkLocalUnicast() {
		return nil, ""
	}
	request, err := dhcpv6.MessageFromBytes(p.payload)
	if err != nil || !valid6(request) {
		return nil, ""
	}
	m := &dhcpv6.Message{MessageType: dhcpv6.MessageTypeReply, TransactionID: request.TransactionID}
	if id := request.Options.ClientID(); id != nil {
		m.AddOption(dhcpv6.OptClientID(id))
	}
	m.AddOption(dhcpv6.OptServerID(serverDUID))
	switch request.MessageType {
	case dhcpv6.MessageTypeSolicit:
		if request.GetOneOption(dhcpv6.OptionRapidCommit) != nil {
			m.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit})
		} else {
			m.MessageType = dhcpv6.MessageTypeAdvertise
		}
		addIdentities(m, port, request)
	case dhcpv6.MessageTypeRequest, dhcpv6.MessageTypeRenew, dhcpv6.MessageTypeRebind:
		addIdentities(m, port, request)
	case dhcpv6.MessageTypeConfirm:
		if !confirm(m, port, request) {
			return nil, ""
		}
	case dhcpv6.MessageTypeRelease:
		m.AddOption(status6(iana.StatusSuccess, "released"))
		note = "the guest released its IPv6 address"
	case dhcpv6.MessageTypeDecline:
		m.AddOption(status6(iana.StatusSuccess, "declined"))
		note = "the guest declined its IPv6 address: another device of the subnet answers to it"
	}
	addConfiguration6(m, s, port, request)
	answer := packet{
		sourceMAC: cloud.GatewayMAC, destinationMAC: port.MAC,
		source: cloud.LinkLocal(cloud.GatewayMAC), destination: p.source,
		protocol: cloud.ProtocolUDP, hopLimit: 64,
		sourcePort: serverPort6, destinationPort: clientPort6,
		payload: m.ToBytes(),
	}
	return answer.frame(), note
}

// valid6 checks the identifiers of a message (RFC 8415 section 16). Messages of other types are not answered, among
// them those of relay agents.
func valid6(request *dhcpv6.Message) bool {
	server := request.Options.ServerID()
	if request.MessageType == dhcpv6.MessageTypeInformationRequest {
		return (server == nil || server.Equal(serverDUID)) && request.Options.OneIANA() == nil &&
			request.Options.OneIATA() == nil && request.Options.OneIAPD() == nil
	}
	required, known := serverIDRequired[request.MessageType]
	if !known || request.Options.ClientID() == nil {
		return false
	}
	if required {
		return server != nil && server.Equal(serverDUID)
	}
	return server == nil
}

// addIdentities answers the identity associations of a request. The first one for a non-temporary address gets the
// port's address. Other addresses that it names get the lifetime 0, so that the client stops using them. There are
// no further addresses, temporary addresses or prefixes.
func addIdentities(m *dhcpv6.Message, port cloud.HostPort, request *dhcpv6.Message) {
	none := status6(iana.StatusNoAddrsAvail, "the port has no other IPv6 address")
	for i, ia := range request.Options.IANA() {
		if i > 0 || !port.IP6.IsValid() {
			m.AddOption(&dhcpv6.OptIANA{IaId: ia.IaId, Options: dhcpv6.IdentityOptions{Options: dhcpv6.Options{none}}})
			continue
		}
		answer := &dhcpv6.OptIANA{IaId: ia.IaId, T1: renewTime, T2: rebindTime6}
		answer.Options.Add(address6(port.IP6, leaseTime))
		if request.MessageType == dhcpv6.MessageTypeRenew || request.MessageType == dhcpv6.MessageTypeRebind {
			for _, a := range ia.Options.Addresses() {
				if old, ok := netip.AddrFromSlice(a.IPv6Addr); ok && old != port.IP6 {
					answer.Options.Add(address6(old, 0))
				}
			}
		}
		m.AddOption(answer)
	}
	for _, ia := range request.Options.IATA() {
		m.AddOption(&dhcpv6.OptIATA{IaId: ia.IaId, Options: dhcpv6.IdentityOptions{Options: dhcpv6.Options{none}}})
	}
	for _, ia := range request.Options.IAPD() {
		m.AddOption(&dhcpv6.OptIAPD{IaId: ia.IaId, Options: dhcpv6.PDOptions{
			Options: dhcpv6.Options{status6(iana.StatusNoPrefixAvail, "prefixes are not delegated")}}})
	}
}

// confirm answers whether the addresses that the client has are those of its port. It returns false if the client
// named none: such a message is not answered (RFC 8415 section 18.3.3).
func confirm(m *dhcpv6.Message, port cloud.HostPort, request *dhcpv6.Message) bool {
	named, right := false, true
	for _, ia := range request.Options.IANA() {
		for _, a := range ia.Options.Addresses() {
			named = true
			address, _ := netip.AddrFromSlice(a.IPv6Addr)
			right = right && address == port.IP6
		}
	}
	if right {
		m.AddOption(status6(iana.StatusSuccess, ""))
	} else {
		m.AddOption(status6(iana.StatusNotOnLink, "the address is not that of this port"))
	}
	return named
}

// addConfiguration6 adds the options that do not concern the address. The client's name is sent only to clients that
// ask for it, because it is not part of the base protocol (RFC 4704).
func addConfiguration6(m *dhcpv6.Message, s Subnet, port cloud.HostPort, request *dhcpv6.Message) {
	if servers := s.dnsServers(true); len(servers) > 0 {
		m.AddOption(dhcpv6.OptDNS(servers...))
	}
	if s.Domain == "" {
		return
	}
	m.AddOption(dhcpv6.OptDomainSearchList(&rfc1035label.Labels{Labels: []string{s.Domain}}))
	asked := request.Options.FQDN() != nil || slices.Contains(request.Options.RequestedOptions(), dhcpv6.OptionFQDN)
	if asked && port.HostName != "" {
		const serverUpdatesDNS, serverOverrides = 1, 2 // flags S and O
		m.AddOption(&dhcpv6.OptFQDN{
			Flags:      serverUpdatesDNS | serverOverrides,
			DomainName: &rfc1035label.Labels{Labels: []string{port.HostName + "." + s.Domain}},
		})
	}
}

func address6(a netip.Addr, lifetime time.Duration) *dhcpv6.OptIAAddress {
	return &dhcpv6.OptIAAddress{IPv6Addr: net.IP(a.AsSlice()), PreferredLifetime: lifetime, ValidLifetime: lifetime}
}

func status6(code iana.StatusCode, message string) *dhcpv6.OptStatusCode {
	return &dhcpv6.OptStatusCode{StatusCode: code, StatusMessage: message}
}
