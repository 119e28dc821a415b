package netdev

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

func TestUnchangedInputWritesNothing(t *testing.T) {
	l := newLab(t, 2)
	vpcs := testVPC(l, "a", 100, place{1, 10, 0}, place{1, 20, 1}, place{2, 40, 1})
	subnet := &vpcs[0].Subnets[0]
	subnet.Ports[0].Secured = false // which has other flags
	subnet.Ports[0].Mbps = 100
	subnet.Remotes[0].Pairs = []cloud.AddressPair{
		{CIDR: netip.MustParsePrefix("10.0.1.99/32"), MAC: cloud.MAC{2, 9, 0, 0, 0, 1}},
	}
	subnet.Routes = []cloud.HostRoute{
		portRoute("0.0.0.0/0", 1, 20), blackhole("192.168.0.0/16"), portRoute("::/0", 1, 20), blackhole("2001:db8::/32"),
	}
	for i, h := range l.hosts {
		require.NotEmpty(t, h.apply(vpcs[i]))
		require.Empty(t, h.apply(vpcs[i]))
	}
	requireReach(l, "a", place{1, 10, 0}, place{2, 40, 1})
	// Entries that the kernel made for traffic are no differences either.
	require.Empty(t, l.hosts[0].apply(vpcs[0]))

	// Neither are they for an agent that has just started.
	before := l.dump(l.hosts[0].vpcName("a"))
	l.hosts[0].open(Options{VTEP: l.hosts[0].vtep, Device: "eth0"})
	require.Empty(t, l.hosts[0].apply(vpcs[0]))
	l.requireSame(func() string { return before }, func() string { return l.dump(l.hosts[0].vpcName("a")) })
}

// TestDriftOfDevices changes one thing by hand and requires that the next Prepare and Activate repair it and change nothing
// else.
func TestDriftOfDevices(t *testing.T) {
	l := newLab(t, 2)
	h := l.hosts[0]
	local, remote, routed := place{1, 10, 0}, place{1, 20, 1}, place{2, 40, 1}
	vpcs := testVPC(l, "a", 100, local, remote, routed)
	for i, h := range l.hosts {
		h.apply(vpcs[i])
	}
	name := h.vpcName("a")
	requireReach(l, "a", local, remote)
	before := l.dump(name)
	sysctl := func(path, value string) func() {
		return func() {
			require.NoError(t, l.in(name, func() error { return os.WriteFile(filepath.Join(procSys, path), []byte(value), 0) }))
		}
	}
	ip := func(command string) func() { return func() { l.ip(name, "%s", command) } }
	bridge := func(command string) func() { return func() { l.bridge(name, "%s", command) } }
	for _, test := range []struct {
		name   string
		damage func()
		repair []string // nil: not compared
	}{
		{"sysctl of the namespace", sysctl("net/ipv4/conf/all/arp_announce", "0"), []string{
			"sysctl -w net/ipv4/conf/all/arp_announce=2",
		}},
		{"sysctl of a bridge", sysctl("net/ipv4/conf/br101/send_redirects", "1"), []string{
			"sysctl -w net/ipv4/conf/br101/send_redirects=0",
		}},
		{"sysctl of a port", sysctl("net/ipv6/conf/port1-10/disable_ipv6", "0"), []string{
			"sysctl -w net/ipv6/conf/port1-10/disable_ipv6=1",
		}},
		{"forwarding", sysctl("net/ipv4/ip_forward", "0"), nil},
		{"IPv6 forwarding", sysctl("net/ipv6/conf/all/forwarding", "0"), nil},
		{"IPv6 of a bridge", sysctl("net/ipv6/conf/br101/disable_ipv6", "1"), nil},
		{"bridge down", ip("link set br101 down"), nil},
		{"VXLAN device down", ip("link set vx101 down"), []string{"ip link set vx101 up"}},
		{"port down", ip("link set port1-10 down"), []string{"ip link set port1-10 up"}},
		{"loopback device down", ip("link set lo down"), []string{"ip link set lo up"}},
		{"bridge deleted", ip("link delete br101"), nil},
		{"VXLAN device deleted", ip("link delete vx101"), nil},
		{"bridge of another subnet deleted", ip("link delete br102"), nil},
		{"MTU", ip("link set vx101 mtu 1300"), nil},
		{"MAC address of a bridge", ip("link set br101 address 02:00:00:00:00:99"), nil},
		{"multicast snooping", ip("link set br101 type bridge mcast_snooping 1"), []string{
			"ip link set br101 type bridge mcast_snooping 0",
		}},
		{"port without bridge", ip("link set port1-10 nomaster"), nil},
		{"port at another bridge", ip("link set port1-10 master br102"), nil},
		{"VXLAN device at another bridge", ip("link set vx101 master br102"), nil},
		{"alias", ip("link set port1-10 alias someone"), nil},
		{"address deleted", ip("address delete 10.0.1.1/24 dev br101"), nil},
		{"IPv6 address deleted", ip("address delete fd00:0:0:1::1/64 dev br101"), []string{
			"ip address add fd00:0:0:1::1/64 dev br101 nodad",
		}},
		{"further address", ip("address add 10.0.1.2/24 dev br101"), []string{"ip address delete 10.0.1.2/24 dev br101"}},
		{"route deleted", ip("route delete 10.0.2.0/24"), []string{
			"ip route replace 10.0.2.0/24 dev br102 proto kernel src 10.0.2.1",
		}},
		{"IPv6 route deleted", ip("route delete fd00:0:0:2::/64"), nil},
		{"neighbour deleted", ip("neighbour delete 10.0.1.20 dev br101"), []string{
			"ip neighbour replace 10.0.1.20 lladdr 02:00:00:00:01:14 dev br101 nud permanent",
		}},
		{"neighbour changed", ip("neighbour replace 10.0.1.20 lladdr 02:00:00:00:00:99 dev br101"), nil},
		{"neighbour learned", ip("neighbour replace 10.0.1.20 lladdr 02:00:00:00:01:14 dev br101 nud reachable"), nil},
		{"further neighbour", ip("neighbour add 10.0.1.99 lladdr 02:00:00:00:00:99 dev br101"), []string{
			"ip neighbour delete 10.0.1.99 dev br101",
		}},
		{"FDB entry deleted", bridge("fdb delete 02:00:00:00:01:14 dev vx101 self"), []string{
			"bridge fdb replace 02:00:00:00:01:14 dev vx101 dst 192.0.2.2 self static sticky",
		}},
		{"FDB entry of the bridge deleted", bridge("fdb delete 02:00:00:00:01:14 dev vx101 master"), []string{
			"bridge fdb replace 02:00:00:00:01:14 dev vx101 master static sticky",
		}},
		{"FDB entry of a port deleted", bridge("fdb delete 02:00:00:00:01:0a dev port1-10 master"), nil},
		{"FDB entry changed", bridge("fdb replace 02:00:00:00:01:14 dev vx101 dst 192.0.2.99 self static"), nil},
		{"FDB entry at another port", bridge("fdb replace 02:00:00:00:01:0a dev vx101 master static"), nil},
		{"FDB entry with two hosts", bridge("fdb append 00:00:00:00:00:00 dev vx101 dst 192.0.2.2 self permanent"), []string{
			"bridge fdb delete 00:00:00:00:00:00 dev vx101 self",
		}},
		{"further FDB entry", bridge("fdb add 02:00:00:00:00:99 dev vx101 dst 192.0.2.2 self permanent"), []string{
			"bridge fdb delete 02:00:00:00:00:99 dev vx101 self",
		}},
		{"flooding", bridge("link set dev vx101 flood on bcast_flood on mcast_flood on"), []string{
			"bridge link set dev vx101 learning off flood off mcast_flood off bcast_flood off neigh_suppress on hairpin off",
		}},
		{"ARP suppression", bridge("link set dev vx101 neigh_suppress off"), nil},
		{"learning", bridge("link set dev port1-10 learning on"), nil},
		{"further device at a bridge", func() {
			l.ip(name, "link add other type veth peer name other2")
			l.ip(name, "link set other master br101")
		}, []string{"ip link delete other"}},
		{"namespace deleted", func() { require.NoError(t, netns.DeleteNamed(h.Host.Namespace("a"))) }, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			l.t = t
			test.damage()
			h.requireRepair(vpcs[0], test.repair, before)
			requireReach(l, "a", local, remote)
			requireReach(l, "a", local, routed)
		})
	}
}

// requireRepair requires that applying the state once makes changes (the given ones, unless repair is nil), after which
// the namespace has the dump want, and that applying it again makes none.
func (h *labHost) requireRepair(vpc cloud.HostVPC, repair []string, want string) {
	t := h.lab.t
	t.Helper()
	changes := h.apply(vpc)
	require.NotEmpty(t, changes)
	if repair != nil {
		require.Equal(t, repair, texts(changes))
	}
	require.Empty(t, h.apply(vpc))
	name := h.vpcName(vpc.ID)
	h.lab.requireSame(func() string { return want }, func() string { return h.lab.dump(name) })
}

func texts(changes []Change) []string {
	var all []string
	for _, c := range changes {
		all = append(all, c.String())
	}
	return all
}

// TestManyRemotes requires that lists of several netlink messages are read completely.
func TestManyRemotes(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0})[0]
	vpc.Subnets[0].CIDR = netip.MustParsePrefix("10.0.0.0/16")
	vpc.Subnets = vpc.Subnets[:1]
	const count = 3000
	for i := range count {
		high, low := byte(i>>8), byte(i)
		vpc.Subnets[0].Remotes = append(vpc.Subnets[0].Remotes, cloud.RemotePort{
			MAC: cloud.MAC{2, 1, 0, 0, high, low}, IP: netip.AddrFrom4([4]byte{10, 0, 100 + high, low}),
			IP6:  netip.AddrFrom16([16]byte{0: 0xfd, 7: 1, 14: 100 + high, 15: low}),
			VTEP: netip.AddrFrom4([4]byte{192, 0, 2, 2 + low%8}),
		})
	}
	require.Greater(t, len(h.apply(vpc)), 3*count)
	require.Empty(t, h.apply(vpc))
	vpc.Subnets[0].Remotes = vpc.Subnets[0].Remotes[1:]
	require.Len(t, h.apply(vpc), 4) // two FDB entries and two neighbours
	require.Empty(t, h.apply(vpc))
}

// TestRemoteMoves requires that the entry of a port that moves between hosts is changed in place: at no time does the
// MAC address have no entry.
func TestRemoteMoves(t *testing.T) {
	l := newLab(t, 3)
	watcher, mover := place{1, 10, 0}, place{1, 20, 1}
	for i, vpc := range testVPC(l, "a", 100, watcher, mover) {
		l.hosts[i].apply(vpc)
	}
	requireReach(l, "a", watcher, mover)
	requireKept := l.watchFDB(l.hosts[0].vpcName("a"), "vx101", cloud.MAC{2, 0, 0, 0, 1, 20})

	mover.host = 2
	vpcs := testVPC(l, "a", 100, watcher, mover)
	changes := l.hosts[0].apply(vpcs[0])
	require.Equal(t, []string{
		"bridge fdb replace 02:00:00:00:01:14 dev vx101 dst 192.0.2.3 self static sticky",
	}, texts(changes))
	requireKept()
	l.hosts[1].apply(vpcs[1])
	l.hosts[2].apply(vpcs[2])
	requireReach(l, "a", watcher, mover)

	// To this host: while the VM is in both lists, its frames go to the other host.
	mover.host = 0
	both := testVPC(l, "a", 100, watcher, mover)[0]
	both.Subnets[0].Remotes = vpcs[0].Subnets[0].Remotes
	changes = l.hosts[0].apply(both)
	require.NotContains(t, fmt.Sprint(texts(changes)), "fdb")
	require.Contains(t, l.bridge(l.hosts[0].vpcName("a"), "fdb show"),
		"02:00:00:00:01:14 dev vx101 sticky master br101 static")
	changes = l.hosts[0].apply(testVPC(l, "a", 100, watcher, mover)[0])
	require.Equal(t, []string{
		"bridge fdb replace 02:00:00:00:01:14 dev port1-20 master static sticky",
		"bridge fdb delete 02:00:00:00:01:14 dev vx101 self",
	}, texts(changes))
	requireReach(l, "a", watcher, mover)
}

// watchFDB watches the FDB entries of a MAC address. The function that it returns requires that the kernel has deleted
// none of them since.
func (l *lab) watchFDB(name, device string, mac cloud.MAC) (requireKept func()) {
	l.t.Helper()
	ns, err := netns.GetFromPath(l.path(name))
	require.NoError(l.t, err)
	defer ns.Close()
	events, done := make(chan netlink.NeighUpdate, 100), make(chan struct{})
	require.NoError(l.t, netlink.NeighSubscribeAt(ns, events, done))
	l.t.Cleanup(func() { close(done) })
	return func() {
		l.t.Helper()
		// Events are in order, so the deletion of another entry marks the end.
		l.bridge(name, "fdb add 02:00:00:00:00:99 dev %s dst 192.0.2.99 self permanent", device)
		l.bridge(name, "fdb delete 02:00:00:00:00:99 dev %s self", device)
		replaced := false
		for {
			select {
			case e := <-events:
				deleted := e.Type == unix.RTM_DELNEIGH
				if deleted && e.HardwareAddr.String() == "02:00:00:00:00:99" {
					require.True(l.t, replaced, "no event of the entry")
					return
				}
				if e.HardwareAddr.String() == mac.String() {
					require.False(l.t, deleted, "the entry was deleted: %v", e)
					replaced = true
				}
			case <-time.After(10 * time.Second):
				l.t.Fatal("no event after 10 seconds")
			}
		}
	}
}

// TestNamespaceFile requires that the file of an interrupted creation is no obstacle.
func TestNamespaceFile(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	require.NoError(t, os.WriteFile(h.Path("a"), nil, 0o444))
	require.NoError(t, os.WriteFile(h.Path("b"), nil, 0o444))
	list, err := h.List()
	require.NoError(t, err)
	require.Equal(t, []cloud.VPCID{"a", "b"}, list)
	h.apply(testVPC(l, "a", 100, place{1, 10, 0})[0])
	require.NoError(t, h.Remove(t.Context(), "b"))
	list, err = h.List()
	require.NoError(t, err)
	require.Equal(t, []cloud.VPCID{"a"}, list)
}

func TestRemoveDevices(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0}, place{2, 20, 0})[0]
	other := testVPC(l, "b", 200, place{1, 10, 0})[0]
	before := l.ip(h.name, "link")
	for range 3 {
		h.apply(vpc)
		h.apply(other)
		require.NoError(t, h.Remove(t.Context(), "a"))
		require.NoError(t, h.Remove(t.Context(), "a"), "again")
		list, err := h.List()
		require.NoError(t, err)
		require.Equal(t, []cloud.VPCID{"b"}, list)
		require.NoFileExists(t, h.Path("a"))
		// The other end of each veth pair is gone too.
		require.NotContains(t, l.ip(h.endpoint("a", "p1-10"), "link"), "eth0")
		require.Empty(t, h.apply(other))
	}
	require.NoError(t, h.Remove(t.Context(), "b"))

	// A socket keeps the namespace in existence, but not the devices, so that their VNIs can be used again.
	h.apply(vpc)
	require.NoError(t, l.in(h.vpcName("a"), func() error { return serveText(t, "") }))
	require.NoError(t, h.Remove(t.Context(), "a"))
	h.apply(vpc)
	require.NoError(t, h.Remove(t.Context(), "a"))

	require.Equal(t, before, l.ip(h.name, "link"))
	// The socket of VXLAN is closed with the last device.
	require.Eventually(t, func() bool {
		var sockets []byte
		require.NoError(t, l.in(h.name, func() (err error) {
			sockets, err = os.ReadFile("/proc/thread-self/net/udp")
			return err
		}))
		return !containsPort(string(sockets), 4789)
	}, 10*time.Second, 10*time.Millisecond)
}
