package firewall

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestTrustedDevice sends frames from other hosts' ports through a device with the name of a VXLAN device. Port
// security does not apply to them, because the other host has applied it, but the ingress rules of the local port do.
func TestTrustedDevice(t *testing.T) {
	l := newLab(t)
	local := l.add(t, 0, 5, "dns")
	for _, ipv6 := range []bool{false, true} {
		l.group("dns", append(l.rules("dns"), cloud.Rule{Direction: cloud.Ingress, IPv6: ipv6,
			Protocol: cloud.ProtocolUDP, Ports: cloud.PortRange{First: 53, Last: 53}})...)
	}
	remote := cloud.RemotePort{MAC: cloud.MAC{2, 0, 0, 0, 0, 9}, IP: parseAddr("10.0.0.9"), IP6: parseAddr("fd00::9")}
	l.vpc.Subnets[0].Remotes = []cloud.RemotePort{remote}
	wires := map[string]*wire{}
	for _, device := range []string{"vx0", "v0"} {
		ns := newNamespace(t, device)
		sysctlIn(t, ns, "net/ipv6/conf/default/disable_ipv6", "1")
		l.attach(t, ns, device, remote.MAC, "br0")
		wires[device] = openWire(t, ns, "eth0")
	}
	l.set(t)
	s := &stage{lab: l, receivers: []*wire{openWire(t, local.ns, "eth0")}}
	for _, c := range []struct {
		name, device, want string
		mac                cloud.MAC
		source             string
		port               uint16
	}{
		{"permitted", "vx0", "arrives", remote.MAC, "10.0.0.9", 53},
		{"permitted, IPv6", "vx0", "arrives", remote.MAC, "fd00::9", 53},
		{"no rule", "vx0", "group", remote.MAC, "10.0.0.9", 54},
		{"no rule, IPv6", "vx0", "group", remote.MAC, "fd00::9", 54},
		{"routed by the other host", "vx0", "arrives", cloud.GatewayMAC, "10.0.1.9", 53},
		{"routed by the other host, no rule", "vx0", "group", cloud.GatewayMAC, "10.0.1.9", 54},
		{"another device", "v0", "spoof", remote.MAC, "10.0.0.9", 53},
		{"another device, IPv6", "v0", "spoof", remote.MAC, "fd00::9", 53},
	} {
		t.Run(c.name, func(t *testing.T) {
			tag, source, destination := s.tag(), parseAddr(c.source), local.port.IP
			if source.Is6() {
				destination = local.port.IP6
			}
			packet := udp(at(source, 4000), at(destination, c.port), tag)
			frame := ethernet(local.port.MAC, c.mac, etherType(packet), packet)
			require.Equal(t, c.want, s.verdict(t, wires[c.device], frame, tag))
		})
	}
}

// TestNewDevicePassesNothing attaches the device of a port before Set knows the port. Nothing passes until Set has
// returned, and then only what the rules permit.
func TestNewDevicePassesNothing(t *testing.T) {
	s := newCallStage(t)
	s.group("open", allowAll(cloud.Ingress, cloud.Egress)...)
	old := s.add(t, 0, 5, "open")
	s.set(t)
	added := s.add(t, 0, 6)
	arp := func(tag string) []byte {
		body := arp(1, added.port.MAC, added.port.IP, old.port.IP)
		return ethernet(broadcast, added.port.MAC, unix.ETH_P_ARP, join(body, []byte(tag)))
	}
	st := &stage{lab: s.lab, receivers: []*wire{s.wires[old]}}
	tag := st.tag()
	require.Equal(t, "spoof", st.verdict(t, s.wires[added], arp(tag), tag))
	for _, ipv6 := range []bool{false, true} {
		require.Equal(t, "spoof", s.verdict(t, call{added, old, ipv6, udpTo(1)}))
		require.Equal(t, "unassigned", s.verdict(t, call{old, added, ipv6, udpTo(1)}))
	}
	s.forget(t)
	s.set(t)
	tag = st.tag()
	require.Equal(t, "arrives", st.verdict(t, s.wires[added], arp(tag), tag))
	for _, ipv6 := range []bool{false, true} {
		require.Equal(t, "group", s.verdict(t, call{added, old, ipv6, udpTo(1)}))
		require.Equal(t, "group", s.verdict(t, call{old, added, ipv6, udpTo(1)}))
	}
	s.change(added, func(p *cloud.HostPort) { p.Groups = []cloud.SecurityGroupID{"open"} })
	s.set(t)
	for _, ipv6 := range []bool{false, true} {
		require.Equal(t, "arrives", s.verdict(t, call{added, old, ipv6, udpTo(1)}))
		require.Equal(t, "arrives", s.verdict(t, call{old, added, ipv6, udpTo(2)}))
	}
}

// TestPortSecurityOffKeepsConnections checks that a connection continues when the port security of the port that began
// it is switched off, and when the port moves to another host.
func TestPortSecurityOffKeepsConnections(t *testing.T) {
	s := newCallStage(t)
	s.group("open", allowAll(cloud.Ingress, cloud.Egress)...)
	client, server := s.add(t, 0, 5, "open"), s.add(t, 0, 6, "open")
	s.set(t)
	require.Equal(t, "arrives", s.verdict(t, call{client, server, false, udpTo(1)}))
	s.change(client, func(p *cloud.HostPort) { p.Secured, p.Groups = false, nil })
	r := s.set(t)
	require.NotZero(t, r.Writes)
	require.Zero(t, r.Revoked, "port security off")
	subnet := &s.vpc.Subnets[0]
	subnet.Ports = subnet.Ports[1:]
	subnet.Remotes = append(subnet.Remotes, cloud.RemotePort{MAC: client.port.MAC, IP: client.port.IP})
	require.Zero(t, s.set(t).Revoked, "on another host")
}
