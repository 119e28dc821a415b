package dhcp

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	macWeb   = cloud.MAC{2, 0, 0, 0, 0, 0x11}
	macNoIP6 = cloud.MAC{2, 0, 0, 0, 0, 0x12}
	macOther = cloud.MAC{2, 0, 0, 0, 0, 0x99} // not a port
)

func testSubnet() Subnet {
	return Subnet{
		HostSubnet: cloud.HostSubnet{
			ID: "subnet-1", CIDR: netip.MustParsePrefix("10.0.16.0/20"), Gateway: netip.MustParseAddr("10.0.16.1"),
			CIDR6: netip.MustParsePrefix("fd00:1:2:3::/64"), DHCP: true,
			Ports: []cloud.HostPort{
				{ID: "port-web", HostName: "web", MAC: macWeb, IP: netip.MustParseAddr("10.0.16.17"),
					IP6: netip.MustParseAddr("fd00:1:2:3::a:11"), Secured: true},
				{ID: "port-plain", MAC: macNoIP6, IP: netip.MustParseAddr("10.0.16.18"), Secured: true},
			},
		},
		MTU: 1450, Domain: "shop.internal",
	}
}

// exchange passes a message through the table as the frame that a guest with the MAC address would send, and returns
// a description of the reply's headers and its payload.
func exchange(t *testing.T, s Subnet, p packet) (headers string, payload []byte) {
	table := newTable(s, nil)
	request, ok := parseFrame(p.frame())
	require.True(t, ok)
	c := table.clients[request.sourceMAC]
	if c == nil {
		return "unknown MAC address: ignored\n", nil
	}
	frame, note := table.answer(c, request)
	if note != "" {
		headers = "log: " + note + "\n"
	}
	if frame == nil {
		return headers + "no answer\n", nil
	}
	reply, ok := parseFrame(frame)
	require.True(t, ok)
	from, to := netip.AddrPortFrom(reply.source, reply.sourcePort), netip.AddrPortFrom(reply.destination, reply.destinationPort)
	return headers + fmt.Sprintf("%s %s -> %s %s hops %d\n", reply.sourceMAC, from, reply.destinationMAC, to, reply.hopLimit), reply.payload
}

// subnetOf returns the test's subnet, changed as the arguments of a script's line say.
func subnetOf(t *testing.T, d *datadriven.TestData) Subnet {
	s := testSubnet()
	for _, a := range d.CmdArgs {
		switch a.Key {
		case "dns":
			for _, v := range a.Vals {
				s.DNS = append(s.DNS, netip.MustParseAddr(v))
			}
		case "dhcp-off":
			s.DHCP = false
		case "no-domain":
			s.Domain = ""
		}
	}
	return s
}

// TestDHCPv4 runs testdata/dhcpv4. A line "send discover ..." sends a message from the port web. Its arguments change
// the message: mac (Ethernet source), chaddr (in the message), ciaddr, requested, server, giaddr, broadcast, id.
func TestDHCPv4(t *testing.T) {
	kinds := map[string]dhcpv4.MessageType{
		"discover": dhcpv4.MessageTypeDiscover, "request": dhcpv4.MessageTypeRequest, "decline": dhcpv4.MessageTypeDecline,
		"release": dhcpv4.MessageTypeRelease, "inform": dhcpv4.MessageTypeInform, "offer": dhcpv4.MessageTypeOffer,
	}
	macs := map[string]cloud.MAC{"web": macWeb, "plain": macNoIP6, "other": macOther}
	datadriven.RunTest(t, "testdata/dhcpv4", func(t *testing.T, d *datadriven.TestData) string {
		require.Equal(t, "send", d.Cmd)
		m := &dhcpv4.DHCPv4{OpCode: dhcpv4.OpcodeBootRequest, HWType: 1, TransactionID: dhcpv4.TransactionID{1, 2, 3, 4},
			ClientHWAddr: macWeb[:], Options: dhcpv4.Options{}}
		p := packet{sourceMAC: macWeb, destinationMAC: cloud.MAC{255, 255, 255, 255, 255, 255}, source: netip.IPv4Unspecified(),
			destination: broadcast4, protocol: cloud.ProtocolUDP, hopLimit: 64, sourcePort: 68, destinationPort: 67}
		m.UpdateOption(dhcpv4.OptMessageType(kinds[d.CmdArgs[0].Key]))
		for _, a := range d.CmdArgs[1:] {
			switch a.Key {
			case "mac":
				p.sourceMAC = macs[a.Vals[0]]
				if !d.HasArg("chaddr") {
					m.ClientHWAddr = p.sourceMAC[:]
				}
			case "chaddr":
				mac := macs[a.Vals[0]]
				m.ClientHWAddr = mac[:]
			case "ciaddr":
				m.ClientIPAddr = net.ParseIP(a.Vals[0])
			case "giaddr":
				m.GatewayIPAddr = net.ParseIP(a.Vals[0])
			case "requested":
				m.UpdateOption(dhcpv4.OptRequestedIPAddress(net.ParseIP(a.Vals[0])))
			case "server":
				m.UpdateOption(dhcpv4.OptServerIdentifier(net.ParseIP(a.Vals[0])))
			case "broadcast":
				m.SetBroadcast()
			case "id":
				m.UpdateOption(dhcpv4.OptClientIdentifier([]byte(a.Vals[0])))
			case "bootreply":
				m.OpCode = dhcpv4.OpcodeBootReply
			case "source-port":
				p.sourcePort = 67
			}
		}
		p.payload = m.ToBytes()
		out, payload := exchange(t, subnetOf(t, d), p)
		if payload == nil {
			return out
		}
		reply, err := dhcpv4.FromBytes(payload)
		require.NoError(t, err)
		require.Less(t, len(payload), 576-28, "larger than a client must accept, RFC 2131 section 2")
		require.Equal(t, dhcpv4.TransactionID{1, 2, 3, 4}, reply.TransactionID)
		require.Equal(t, net.HardwareAddr(p.sourceMAC[:]), reply.ClientHWAddr)
		_, options, _ := strings.Cut(reply.Summary(), "  options:\n")
		return out + fmt.Sprintf("%s ciaddr=%s yiaddr=%s flags=%#x\n%s", reply.OpCode, reply.ClientIPAddr, reply.YourIPAddr, reply.Flags, options)
	})
}

// TestDHCPv6 runs testdata/dhcpv6. A line "send solicit ..." sends a message from the port web. Its arguments change
// the message: mac, server (ours or other), no-client, ia (identity associations with the given addresses, or "-" for
// none), rapid-commit, fqdn, temporary, prefix, destination.
func TestDHCPv6(t *testing.T) {
	kinds := map[string]dhcpv6.MessageType{
		"solicit": dhcpv6.MessageTypeSolicit, "request": dhcpv6.MessageTypeRequest, "confirm": dhcpv6.MessageTypeConfirm,
		"renew": dhcpv6.MessageTypeRenew, "rebind": dhcpv6.MessageTypeRebind, "release": dhcpv6.MessageTypeRelease,
		"decline": dhcpv6.MessageTypeDecline, "information-request": dhcpv6.MessageTypeInformationRequest,
		"advertise": dhcpv6.MessageTypeAdvertise,
	}
	servers := map[string]dhcpv6.DUID{"ours": serverDUID, "other": &dhcpv6.DUIDLL{HWType: 1, LinkLayerAddr: macOther[:]}}
	datadriven.RunTest(t, "testdata/dhcpv6", func(t *testing.T, d *datadriven.TestData) string {
		require.Equal(t, "send", d.Cmd)
		m := &dhcpv6.Message{MessageType: kinds[d.CmdArgs[0].Key], TransactionID: dhcpv6.TransactionID{1, 2, 3}}
		p := packet{sourceMAC: macWeb, destinationMAC: cloud.MAC{0x33, 0x33, 0, 1, 0, 2}, destination: allServers,
			protocol: cloud.ProtocolUDP, hopLimit: 1, sourcePort: 546, destinationPort: 547}
		if !d.HasArg("no-client") {
			m.AddOption(dhcpv6.OptClientID(&dhcpv6.DUIDLL{HWType: 1, LinkLayerAddr: macOther[:]}))
		}
		for _, a := range d.CmdArgs[1:] {
			switch a.Key {
			case "mac":
				p.sourceMAC = map[string]cloud.MAC{"plain": macNoIP6, "other": macOther}[a.Vals[0]]
			case "server":
				m.AddOption(dhcpv6.OptServerID(servers[a.Vals[0]]))
			case "ia":
				ia := &dhcpv6.OptIANA{IaId: [4]byte{0, 0, 0, byte(len(m.Options.IANA()) + 1)}}
				for _, v := range a.Vals {
					if v != "-" {
						ia.Options.Add(address6(netip.MustParseAddr(v), time.Hour))
					}
				}
				m.AddOption(ia)
			case "rapid-commit":
				m.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit})
			case "fqdn":
				m.AddOption(dhcpv6.OptRequestedOption(dhcpv6.OptionFQDN))
			case "temporary":
				m.AddOption(&dhcpv6.OptIATA{IaId: [4]byte{0, 0, 0, 8}})
			case "prefix":
				m.AddOption(&dhcpv6.OptIAPD{IaId: [4]byte{0, 0, 0, 9}})
			case "destination":
				p.destination = netip.MustParseAddr(a.Vals[0])
			}
		}
		p.source = cloud.LinkLocal(p.sourceMAC)
		p.payload = m.ToBytes()
		out, payload := exchange(t, subnetOf(t, d), p)
		if payload == nil {
			return out
		}
		reply, err := dhcpv6.MessageFromBytes(payload)
		require.NoError(t, err)
		return out + reply.Summary()
	})
}

// solicitation returns a router solicitation of a guest.
func solicitation(mac cloud.MAC) packet {
	p := packet{sourceMAC: mac, destinationMAC: cloud.MAC{0x33, 0x33, 0, 0, 0, 2}, source: cloud.LinkLocal(mac),
		destination: netip.MustParseAddr("ff02::2"), protocol: cloud.ProtocolICMPv6, hopLimit: 255,
		payload: []byte{routerSolicitation, 0, 0, 0, 0, 0, 0, 0}}
	sum := transportChecksum(p.source, p.destination, p.protocol, p.payload)
	p.payload[2], p.payload[3] = byte(sum>>8), byte(sum)
	return p
}

func TestAdvertisement(t *testing.T) {
	headers, m := exchange(t, testSubnet(), solicitation(macWeb))
	require.Equal(t, "02:ff:00:00:00:01 [fe80::ff:ff:fe00:1]:0 -> 02:00:00:00:00:11 [ff02::1]:0 hops 255\n", headers)
	require.Zero(t, transportChecksum(cloud.LinkLocal(cloud.GatewayMAC), allNodes, cloud.ProtocolICMPv6, m), "checksum")
	m[2], m[3] = 0, 0
	require.Equal(t, strings.Join([]string{
		"8600000040c023280000000000000000", // hop limit 64, flags M and O, 9000 s
		"010102ff00000001",                 // source link-layer address
		"05010000000005aa",                 // MTU 1450
		"030440800000232800002328" + "00000000" + "fd000001000200030000000000000000", // prefix /64, on link, not autonomous
		"1903000000002328" + "fd000001000200030000000000000001",                      // DNS: the gateway
		"1f03000000002328" + "0473686f7008696e7465726e616c0000",                      // DNS search list: shop.internal
	}, ""), fmt.Sprintf("%x", m))

	for name, change := range map[string]func(*Subnet, *packet){
		"port without IPv6":   func(_ *Subnet, p *packet) { *p = solicitation(macNoIP6) },
		"subnet without IPv6": func(s *Subnet, _ *packet) { s.CIDR6 = netip.Prefix{} },
		"forwarded":           func(_ *Subnet, p *packet) { p.hopLimit = 254 },
		"wrong checksum":      func(_ *Subnet, p *packet) { p.payload[3]++ },
		"unknown code":        func(_ *Subnet, p *packet) { p.payload[1]++ },
		"too short":           func(_ *Subnet, p *packet) { p.payload = p.payload[:7] },
		"echo request":        func(_ *Subnet, p *packet) { p.payload[0] = 128 },
	} {
		t.Run(name, func(t *testing.T) {
			s, p := testSubnet(), solicitation(macWeb)
			change(&s, &p)
			headers, _ := exchange(t, s, p)
			require.Equal(t, "no answer\n", headers)
		})
	}

	table := newTable(testSubnet(), nil)
	count := 0
	for frame := range table.advertisements() {
		require.Equal(t, macWeb[:], frame[:6], "only to ports with an IPv6 address")
		count++
	}
	require.Equal(t, 1, count)
	require.True(t, table.sameAdvertisement(newTable(testSubnet(), table)))
	other := testSubnet()
	other.MTU = 1400
	require.False(t, table.sameAdvertisement(newTable(other, table)))
}

// TestMalformedFrames changes a valid DHCPDISCOVER in one way each.
func TestMalformedFrames(t *testing.T) {
	valid := validFrames()[0]
	p, ok := parseFrame(valid)
	require.True(t, ok)
	require.True(t, p.isDHCPv4())
	for n := range valid {
		_, ok := parseFrame(valid[:n])
		require.False(t, ok, "cut off after %d bytes", n)
	}
	at := func(i int) int { return ethernetHeader + i }
	for name, change := range map[string]func(f []byte){
		"other protocol of Ethernet": func(f []byte) { f[13] = 6 },
		"IP version 5":               func(f []byte) { f[at(0)] = 0x55 },
		"IP header of 16 bytes":      func(f []byte) { f[at(0)] = 0x44 },
		"IP header of 60 bytes":      func(f []byte) { f[at(0)] = 0x4f },
		"IP length of 19 bytes":      func(f []byte) { f[at(2)], f[at(3)] = 0, 19 },
		"more fragments":             func(f []byte) { f[at(6)] = 0x20 },
		"last fragment":              func(f []byte) { f[at(7)] = 1 },
		"TCP":                        func(f []byte) { f[at(9)] = 6 },
		"wrong checksum":             func(f []byte) { f[at(10)]++ },
		"UDP length of 7 bytes":      func(f []byte) { f[at(24)], f[at(25)] = 0, 7 },
		"UDP length above IP's":      func(f []byte) { f[at(24)]++ },
	} {
		t.Run(name, func(t *testing.T) {
			frame := append([]byte(nil), valid...)
			change(frame)
			if name != "wrong checksum" { // otherwise only the checksum would be refused
				frame[at(10)], frame[at(11)] = 0, 0
				sum := checksum(0, frame[at(0):at(20)])
				frame[at(10)], frame[at(11)] = byte(sum>>8), byte(sum)
			}
			_, ok := parseFrame(frame)
			require.False(t, ok)
		})
	}
}

// TestRateLimit checks that a port's messages beyond the limit are ignored, that other ports are not affected, and that
// a new table does not reset the limit.
func TestRateLimit(t *testing.T) {
	r := New("", "", discardLog)
	r.table.Store(newTable(testSubnet(), nil))
	frame, other := validFrames()[0], append([]byte(nil), validFrames()[0]...)
	answered := 0
	for range 10 * requestBurst {
		if r.answer(frame) != nil {
			answered++
		}
	}
	require.GreaterOrEqual(t, answered, requestBurst)
	require.Less(t, answered, 5*requestBurst)
	limiter := r.table.Load().clients[macWeb].limiter
	r.table.Store(newTable(testSubnet(), r.table.Load()))
	require.Same(t, limiter, r.table.Load().clients[macWeb].limiter, "a new table does not reset the limit")

	copy(other[6:], macNoIP6[:])
	copy(other[ethernetHeader+ipv4Header+udpHeader+28:], macNoIP6[:])
	require.NotNil(t, r.answer(other))
}

// validFrames returns one frame of each kind that is answered.
func validFrames() [][]byte {
	discover := dhcpv4.DHCPv4{OpCode: dhcpv4.OpcodeBootRequest, HWType: 1, ClientHWAddr: macWeb[:], Options: dhcpv4.OptionsFromList(
		dhcpv4.OptMessageType(dhcpv4.MessageTypeDiscover), dhcpv4.OptClientIdentifier([]byte{1, 2, 3}))}
	v4 := packet{sourceMAC: macWeb, source: netip.IPv4Unspecified(), destination: broadcast4, protocol: cloud.ProtocolUDP,
		hopLimit: 64, sourcePort: 68, destinationPort: 67, payload: discover.ToBytes()}
	solicit := dhcpv6.Message{MessageType: dhcpv6.MessageTypeSolicit}
	solicit.AddOption(dhcpv6.OptClientID(&dhcpv6.DUIDLL{HWType: 1, LinkLayerAddr: macWeb[:]}))
	solicit.AddOption(&dhcpv6.OptIANA{IaId: [4]byte{1}})
	v6 := packet{sourceMAC: macWeb, source: cloud.LinkLocal(macWeb), destination: allServers, protocol: cloud.ProtocolUDP,
		hopLimit: 1, sourcePort: 546, destinationPort: 547, payload: solicit.ToBytes()}
	rs := solicitation(macWeb)
	return [][]byte{v4.frame(), v6.frame(), rs.frame()}
}

// FuzzAnswer checks that no frame causes a panic, and that a frame is answered only if it came from a port's MAC
// address, to that address, with a message that can be parsed.
func FuzzAnswer(f *testing.F) {
	for _, frame := range validFrames() {
		f.Add(frame)
		f.Add(frame[:len(frame)-1])
	}
	table := newTable(testSubnet(), nil)
	f.Fuzz(func(t *testing.T, frame []byte) {
		p, ok := parseFrame(frame)
		if !ok || table.clients[p.sourceMAC] == nil {
			return
		}
		reply, _ := table.answer(table.clients[p.sourceMAC], p)
		checkReply(t, p, reply)
	})
}

// FuzzPayload is FuzzAnswer for messages in valid UDP datagrams, in which the checksums of headers do not hide the
// parsers of DHCP.
func FuzzPayload(f *testing.F) {
	for i, frame := range validFrames()[:2] {
		p, _ := parseFrame(frame)
		f.Add(i == 1, p.payload)
		f.Add(i == 1, p.payload[:len(p.payload)-1])
	}
	table := newTable(testSubnet(), nil)
	f.Fuzz(func(t *testing.T, ipv6 bool, payload []byte) {
		p, _ := parseFrame(validFrames()[0])
		if ipv6 {
			p, _ = parseFrame(validFrames()[1])
		}
		p.payload = payload
		reply, _ := table.answer(table.clients[p.sourceMAC], p)
		checkReply(t, p, reply)
	})
}

func checkReply(t *testing.T, request packet, frame []byte) {
	if frame == nil {
		return
	}
	reply, ok := parseFrame(frame)
	require.True(t, ok)
	require.Equal(t, request.sourceMAC, reply.destinationMAC)
	require.Equal(t, cloud.GatewayMAC, reply.sourceMAC)
	switch reply.sourcePort {
	case serverPort4:
		m, err := dhcpv4.FromBytes(reply.payload)
		require.NoError(t, err)
		require.Equal(t, dhcpv4.OpcodeBootReply, m.OpCode)
		require.Contains(t, []string{"0.0.0.0", "10.0.16.17"}, m.YourIPAddr.String())
	case serverPort6:
		m, err := dhcpv6.MessageFromBytes(reply.payload)
		require.NoError(t, err)
		require.Equal(t, serverDUID.ToBytes(), m.Options.ServerID().ToBytes())
	default:
		require.Equal(t, uint8(cloud.ProtocolICMPv6), reply.protocol)
	}
}
