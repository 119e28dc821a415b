package edge

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestMove requires that a floating IP whose port moved to another host is announced there, and that a neighbour which
// knew the former host reaches the new one.
func TestMove(t *testing.T) {
	l := newLab(t, 2)
	var vpcs []*cloud.HostVPC
	for _, h := range l.hosts {
		vpcs = append(vpcs, h.addVPC("a", 10))
		h.apply()
	}
	address := floating("203.0.113.110", "10.0.1.10")
	vpcs[0].Floating = []cloud.HostFloating{address}
	require.Equal(t, []netip.Addr{address.Address}, l.hosts[0].apply().Announced)
	l.requireDial("internet", "203.0.113.110:7000", "203.0.113.1")
	neighbour := func() string {
		return regexp.MustCompile(`lladdr (\S+)`).FindString(l.IP("internet", "neighbour show 203.0.113.110"))
	}
	former := neighbour()
	require.NotEmpty(t, former)

	operations := l.sniffARP(address.Address)
	vpcs[0].Floating, vpcs[1].Floating = nil, vpcs[0].Floating
	require.Empty(t, l.hosts[0].apply().Announced)
	require.Equal(t, []netip.Addr{address.Address}, l.hosts[1].apply().Announced)
	require.Equal(t, uint16(1), <-operations)
	require.Equal(t, uint16(2), <-operations)
	require.Eventually(t, func() bool { return neighbour() != former }, patience, 10*time.Millisecond,
		"the neighbour still knows the former host")
	l.requireDial("internet", "203.0.113.110:7000", "203.0.113.1")
	l.requireDial(l.hosts[1].guest(vpcs[1], "p10"), outside, "203.0.113.110")

	// Between the hosts.
	vpcs[0].Floating = []cloud.HostFloating{floating("203.0.113.111", "10.0.1.10")}
	l.hosts[0].apply()
	l.requireDial(l.hosts[0].guest(vpcs[0], "p10"), "203.0.113.110:7000", "203.0.113.111")
	l.requireDial(l.hosts[1].guest(vpcs[1], "p10"), "203.0.113.111:7000", "203.0.113.110")
}

// sniffARP returns the operations of the gratuitous ARP packets for an address that arrive in the namespace internet.
func (l *lab) sniffARP(address netip.Addr) <-chan uint16 {
	l.t.Helper()
	fd := -1
	protocol := uint16(unix.ETH_P_ARP)>>8 | uint16(unix.ETH_P_ARP&0xff)<<8
	require.NoError(l.t, l.In("internet", func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(protocol))
		if err != nil {
			return err
		}
		device, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: device.Index})
	}))
	file := os.NewFile(uintptr(fd), "sniffer")
	require.NoError(l.t, file.SetReadDeadline(time.Now().Add(patience)))
	l.t.Cleanup(func() { file.Close() })
	operations := make(chan uint16, 100)
	go func() {
		defer close(operations)
		for frame := make([]byte, 1500); ; {
			n, err := file.Read(frame)
			if err != nil {
				return
			}
			ip := address.AsSlice()
			if n >= 42 && slices.Equal(frame[28:32], ip) && slices.Equal(frame[38:42], ip) {
				operations <- uint16(frame[20])<<8 | uint16(frame[21])
			}
		}
	}()
	return operations
}

// fullLab returns a lab whose host has two VPCs with everything.
func fullLab(t *testing.T) (*lab, *labHost) {
	l := newLab(t, 1)
	h := l.hosts[0]
	a, b := h.addVPC("a", 10, 11), h.addVPC("b", 10)
	a.NAT = &cloud.HostNAT{External: internet}
	a.Floating = []cloud.HostFloating{floating("203.0.113.110", "10.0.1.10")}
	b.Floating = []cloud.HostFloating{floating("203.0.113.120", "10.0.1.10")}
	require.NotEmpty(t, h.apply().Changes)
	return l, h
}

func (h *labHost) requireTraffic() {
	h.lab.t.Helper()
	a, b := h.vpcs[0], h.vpcs[1]
	h.lab.requireDial(h.guest(a, "p10"), outside, "203.0.113.110")
	h.lab.requireDial(h.guest(a, "p11"), outside, "203.0.113.2")
	h.lab.requireDial(h.guest(b, "p10"), outside, "203.0.113.120")
	h.lab.requireDial("internet", "203.0.113.110:7000", "203.0.113.1")
	h.lab.requireDial("internet", "203.0.113.120:7000", "203.0.113.1")
}

// TestRestart requires that an unchanged state writes nothing, in any order and after a restart, and keeps connections.
func TestRestart(t *testing.T) {
	l, h := fullLab(t)
	c := l.requireDial("internet", "203.0.113.110:7000", "203.0.113.1")
	nat := l.requireDial(h.guest(h.vpcs[0], "p11"), outside, "203.0.113.2")
	require.Empty(t, h.apply())
	h.restart()
	require.Empty(t, h.apply())
	slices.Reverse(h.vpcs)
	h.restart()
	require.Empty(t, h.apply())
	require.NoError(t, c.echo(patience))
	require.NoError(t, nat.echo(patience))

	// A further VPC changes nothing of the others.
	slices.Reverse(h.vpcs)
	d := h.addVPC("d", 10)
	d.Floating = []cloud.HostFloating{floating("203.0.113.130", "10.0.1.10")}
	require.Equal(t, []netip.Addr{parseAddr("203.0.113.130")}, h.apply().Announced)
	l.requireDial("internet", "203.0.113.130:7000", "203.0.113.1")
	require.NoError(t, c.echo(patience))
	require.NoError(t, nat.echo(patience))
}

// TestDrift requires that changes by hand are undone by the next Set, and by it alone.
func TestDrift(t *testing.T) {
	l, h := fullLab(t)
	edge, a := h.edgeName(), h.inside(h.vpcs[0])
	x, err := checkExternals(h.options.External)
	require.NoError(t, err)
	ip := func(space, format string, args ...any) func() { return func() { l.IP(space, format, args...) } }
	nft := func(space, command string) func() {
		return func() { l.nft(space, command) }
	}
	var link string
	for _, line := range strings.Split(l.IP(edge, "-o link"), "\n") {
		if strings.Contains(line, aliasPrefix+h.devices.Path("a")) {
			link = strings.Split(strings.Fields(line)[1], "@")[0]
		}
	}
	require.Regexp(t, linkName, link)
	for _, test := range []struct {
		name   string
		damage func()
	}{
		{"macvlan deleted", ip(edge, "link delete %s", x[0].device)},
		{"macvlan down", ip(edge, "link set %s down", x[0].device)},
		{"host's address deleted", ip(edge, "address delete 203.0.113.2/24 dev %s", x[0].device)},
		{"further address", ip(edge, "address add 203.0.113.77/32 dev %s", x[0].device)},
		{"default route deleted", ip(edge, "route delete default table 1000")},
		{"route to a VPC deleted", ip(edge, "route delete 203.0.113.110")},
		{"route to a VPC changed", ip(edge, "route replace blackhole 203.0.113.110")},
		{"rule deleted", ip(edge, "rule delete priority 33000")},
		{"proxy entry deleted", ip(edge, "neighbour delete proxy 203.0.113.110 dev %s", x[0].device)},
		{"further proxy entry", ip(edge, "neighbour add proxy 203.0.113.78 dev %s", x[0].device)},
		{"veth pair deleted", ip(edge, "link delete %s", link)},
		{"veth pair down", ip(a, "link set edge0 down")},
		{"rules deleted", nft(edge, "delete table ip trivet-edge")},
		{"rules emptied", nft(edge, "flush chain ip trivet-edge forward")},
		{"further rule", nft(edge, "insert rule ip trivet-edge forward accept")},
		{"further chain", nft(edge, "add chain ip trivet-edge other")},
		{"rules of a VPC deleted", nft(a, "delete table ip trivet-edge")},
		{"rules of a VPC emptied", nft(a, "flush chain ip trivet-edge destination")},
		{"table of a VPC emptied", ip(a, "route flush table 90000000")},
		{"rule of a VPC deleted", ip(a, "rule delete priority 34000")},
		{"forwarding off", func() {
			require.NoError(t, l.In(edge, func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0) }))
		}},
		{"edge namespace deleted", func() { l.Run("ip", "netns", "delete", l.Prefix+edge) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			l.t = t
			before := h.dump()
			test.damage()
			require.NotEmpty(t, h.repair())
			require.Empty(t, h.apply().Changes)
			require.Equal(t, before, h.dump())
			h.requireTraffic()
		})
	}
	l.t = t
}

var volatile = regexp.MustCompile(`(?m)^\d+: |@if\d+`)

// dump returns the kernel's state in the edge namespace and in those of VPCs, without what changes by itself.
func (h *labHost) dump() string {
	h.lab.t.Helper()
	var b strings.Builder
	for _, name := range []string{h.edgeName(), h.inside(h.vpcs[0]), h.inside(h.vpcs[1])} {
		for _, command := range []string{"-4 -o address", "-4 rule", "neighbour show proxy"} {
			lines := strings.Split(h.lab.IP(name, "%s", command), "\n")
			for i := range lines {
				lines[i] = volatile.ReplaceAllString(lines[i], "")
			}
			slices.Sort(lines)
			b.WriteString(strings.Join(lines, "\n") + "\n")
		}
		routes := strings.Split(h.lab.IP(name, "-4 route show table all"), "\n")
		slices.Sort(routes)
		b.WriteString(strings.Join(routes, "\n") + "\n")
		b.WriteString(h.lab.nft(name, "list table "+table.String()))
	}
	return b.String()
}

// TestRemove requires that Remove leaves nothing in the VPCs' namespaces and the host's, and that the host's own
// network never changed.
func TestRemove(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	a, b := h.addVPC("a", 10), h.addVPC("b", 10)
	hostLinks, hostRoutes := l.IP(h.name, "-o link"), l.IP(h.name, "route show table all")
	namespaces := func() string {
		list, err := filepath.Glob(l.Path("*"))
		require.NoError(t, err)
		return strings.Join(list, "\n")
	}
	space := func(vpc *cloud.HostVPC) string {
		name := h.inside(vpc)
		return fmt.Sprint(l.IP(name, "-o link"), l.IP(name, "-4 rule"), l.IP(name, "-4 route show table all"),
			l.nft(name, "list tables"))
	}
	beforeNames, beforeA, beforeB := namespaces(), space(a), space(b)
	a.NAT = &cloud.HostNAT{External: internet}
	b.Floating = []cloud.HostFloating{floating("203.0.113.120", "10.0.1.10")}
	h.apply()
	c := l.requireDial("internet", "203.0.113.120:7000", "203.0.113.1")
	require.Equal(t, hostLinks, l.IP(h.name, "-o link"))
	require.Equal(t, hostRoutes, l.IP(h.name, "route show table all"))
	ids, err := h.devices.List()
	require.NoError(t, err)
	require.Equal(t, []cloud.VPCID{"a", "b"}, ids, "the edge is listed as a VPC")

	require.NoError(t, h.edge.Remove(t.Context()))
	require.NoError(t, h.edge.Remove(t.Context()))
	require.Error(t, c.echo(blocked))
	require.Equal(t, beforeNames, namespaces())
	require.Equal(t, beforeA, space(a))
	require.Equal(t, beforeB, space(b))
	require.Equal(t, hostLinks, l.IP(h.name, "-o link"))

	// A VPC whose namespace was removed, and one that is no longer in the state.
	h.apply()
	require.NoError(t, h.devices.Remove(t.Context(), "a"))
	h.vpcs = nil
	_, err = h.edge.Set(t.Context(), State{})
	require.NoError(t, err)
	require.Equal(t, beforeB, space(b))
	require.NotRegexp(t, `\bv\d+`, l.IP(h.edgeName(), "-o link"))
}

// TestInvalidVPC requires that a VPC with an invalid state or without namespace does not prevent the others.
func TestInvalidVPC(t *testing.T) {
	_, h := fullLab(t)
	s := h.state()
	for message, v := range map[string]VPC{
		"open network namespace": {ID: "d", Namespace: "/run/netns/absent", NAT: &cloud.HostNAT{External: internet}},
		"the host is not connected to the external network office": {
			ID: "d", Namespace: "/x", NAT: &cloud.HostNAT{External: "office"}},
		"203.0.113.120 belongs to b already": {
			ID: "d", Namespace: "/x", Floating: []cloud.HostFloating{floating("203.0.113.120", "10.0.1.10")}},
		"203.0.113.1 belongs to the gateway": {
			ID: "d", Namespace: "/x", Floating: []cloud.HostFloating{floating("203.0.113.1", "10.0.1.10")}},
		"192.0.2.1 is not an address of the external network": {
			ID: "d", Namespace: "/x", Floating: []cloud.HostFloating{floating("192.0.2.1", "10.0.1.10")}},
		"NAT gateway g has no transit device": {
			ID: "d", Namespace: "/x", Gateways: []Gateway{{ID: "g", HostNAT: cloud.HostNAT{External: internet}}}},
		"floating IP g has the mark 0x1 and the address": {ID: "d", Namespace: "/x", Gateways: []Gateway{{
			ID: "g", HostNAT: cloud.HostNAT{External: internet}, Transit: "vt1", Mark: 1}}},
		"VPC a has the same namespace": {ID: "d", Namespace: s.VPCs[0].Namespace},
		"the VPC occurs twice":         {ID: "b", Namespace: "/x"},
	} {
		r, err := h.edge.Set(t.Context(), State{VPCs: append(slices.Clone(s.VPCs), v)})
		require.ErrorContains(t, err, message)
		require.Empty(t, r.Changes)
	}
	h.requireTraffic()
}

func TestOptionsAreChecked(t *testing.T) {
	valid := External{Interface: "eth1", Address: parsePrefix("203.0.113.2/24")}
	change := func(f func(*External)) Options {
		x := valid
		f(&x)
		return Options{External: map[string]External{internet: x}}
	}
	for message, o := range map[string]Options{
		"interface is required":            change(func(x *External) { x.Interface = "" }),
		"address must be the host's IPv4":  change(func(x *External) { x.Address = netip.Prefix{} }),
		"is no other address":              change(func(x *External) { x.Gateway = parseAddr("192.0.2.1") }),
		"not the start of a file name":     {Prefix: "a/b"},
		"open namespace /run/netns/absent": {Namespace: "/run/netns/absent"},
	} {
		_, err := New(o)
		require.ErrorContains(t, err, message)
	}
}

// TestLoopback requires that an interface that cannot have macvlan devices is refused with a reason.
func TestLoopback(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	h.options.External["other"] = External{Interface: "lo", Address: parsePrefix("192.0.2.2/24")}
	h.restart()
	a := h.addVPC("a", 10)
	a.NAT = &cloud.HostNAT{External: internet}
	_, err := h.edge.Set(t.Context(), h.state())
	require.ErrorContains(t, err, "neither the loopback device nor a bridge port can have one")
	l.requireDial(h.guest(a, "p10"), outside, "203.0.113.2") // the other network works
}

func TestMissingFeatures(t *testing.T) {
	newLab(t, 0) // requires root
	require.Empty(t, MissingFeatures(t.Context()))
}

func TestNumbers(t *testing.T) {
	used := map[int]bool{}
	for range 1000 {
		n, err := numberOf("a", used) // all have the same hash
		require.NoError(t, err)
		require.False(t, used[n])
		used[n] = true
		near, far := addressesOf(n)
		require.True(t, linkPrefix.Contains(near) && linkPrefix.Contains(far))
		require.Equal(t, netip.PrefixFrom(near, 31), netip.PrefixFrom(far, 31).Masked())
		require.NotContains(t, []byte{0, 169, 255}, near.As4()[2])
	}
}
