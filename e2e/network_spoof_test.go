package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/firewall/frametest"
	domain "github.com/trivet-cloud/trivet/shared/cloud"
)

// attack is a frame that the attacker's guest sends, and the legitimate frame that it sends next. The first frame must
// not arrive if forged is true, and must arrive otherwise. The second one must always arrive.
type attack struct {
	name    string // of the kind of frame
	victim  *nic
	unicast bool // the frame was a broadcast or multicast, and its destination is replaced by the victim's MAC address
	forged  bool
	tag     string // text in the frame
	marker  string // text in the legitimate frame to the same victim that is sent next
	frames  [2][]byte
}

func (a *attack) String() string {
	return fmt.Sprintf("%s to %s (unicast: %v)", a.name, a.victim.vm.GetName(), a.unicast)
}

// attackList builds the frames of an attacker for each victim. Forged frames to a multicast or broadcast address are
// sent once more to the victim's own MAC address, because bridges pass nothing else to other hosts.
type attackList struct {
	kind    string // of the tags
	attacks []attack
}

// add adds the frame that build returns, and the marker.
func (l *attackList) add(f *frametest.Forger, a attack, build func(tag string) []byte) {
	a.tag = fmt.Sprintf("<%s %06d>", l.kind, len(l.attacks))
	a.marker = fmt.Sprintf("<marker of %s %06d>", l.kind, len(l.attacks))
	a.frames = [2][]byte{build(a.tag), f.Legitimate(a.marker)}
	l.attacks = append(l.attacks, a)
}

func (l *attackList) addVictim(r *rawVPC, victim *nic) {
	f := &frametest.Forger{
		MAC: r.attacker.mac, Peer: victim.mac,
		IP4: r.attacker.ip, Peer4: victim.ip, Gateway4: r.gateway,
		IP6: r.attacker.ip6, Peer6: victim.ip6, Gateway6: r.gateway6,
		LinkLocal: domain.LinkLocal(r.attacker.mac), PeerLinkLocal: domain.LinkLocal(victim.mac),
	}
	add := func(name string, forged bool, build func(tag string) []byte) {
		l.add(f, attack{name: name, victim: victim, forged: forged}, build)
		if forged && !slices.Equal(build("")[:6], victim.mac[:]) {
			l.add(f, attack{name: name, victim: victim, forged: forged, unicast: true}, func(tag string) []byte {
				return frametest.Join(victim.mac[:], build(tag)[6:])
			})
		}
	}
	for _, c := range f.Frames() {
		add(c.Name, c.Forged, c.Build)
	}
	// Addresses of the test environment: a guest of another VPC, the underlay addresses of both hosts and of the
	// router, and the control plane.
	for _, source := range []string{"10.0.1.10", "10.94.1.2", "10.94.2.2", "10.94.2.1", "127.0.0.1"} {
		add("IPv4 from "+source, true, func(tag string) []byte {
			packet := frametest.UDP(frametest.At(netip.MustParseAddr(source), 1), frametest.At(victim.ip, 2), tag)
			return frametest.Ethernet(victim.mac, r.attacker.mac, unix.ETH_P_IP, packet)
		})
	}
}

// spoof sends forged and legitimate frames from a guest. Guests on the same and on another host capture everything that
// they receive, as does d, a guest of another VPC. The test itself captures frames on the underlay, on the external
// network and at the gateways. No forged frame may arrive at any of them. A legitimate frame follows each forged one,
// and must arrive.
func (c *networkCloud) spoof(r *rawVPC, d *machine) {
	t := c.t
	var pairs []*networkv1.AddressPair
	for _, p := range frametest.Pairs() {
		pair := &networkv1.AddressPair{Cidr: p.CIDR.String()}
		if p.MAC != (domain.MAC{}) {
			pair.MacAddress = p.MAC.String()
		}
		pairs = append(pairs, pair)
	}
	r.attacker.update(&networkv1.UpdatePortRequest{AllowedAddressPairs: &networkv1.AddressPairs{Pairs: pairs}})
	r.awaitSource(frametest.Pairs()[0].CIDR.Addr().String())
	// The guests' own traffic, with real ARP and neighbour discovery.
	for _, victim := range []*nic{r.near, r.far} {
		r.attacker.eventually("IPv4 passes", "ping -c 1 -W 2 "+victim.ip.String())
		r.attacker.eventually("IPv6 passes", "ping -c 1 -W 2 "+victim.ip6.String())
	}
	list := &attackList{kind: "attack"}
	list.addVictim(r, r.near)
	list.addVictim(r, r.far)
	gateways := c.openBridges()
	underlay := c.openUnderlay()
	seen := c.capture(list, r, d)
	for _, a := range list.attacks {
		if a.forged {
			require.Empty(t, seen(a.tag), "%v: the forged frame arrived", &a)
			require.False(t, saw(underlay, a.tag), "%v: the forged frame was sent to the underlay", &a)
			require.False(t, saw(gateways, a.tag), "%v: the forged frame arrived at a gateway", &a)
		} else {
			require.True(t, len(seen(a.tag)) > 0 || saw(gateways, a.tag), "%v: the frame did not arrive", &a)
		}
		require.Len(t, seen(a.marker), 1, "%v: the next frame did not arrive", &a)
	}
	last := list.attacks[len(list.attacks)-1].marker
	require.True(t, saw(underlay, last), "the captures of the underlay do not see the packets of VPCs")
	c.spoofUnsecured(r, d)
}

// spoofUnsecured sends the frames again while the attacker's port has no port security. The forged frames must arrive,
// except those in stoppedElsewhere. This shows that the captures recognize them, and that only port security stops
// them.
func (c *networkCloud) spoofUnsecured(r *rawVPC, d *machine) {
	t := c.t
	r.attacker.update(&networkv1.UpdatePortRequest{PortSecurity: ptr(false)})
	defer r.attacker.update(&networkv1.UpdatePortRequest{PortSecurity: ptr(true)})
	r.awaitSource("192.0.2.1")
	list := &attackList{kind: "control"}
	list.addVictim(r, r.near)
	list.addVictim(r, r.far)
	underlay := c.openUnderlay()
	seen := c.capture(list, r, d)
	for _, a := range list.attacks {
		if a.forged && !slices.Contains(stoppedElsewhere, a.name) {
			require.True(t, len(seen(a.tag)) > 0 || saw(underlay, a.tag),
				"%v: the frame does not arrive without port security", &a)
		}
	}
}

// awaitSource sends frames from an IPv4 address until one arrives: then the attacker's host has applied the change of
// the port that permits this address.
func (r *rawVPC) awaitSource(source string) {
	c, probe := r.near.c, r.near.startCapture()
	text := "<from " + source + ">"
	packet := frametest.UDP(frametest.At(netip.MustParseAddr(source), 1), frametest.At(r.near.ip, 2), text)
	frame := frametest.Ethernet(r.near.mac, r.attacker.mac, unix.ETH_P_IP, packet)
	require.NoError(c.t, lab.Until(c.context(time.Minute), "a frame from "+source+" arrives", func(ctx context.Context) error {
		r.attacker.send([][]byte{frame})
		_, err := probe.m.try(ctx, fmt.Sprintf("grep -q %x %s", text, probe.file))
		return err
	}))
	probe.stop()
}

// stoppedElsewhere are the names of the forged frames that do not arrive without port security either, because
// something else drops them.
var stoppedElsewhere = []string{
	// Security groups permit no packets to broadcast and multicast addresses, which no port has.
	"DHCP request from another port number", "DHCP server", "router advertisement", "redirect",
	"router advertisement behind an extension header", "router advertisement in a fragment with an extension header",
	// Connection tracking drops redirects of packets that were not sent.
	"redirect to a guest",
	// QEMU drops the frames of VLANs that the guest has not configured.
	"VLAN tag", "VLAN tag around ARP",
}

// capture sends the frames of a list while the victims and d capture. The returned function returns the names of the
// guests that have received a frame with the given text.
func (c *networkCloud) capture(list *attackList, r *rawVPC, d *machine) (seen func(text string) []string) {
	victims := []*machine{r.near.machine, r.far.machine, d}
	captures := map[*machine]*capture{}
	for _, m := range victims {
		captures[m] = m.startCapture()
	}
	// The queue of a guest's device has 500 frames, and each is sent three times.
	for part := range slices.Chunk(list.attacks, 50) {
		var frames [][]byte
		for _, a := range part {
			frames = append(frames, a.frames[:]...)
		}
		r.attacker.send(frames)
		last := part[len(part)-1]
		captures[last.victim.machine].awaitText(last.marker)
	}
	frames := map[string]string{}
	for m, p := range captures {
		frames[m.vm.GetName()] = p.stop()
	}
	return func(text string) (names []string) {
		for name, all := range frames {
			if strings.Contains(all, fmt.Sprintf("%x", text)) {
				names = append(names, name)
			}
		}
		return names
	}
}

// saw reports whether a frame with the text was captured by one of wires.
func saw(wires []*frametest.Wire, text string) bool {
	return slices.ContainsFunc(wires, func(w *frametest.Wire) bool { return w.Saw(text) })
}

// openUnderlay captures what all hosts send to the underlay and to the external network.
func (c *networkCloud) openUnderlay() (wires []*frametest.Wire) {
	here, err := netns.Get()
	require.NoError(c.t, err)
	defer here.Close()
	for i := range c.hosts {
		wires = append(wires, frametest.OpenWire(c.t, here, fmt.Sprintf("v%d", i+1)),
			frametest.OpenWire(c.t, here, fmt.Sprintf("xe%d", i+1)))
	}
	return wires
}

// openBridges captures what the gateways of all VPCs receive on all hosts.
func (c *networkCloud) openBridges() (wires []*frametest.Wire) {
	paths, err := filepath.Glob("/run/netns/host*")
	require.NoError(c.t, err)
	for _, path := range paths {
		if strings.HasSuffix(path, "-edge") {
			continue
		}
		ns, err := netns.GetFromPath(path)
		require.NoError(c.t, err)
		for _, device := range bridges(c.t, ns) {
			wires = append(wires, frametest.OpenWire(c.t, ns, device))
		}
		require.NoError(c.t, ns.Close())
	}
	require.NotEmpty(c.t, wires)
	return wires
}

// bridges returns the names of the bridges in a network namespace.
func bridges(t *testing.T, ns netns.NsHandle) (names []string) {
	h, err := netlink.NewHandleAt(ns)
	require.NoError(t, err)
	defer h.Close()
	links, err := h.LinkList()
	require.NoError(t, err)
	for _, l := range links {
		if l.Type() == "bridge" {
			names = append(names, l.Attrs().Name)
		}
	}
	return names
}
