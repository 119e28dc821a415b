package peering

import (
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// newPair returns two hosts with the VPC a, whose ports begin connections, and the VPC b, whose ports only accept them.
func newPair(t testing.TB) (l *lab, a, b *labVPC) {
	l = newLab(t)
	a, b = l.addVPC("a", 1, "client"), l.addVPC("b", 2, "server")
	for host := 1; host <= 2; host++ {
		l.serve(a.guest(host))
		l.serve(b.guest(host))
	}
	l.peer("ab", a, b)
	return l, a, b
}

// TestTraffic sends packets between ports of two VPCs on one host and on two. The groups of the servers permit no
// outgoing packets and those of the clients no incoming ones, so answers pass only if both hosts track the connections.
func TestTraffic(t *testing.T) {
	l, a, b := newPair(t)
	require.NotEmpty(t, l.applyAll())
	for from := 1; from <= 2; from++ {
		for to := 1; to <= 2; to++ {
			guest, server := a.guest(from), b.address(to)
			l.requireReaches("tcp4", guest, server)
			l.requireReaches("udp4", guest, server)
			require.NoError(t, l.ping(guest, server, patience))
			l.requireReaches("tcp6", guest, map[int]string{1: "fd00:2::a", 2: "fd00:2::14"}[to])
			// More data than the windows of both ends hold.
			conn, err := l.dial("tcp4", guest, server, patience)
			require.NoError(t, err)
			require.NoError(t, exchange(conn, 60_000, patience))
			l.requireBlocked("tcp4", b.guest(to), a.address(from), "the server's groups permit no connections")
		}
	}
	require.Empty(t, l.applyAll(), "the second application must write nothing")
}

// TestTransitIsNotTracked requires that a namespace does not track connections of which it forwards only one direction.
// Otherwise TCP connections between different hosts would break.
func TestTransitIsNotTracked(t *testing.T) {
	l, a, b := newPair(t)
	l.applyAll()
	l.requireReaches("tcp4", a.guest(1), b.address(2))
	requireTracked := func(host *labHost, vpc *labVPC, want bool) {
		t.Helper()
		table := l.Exec(host.inside(vpc.id), "cat", "/proc/net/nf_conntrack")
		require.Equal(t, want, strings.Contains(table, "dport=7000"), "connections in %s:\n%s", host.inside(vpc.id), table)
	}
	requireTracked(l.hosts[0], a, true)
	requireTracked(l.hosts[0], b, false)
	requireTracked(l.hosts[1], a, false)
	requireTracked(l.hosts[1], b, true)
}

// TestICMPErrors requires that ICMP errors about packets of a connection arrive at its sender: errors of the receiver,
// and errors of the namespace in which a packet is too large for the other VPC.
func TestICMPErrors(t *testing.T) {
	l, a, b := newPair(t)
	for i := range l.hosts {
		b.on[i].MTU, a.on[i].Peerings[0].MTU = 1300, 1300
	}
	l.applyAll()
	guest := a.guest(1)

	// A port without a server: port unreachable.
	var conn *net.UDPConn
	require.NoError(t, l.In(guest, func() (err error) {
		conn, err = net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.ParseIP(b.address(2)), Port: 7001})
		return err
	}))
	defer conn.Close()
	require.Eventually(t, func() bool {
		if _, err := conn.Write([]byte("x")); err != nil {
			return strings.Contains(err.Error(), "refused")
		}
		_ = conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		_, err := conn.Read(make([]byte, 1))
		return err != nil && strings.Contains(err.Error(), "refused")
	}, patience, 10*time.Millisecond, "the port unreachable message does not arrive")

	// The sender's namespace reports the MTU of the peering.
	tcp, err := l.dial("tcp4", guest, b.address(2), patience)
	require.NoError(t, err)
	require.NoError(t, exchange(tcp, 60_000, patience))
	large, err := l.dial("udp4", guest, b.address(1), patience)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		_, _ = large.Write(make([]byte, 1350))
		return strings.Contains(l.Exec(guest, "ip", "route", "get", b.address(1)), "mtu 1300")
	}, patience, 10*time.Millisecond, "no message says that the packet is too large")

	// The receiver reports an MTU of 1200 for the path behind it.
	udp, err := l.dial("udp4", guest, b.address(2), patience)
	require.NoError(t, err)
	require.NoError(t, exchange(udp, 1200, patience))
	require.NoError(t, l.In(b.guest(2), func() error {
		return tooBig(udp.LocalAddr().(*net.UDPAddr).AddrPort(), udp.RemoteAddr().(*net.UDPAddr).AddrPort(), 1200)
	}))
	require.Eventually(t, func() bool {
		return strings.Contains(l.Exec(guest, "ip", "route", "get", b.address(2)), "mtu 1200")
	}, patience, 10*time.Millisecond, "the message of the receiver does not arrive")
	require.NoError(t, exchange(tcp, 60_000, patience))
}

// tooBig sends the ICMP message that fragmentation is needed for a UDP packet, with the MTU, to the packet's source.
func tooBig(source, destination netip.AddrPort, mtu int) error {
	header := &ipv4.Header{
		Version: 4, Len: 20, TotalLen: 1280, TTL: 60, Protocol: 17, Flags: ipv4.DontFragment, Src: source.Addr().AsSlice(),
		Dst: destination.Addr().AsSlice(),
	}
	original, err := header.Marshal()
	if err != nil {
		return err
	}
	ports := []byte{
		byte(source.Port() >> 8), byte(source.Port()), byte(destination.Port() >> 8), byte(destination.Port()), 0, 0, 0, 0,
	}
	body := append([]byte{0, 0, byte(mtu >> 8), byte(mtu)}, append(original, ports...)...)
	message := icmp.Message{Type: ipv4.ICMPTypeDestinationUnreachable, Code: 4, Body: &icmp.RawBody{Data: body}}
	packet, err := message.Marshal(nil)
	if err != nil {
		return err
	}
	conn, err := net.ListenPacket("ip4:icmp", "0.0.0.0")
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.WriteTo(packet, &net.IPAddr{IP: source.Addr().AsSlice()})
	return err
}

// TestRoutesOfBothSides requires that a peering carries packets only while both VPCs have routes to it, and that the
// removal of a route ends existing connections.
func TestRoutesOfBothSides(t *testing.T) {
	l, a, b := newPair(t)
	routes := map[*labVPC][]cloud.HostRoute{a: a.on[0].Subnets[0].Routes, b: b.on[0].Subnets[0].Routes}
	set := func(v *labVPC, list []cloud.HostRoute) {
		for i := range l.hosts {
			v.on[i].Subnets[0].Routes = list
		}
		l.applyAll()
	}
	l.applyAll()
	for _, v := range []*labVPC{a, b} {
		local, err := l.dial("tcp4", a.guest(1), b.address(1), patience)
		require.NoError(t, err)
		remote, err := l.dial("udp4", a.guest(1), b.address(2), patience)
		require.NoError(t, err)
		require.NoError(t, exchange(local, 100, patience))
		require.NoError(t, exchange(remote, 100, patience))
		set(v, nil)
		require.Error(t, exchange(local, 100, blocked), "a connection outlives the route of VPC %s", v.id)
		require.Error(t, exchange(remote, 100, blocked), "a connection outlives the route of VPC %s", v.id)
		l.requireBlocked("udp4", a.guest(2), b.address(1), "the peering carries packets without a route of VPC "+string(v.id))
		set(v, routes[v])
		l.requireReaches("tcp4", a.guest(1), b.address(2))
		require.NoError(t, exchange(remote, 100, patience))
	}

	// A route with a longer prefix excludes a part of the peer's prefix.
	exception := cloud.HostRoute{Destination: parsePrefix("10.1.1.16/28"), Target: cloud.RouteBlackhole}
	set(b, append([]cloud.HostRoute{exception}, routes[b]...))
	l.requireReaches("tcp4", a.guest(1), b.address(2))
	l.requireBlocked("udp4", a.guest(2), b.address(2), "a source to which no route leads passes")
	set(b, routes[b])

	// The end of the peering removes its devices. Until the routes go, their destinations are unreachable.
	for i := range l.hosts {
		a.on[i].Peerings, b.on[i].Peerings = nil, nil
	}
	l.applyAll()
	l.requireBlocked("tcp4", a.guest(1), b.address(1), "traffic passes without a peering")
	for _, h := range l.hosts {
		for _, v := range l.vpcs {
			require.NotContains(t, l.IP(h.inside(v.id), "-br link"), cloud.PeeringDevices)
			require.Contains(t, l.IP(h.inside(v.id), "route show table %d", 100_000_000+100*v.number), "unreachable")
			require.NotContains(t, l.Exec(h.inside(v.id), "nft", "list", "tables"), table.Name)
		}
	}
}

// receives sends datagrams from the address source in the namespace from to the address to in the namespace at. It
// reports whether one arrives within the given time.
func (l *lab) receives(from, source, at, to string, within time.Duration) bool {
	l.t.Helper()
	var server, client *net.UDPConn
	require.NoError(l.t, l.In(at, func() (err error) {
		server, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(to), Port: 7002})
		return err
	}))
	defer server.Close()
	require.NoError(l.t, l.In(from, func() (err error) {
		local, remote := &net.UDPAddr{IP: net.ParseIP(source)}, &net.UDPAddr{IP: net.ParseIP(to), Port: 7002}
		client, err = net.DialUDP("udp4", local, remote)
		return err
	}))
	defer client.Close()
	deadline := time.Now().Add(within)
	for time.Now().Before(deadline) {
		_, _ = client.Write([]byte("x"))
		_ = server.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if _, _, err := server.ReadFromUDP(make([]byte, 10)); err == nil {
			return true
		}
	}
	return false
}

// TestForgedSources requires that a port without port security reaches a peer only from addresses of its own VPC, even
// if the peer's groups permit everything.
func TestForgedSources(t *testing.T) {
	l := newLab(t)
	a, b, c := l.addVPC("a", 1, "open"), l.addVPC("b", 2, "open"), l.addVPC("c", 3, "open")
	l.peer("ab", a, b)
	l.peer("bc", b, c)
	for i := range l.hosts {
		a.on[i].Subnets[0].Ports[0].Secured = false
	}
	l.applyAll()
	for _, source := range []string{"10.1.1.77", "203.0.113.7", "10.2.1.77", "10.3.1.10"} {
		l.IP(a.guest(1), "address add %s/32 dev lo", source)
	}
	for host := 1; host <= 2; host++ {
		at, to := b.guest(host), b.address(host)
		require.True(t, l.receives(a.guest(1), a.address(1), at, to, patience))
		require.True(t, l.receives(a.guest(1), "10.1.1.77", at, to, patience), "an address of the VPC")
		for _, forged := range []string{"203.0.113.7", "10.2.1.77", "10.3.1.10"} {
			require.False(t, l.receives(a.guest(1), forged, at, to, blocked),
				"a packet from the forged source %s arrives", forged)
		}
	}
	// Forged addresses of a peer from an external network do not arrive either.
	l.outside(l.hosts[0], b)
	l.IP("o", "address add %s/32 dev lo", a.address(2))
	l.IP("o", "address add 203.0.113.9/32 dev lo")
	require.True(t, l.receives("o", "203.0.113.9", b.guest(1), b.address(1), patience))
	require.False(t, l.receives("o", a.address(2), b.guest(1), b.address(1), blocked),
		"a peer's address from outside passes")
}

// outside gives a VPC on a host a device like that of package edge, over which a default route leads to the namespace
// o, whose address is 198.51.100.1.
func (l *lab) outside(h *labHost, v *labVPC) {
	l.t.Helper()
	l.Add("o")
	inside := h.inside(v.id)
	edgeDevice := cloud.EdgeDevicePrefix + "7" // any of those that a VPC with several gateways has
	l.IP(inside, "link add %s type veth peer name eth0 netns %so", edgeDevice, l.Prefix)
	l.IP(inside, "address add 198.51.100.2/24 dev %s", edgeDevice)
	l.IP(inside, "link set %s up", edgeDevice)
	l.IP(inside, "rule add priority 34000 lookup 90000000")
	l.IP(inside, "route add default via 198.51.100.1 table 90000000")
	l.IP("o", "address add 198.51.100.1/24 dev eth0")
	l.IP("o", "link set eth0 up")
	l.IP("o", "route add default via 198.51.100.2")
}

// TestNotTransitive requires that a VPC reaches only the ports of its peer. It must not reach the peer's other
// peerings, external networks and services, although routes lead there.
func TestNotTransitive(t *testing.T) {
	l := newLab(t)
	a, b, c := l.addVPC("a", 1, "open"), l.addVPC("b", 2, "open"), l.addVPC("c", 3, "open")
	l.peer("ab", a, b)
	l.peer("bc", b, c)
	for i := range l.hosts {
		toAB := cloud.HostRoute{Destination: parsePrefix("0.0.0.0/0"), Target: cloud.RoutePeering, Peering: "ab"}
		toBC := cloud.HostRoute{Destination: parsePrefix("10.0.0.0/8"), Target: cloud.RoutePeering, Peering: "bc"}
		a.on[i].Subnets[0].Routes = append(a.on[i].Subnets[0].Routes, toAB)
		c.on[i].Subnets[0].Routes = append(c.on[i].Subnets[0].Routes, toBC)
	}
	l.applyAll()
	for _, v := range l.vpcs {
		l.serve(v.guest(1))
		l.serve(v.guest(2))
	}
	l.requireReaches("tcp4", a.guest(1), b.address(2))
	l.requireReaches("tcp4", b.guest(1), c.address(2))
	for host := 1; host <= 2; host++ {
		reached := l.receives(a.guest(1), a.address(1), c.guest(host), c.address(host), blocked)
		require.False(t, reached, "a VPC reaches its peer's peer")
	}
	l.requireBlocked("tcp4", a.guest(1), c.address(1), "a VPC reaches its peer's peer")

	l.outside(l.hosts[0], b)
	require.True(t, l.receives(b.guest(1), b.address(1), "o", "198.51.100.1", patience))
	require.False(t, l.receives(a.guest(1), a.address(1), "o", "198.51.100.1", blocked),
		"a VPC reaches the external network of its peer")

	// The services of the peer's namespace do not answer.
	for _, service := range []string{"10.2.1.1", "169.254.169.254"} {
		l.IP(l.hosts[0].inside("b"), "address replace 169.254.169.254/32 dev lo")
		require.Error(t, l.ping(a.guest(1), service, blocked), "%s of the peer answers", service)
	}
	require.NoError(t, l.ping(b.guest(1), "10.2.1.1", patience))
}

// TestDrift changes by hand what the package has made, and requires that the next call repairs it and the one after it
// writes nothing.
func TestDrift(t *testing.T) {
	l, a, b := newPair(t)
	l.applyAll()
	h, device := l.hosts[0], cloud.PeeringID("ab").Device()
	inside := h.inside("a")
	changes := map[string]func(){
		"device":      func() { l.IP(inside, "link delete %s", device) },
		"device down": func() { l.IP(inside, "link set %s down", device) },
		"MTU":         func() { l.IP(inside, "link set %s mtu 1280", device) },
		"ARP":         func() { l.IP(inside, "link set %s arp on", device) },
		"MAC":         func() { l.IP(h.inside("b"), "link set %s address 02:00:00:00:00:99", device) },
		"route":       func() { l.IP(inside, "route delete 10.2.0.0/16 table 100000100 proto 201") },
		"other route": func() {
			l.IP(inside, "route add 10.9.0.0/16 via 169.254.0.1 dev %s onlink table 100000100 proto 201 metric 1000", device)
		},
		"rules":      func() { l.Exec(inside, "nft", "delete", "table", "inet", table.Name) },
		"rule":       func() { l.Exec(inside, "nft", "add", "rule", "inet", table.Name, "arriving", "accept") },
		"forwarding": func() { l.Exec(inside, "sysctl", "-qw", "net.ipv4.conf."+device+".forwarding=0") },
		"old device": func() { l.IP(inside, "link add peerold type veth peer name other") },
	}
	before := l.state("a") + l.state("b")
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			l.t = t
			change()
			require.NotEmpty(t, l.applyAll(), "the change is not repaired")
			require.Empty(t, l.applyAll())
			require.Equal(t, before, l.state("a")+l.state("b"))
			l.requireReaches("tcp4", a.guest(1), b.address(2))
			l.requireReaches("udp4", a.guest(2), b.address(1))
		})
	}
}

// state returns the devices, routes and rules of the package in a VPC's namespace on host 1, as the kernel has them.
func (l *lab) state(id cloud.VPCID) string {
	l.t.Helper()
	inside := l.hosts[0].inside(id)
	var lines []string
	for line := range strings.Lines(l.IP(inside, "-d link show")) {
		if strings.Contains(line, cloud.PeeringDevices) {
			_, line, _ = strings.Cut(line, ": ")
			name, rest, _ := strings.Cut(line, "@")
			_, rest, _ = strings.Cut(rest, ": ")
			// The kernel updates the operational state and the carrier later.
			rest, _, _ = strings.Cut(rest, " state ")
			rest = strings.NewReplacer("NO-CARRIER,", "", ",LOWER_UP", "").Replace(rest)
			lines = append(lines, name+" "+rest+"\n")
		}
	}
	for _, family := range []string{"-4", "-6"} {
		lines = append(lines, l.Exec(inside, "ip", family, "route", "show", "table", "all", "proto", "201"))
	}
	return strings.Join(append(lines, l.Exec(inside, "nft", "list", "table", "inet", table.Name)), "")
}

// TestPeerArrivesLater sets a VPC before its peer has a namespace, and removes the peer afterwards.
func TestPeerArrivesLater(t *testing.T) {
	l := newLab(t)
	a := l.addVPC("a", 1, "client")
	gone := &cloud.HostVPC{ID: "gone", MTU: 1400, CIDR: parsePrefix("10.9.0.0/16")}
	h, vpc := l.hosts[0], a.on[0]
	vpc.Peerings = []cloud.HostPeering{{ID: "x", Peer: "gone", CIDR: gone.CIDR, MTU: 1400}}
	require.Empty(t, h.apply(vpc).Connected)
	require.Empty(t, h.apply(vpc).Changes)
	gone.Peerings = []cloud.HostPeering{{ID: "x", Peer: "a", CIDR: vpc.CIDR, MTU: 1400}}
	require.Equal(t, []cloud.VPCID{"a"}, h.apply(gone).Connected)
	device := cloud.PeeringID("x").Device()
	require.NotContains(t, l.IP(h.inside("a"), "-br link show %s", device), ",UP",
		"a device is up before the rules of its VPC")
	require.NotEmpty(t, h.apply(vpc).Changes)
	require.Contains(t, l.IP(h.inside("a"), "-br link show %s", device), ",UP")
	require.NoError(t, h.links.Remove(t.Context(), "gone"))
	require.NotContains(t, l.IP(h.inside("a"), "-br link"), device)
	require.NoError(t, h.devices.Remove(t.Context(), "gone"))
	require.NoError(t, h.links.Remove(t.Context(), "gone"), "a VPC without a namespace")
	require.NoFileExists(t, h.devices.Path("gone"))
	_, err := h.links.Set(t.Context(), gone)
	require.ErrorIs(t, err, os.ErrNotExist)
}
