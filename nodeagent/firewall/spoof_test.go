package firewall

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/firewall/frametest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestSpoofMatrix sends forged and legitimate frames from a port. Those that are not forged arrive at another port of
// the subnet, whose groups permit everything, or at the bridge. No forged one arrives.
func TestSpoofMatrix(t *testing.T) {
	l := newLab(t)
	l.group("open", allowAll(cloud.Ingress, cloud.Egress)...)
	a, b := l.add(t, 0, 5, "open"), l.add(t, 0, 6, "open")
	l.change(a, func(p *cloud.HostPort) {
		p.Pairs = frametest.Pairs()
		gateways := []netip.Addr{l.vpc.Subnets[0].Gateway, l.vpc.Subnets[0].Gateway6(), metadata4}
		for _, address := range append(gateways, frametest.Any4, frametest.Any6) {
			pair := cloud.AddressPair{CIDR: netip.PrefixFrom(address, address.BitLen()), MAC: frametest.Virtual}
			p.Pairs = append(p.Pairs, pair)
		}
	})
	l.set(t)
	f := &frametest.Forger{
		MAC: a.port.MAC, Peer: b.port.MAC,
		IP4: a.port.IP, Peer4: b.port.IP, Gateway4: l.vpc.Subnets[0].Gateway,
		IP6: a.port.IP6, Peer6: b.port.IP6, Gateway6: l.vpc.Subnets[0].Gateway6(),
		LinkLocal: cloud.LinkLocal(a.port.MAC), PeerLinkLocal: cloud.LinkLocal(b.port.MAC),
	}
	sender := openWire(t, a.ns, "eth0")
	s := &stage{lab: l, receivers: []*wire{openWire(t, b.ns, "eth0"), openWire(t, l.ns, "br0")}}
	var forged []string
	for _, c := range f.Frames() {
		passed := t.Run(c.Name, func(t *testing.T) {
			tag := s.tag()
			if !c.Forged {
				s.arrives(t, sender, c.Build(tag), tag)
				return
			}
			forged = append(forged, tag)
			require.Equal(t, "spoof", s.verdict(t, sender, c.Build(tag), tag))
		})
		if !passed {
			t.Fatal("the forged frame may have changed the bridge's FDB, so the next frames are not sent")
		}
	}
	last := s.tag()
	s.arrives(t, sender, f.Legitimate(last), last)
	for _, tag := range forged {
		for _, w := range s.receivers {
			require.False(t, w.Saw(tag), "%s arrived", tag)
		}
	}
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
	openWire(t, unknown, "eth0").Send(t, build(tag))
	require.Eventually(t, func() bool { return l.drops(t).Spoof > before }, patience, time.Millisecond)
	require.False(t, s.receivers[0].Saw(tag))
}
