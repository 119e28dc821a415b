package dhcp

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// udhcpcScript is the shell script that udhcpc runs at each event. The script writes the event and the options to a file
// and sets the address.
const udhcpcScript = `#!/bin/sh
case "$1" in
bound|renew) busybox ip addr replace "$ip/$mask" dev eth0; busybox ip route replace default via "$router" ;;
deconfig) busybox ip addr flush dev eth0 scope global ;;
esac
{ echo "event=$1"; env; } > "%[1]s/new"
mv "%[1]s/new" "%[1]s/$1"
`

// event waits for an event of udhcpc and returns the named options of it.
func event(t *testing.T, dir, name string, options ...string) map[string]string {
	file := filepath.Join(dir, name)
	require.Eventually(t, func() bool { _, err := os.Stat(file); return err == nil }, patience, poll, "event %s", name)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, os.Remove(file))
	found := map[string]string{}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		for _, o := range options {
			if o == key {
				found[key] = value
			}
		}
	}
	return found
}

// TestUdhcpc obtains and renews an address with udhcpc, with and without the broadcast flag, and changes the address of
// the port meanwhile.
func TestUdhcpc(t *testing.T) {
	for _, flags := range [][]string{nil, {"-B"}} {
		t.Run(strings.Join(flags, ""), func(t *testing.T) {
			s := testSubnet()
			v := newVPC(t)
			v.addBridge(t, "br0", s)
			g := v.addGuest(t, "br0", "web", macWeb)
			r := serveSubnet(t, v.name, "br0", s)

			dir := t.TempDir()
			script := filepath.Join(dir, "script")
			require.NoError(t, os.WriteFile(script, fmt.Appendf(nil, udhcpcScript, dir), 0o755))
			args := append([]string{"udhcpc", "-f", "-i", "eth0", "-s", script, "-T", "1", "-A", "1", "-O", "mtu", "-O", "staticroutes"}, flags...)
			client := exec.Command("busybox", args...)
			require.NoError(t, nsthread.InNamed(g.name, client.Start))
			ended := make(chan struct{})
			go func() { client.Wait(); close(ended) }()
			t.Cleanup(func() { client.Process.Kill(); <-ended })

			require.Equal(t, map[string]string{
				"ip": "10.0.16.17", "mask": "20", "subnet": "255.255.240.0", "router": "10.0.16.1", "dns": "10.0.16.1",
				"hostname": "web", "domain": "shop.internal", "mtu": "1450", "lease": "3600", "serverid": "10.0.16.1",
				"staticroutes": "169.254.169.254/32 10.0.16.1 0.0.0.0/0 10.0.16.1",
			}, event(t, dir, "bound", "ip", "mask", "subnet", "router", "dns", "hostname", "domain", "mtu", "lease", "serverid", "staticroutes"))
			require.Contains(t, g.addresses(t), "10.0.16.17/20")
			g.ping(t, "10.0.16.1")

			require.NoError(t, client.Process.Signal(syscall.SIGUSR1))
			require.Equal(t, map[string]string{"ip": "10.0.16.17"}, event(t, dir, "renew", "ip"), "unicast renewal")

			s.Ports = append([]cloud.HostPort(nil), s.Ports...)
			s.Ports[0].IP = netip.MustParseAddr("10.0.16.30")
			require.NoError(t, r.Set(s))
			require.NoError(t, client.Process.Signal(syscall.SIGUSR1))
			event(t, dir, "nak")
			require.Equal(t, map[string]string{"ip": "10.0.16.30"}, event(t, dir, "bound", "ip"), "after NAK")
			g.ping(t, "10.0.16.1")
		})
	}
}

func TestOtherClient(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s := testSubnet()
	v := newVPC(t)
	v.addBridge(t, "br0", s)
	web, plain := client4(t, v.addGuest(t, "br0", "web", macWeb)), client4(t, v.addGuest(t, "br0", "plain", macNoIP6))
	r := serveSubnet(t, v.name, "br0", s)

	lease, err := web.Request(ctx)
	require.NoError(t, err)
	require.Equal(t, "10.0.16.17", lease.ACK.YourIPAddr.String())
	lease, err = plain.Request(ctx)
	require.NoError(t, err)
	require.Equal(t, "10.0.16.18", lease.ACK.YourIPAddr.String())
	lease, err = plain.Renew(ctx, lease)
	require.NoError(t, err)
	require.Equal(t, dhcpv4.MessageTypeAck, lease.ACK.MessageType())

	inform, err := dhcpv4.NewInform(macNoIP6[:], net.IPv4(10, 0, 16, 18))
	require.NoError(t, err)
	reply, err := plain.SendAndRead(ctx, &net.UDPAddr{IP: net.IPv4bcast, Port: 67}, inform, nil)
	require.NoError(t, err)
	require.True(t, reply.YourIPAddr.IsUnspecified())

	s.Ports = s.Ports[:1]
	require.NoError(t, r.Set(s))
	silent, err := dhcpv4.NewDiscovery(macNoIP6[:])
	require.NoError(t, err)
	short, cancelShort := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancelShort()
	_, err = plain.SendAndRead(short, &net.UDPAddr{IP: net.IPv4bcast, Port: 67}, silent, nil)
	require.Error(t, err, "a port that was removed is not answered")
	_, err = web.Request(ctx)
	require.NoError(t, err, "the other port is")
}

// TestIPv6 checks that a guest learns its default route and MTU from router advertisements, configures no address by
// itself, and gets the port's address by DHCPv6.
func TestIPv6(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s := testSubnet()
	v := newVPC(t)
	v.addBridge(t, "br0", s)
	r := serveSubnet(t, v.name, "br0", s)
	g := v.addGuest(t, "br0", "web", macWeb) // solicits a router when its interface is set up

	require.Eventually(t, func() bool {
		routes, err := g.h.RouteList(g.eth0, netlink.FAMILY_V6)
		require.NoError(t, err)
		var found []string
		for _, route := range routes {
			if route.Protocol == unix.RTPROT_RA || route.Dst != nil && route.Dst.IP.IsPrivate() {
				found = append(found, fmt.Sprintf("%v via %v", route.Dst, route.Gw))
			}
		}
		text := strings.Join(found, ", ")
		return strings.Contains(text, "::/0 via fe80::ff:ff:fe00:1") && strings.Contains(text, "fd00:1:2:3::/64 via <nil>")
	}, patience, poll, "routes by router advertisement")
	require.Equal(t, "1450", readSysctl(t, g.name, "ipv6/conf/eth0/mtu"))
	require.Empty(t, g.addresses(t), "no autonomous configuration")

	s.MTU = 1400
	require.NoError(t, r.Set(s))
	require.Eventually(t, func() bool { return readSysctl(t, g.name, "ipv6/conf/eth0/mtu") == "1400" }, patience, poll,
		"a change is advertised at once")

	c := client6(t, g)
	advertise, err := c.Solicit(ctx)
	require.NoError(t, err)
	reply, err := c.Request(ctx, advertise)
	require.NoError(t, err)
	require.Equal(t, "fd00:1:2:3::a:11", reply.Options.OneIANA().Options.OneAddress().IPv6Addr.String())
	require.Equal(t, "fd00:1:2:3::1", reply.Options.DNS()[0].String())

	rapid, err := c.RapidSolicit(ctx)
	require.NoError(t, err)
	require.Equal(t, dhcpv6.MessageTypeReply, rapid.MessageType)

	addAddress(t, g.h, g.eth0, "fd00:1:2:3::a:11/128")
	g.ping(t, "fd00:1:2:3::1")
}

// TestSnoopingBridge checks DHCPv6 on a bridge that passes multicast only to members of a group, as it does when there
// is a querier. The bridge lists the host as a member.
func TestSnoopingBridge(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s := testSubnet()
	v := newVPC(t)
	v.addBridge(t, "br0", s)
	v.run(t, "ip", "link", "set", "br0", "type", "bridge", "mcast_snooping", "1", "mcast_query_response_interval", "1")
	v.run(t, "ip", "link", "set", "br0", "type", "bridge", "mcast_querier", "1")
	c := client6(t, v.addGuest(t, "br0", "web", macWeb))
	serveSubnet(t, v.name, "br0", s)
	require.Eventually(t, func() bool {
		return strings.Contains(v.run(t, "bridge", "mdb", "show"), "dev br0 port br0 grp ff02::1:2")
	}, patience, poll)
	_, err := c.RapidSolicit(ctx)
	require.NoError(t, err)
}

// TestTwoSubnets checks that the responders of two subnets share a namespace, and that a guest is answered by the one
// of its bridge only.
func TestTwoSubnets(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	one, two := testSubnet(), testSubnet()
	two.ID, two.CIDR, two.Gateway = "subnet-2", netip.MustParsePrefix("10.0.32.0/20"), netip.MustParseAddr("10.0.32.1")
	two.CIDR6 = netip.MustParsePrefix("fd00:1:2:4::/64")
	two.Ports = []cloud.HostPort{{ID: "port-two", MAC: macWeb, IP: netip.MustParseAddr("10.0.32.17")}} // the same MAC address
	v := newVPC(t)
	v.addBridge(t, "br0", one)
	v.addBridge(t, "br1", two)
	a, b := client4(t, v.addGuest(t, "br0", "one", macWeb)), client4(t, v.addGuest(t, "br1", "two", macWeb))
	serveSubnet(t, v.name, "br0", one)
	serveSubnet(t, v.name, "br1", two)
	lease, err := a.Request(ctx)
	require.NoError(t, err)
	require.Equal(t, "10.0.16.17", lease.ACK.YourIPAddr.String())
	lease, err = b.Request(ctx)
	require.NoError(t, err)
	require.Equal(t, "10.0.32.17", lease.ACK.YourIPAddr.String())
}

// TestSet checks that an unchanged device keeps its sockets, that a device which was made again gets new ones, and that
// a device that was down is served when it is up again.
func TestSet(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s := testSubnet()
	v := newVPC(t)
	r := New(v.name, "br0", discardLog)
	require.ErrorContains(t, r.Set(s), "find device")
	require.ErrorContains(t, New("dhcptest-none", "br0", discardLog).Set(s), "network namespace")

	v.addBridge(t, "br0", s)
	t.Cleanup(r.Close)
	require.NoError(t, r.Set(s))
	first, table := r.sockets, r.table.Load()
	require.NoError(t, r.Set(testSubnet()))
	require.Same(t, table, r.table.Load(), "an equal subnet changes nothing")
	s.MTU = 1400
	require.NoError(t, r.Set(s))
	require.Same(t, first, r.sockets, "a changed subnet keeps the sockets")

	bridge, err := v.h.LinkByName("br0")
	require.NoError(t, err)
	require.NoError(t, v.h.LinkSetDown(bridge))
	require.NoError(t, v.h.LinkSetUp(bridge))
	c := client4(t, v.addGuest(t, "br0", "web", macWeb))
	_, err = c.Request(ctx)
	require.NoError(t, err, "after the device was down")

	require.NoError(t, v.h.LinkDel(bridge))
	require.ErrorContains(t, r.Set(s), "find device")
	v.addBridge(t, "br0", s)
	require.NoError(t, r.Set(s))
	require.NotSame(t, first, r.sockets)
	c = client4(t, v.addGuest(t, "br0", "web2", macWeb))
	_, err = c.Request(ctx)
	require.NoError(t, err, "after the device was made again")
	r.Close()
	r.Close()
}

// TestFirewalledBridge checks that the responder does not depend on the rules for IP packets: it receives before them
// and sends past them. Bridged packets pass through iptables here, as security groups demand.
func TestFirewalledBridge(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s := testSubnet()
	v := newVPC(t)
	v.addBridge(t, "br0", s)
	setSysctl(t, v.name, "bridge/bridge-nf-call-iptables", "1")
	setSysctl(t, v.name, "bridge/bridge-nf-call-ip6tables", "1")
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, chain := range []string{"INPUT", "FORWARD", "OUTPUT"} {
			v.run(t, program, "-w", "-P", chain, "DROP")
		}
	}
	serveSubnet(t, v.name, "br0", s)
	g := v.addGuest(t, "br0", "web", macWeb)
	lease, err := client4(t, g).Request(ctx)
	require.NoError(t, err)
	require.Equal(t, "10.0.16.17", lease.ACK.YourIPAddr.String())
	_, err = client6(t, g).RapidSolicit(ctx)
	require.NoError(t, err)
}

// TestFlood checks that a guest gets its address while another one sends 20,000 requests per second. That is far more
// than a port may send, but not so much that it takes all processor time of a host that runs other tests.
func TestFlood(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	s := testSubnet()
	v := newVPC(t)
	v.addBridge(t, "br0", s)
	serveSubnet(t, v.name, "br0", s)
	attacker := v.addGuest(t, "br0", "web", macWeb)
	// Part of the guest's messages are lost, because the flood fills the queue that both guests share.
	guest := patientClient4(t, v.addGuest(t, "br0", "plain", macNoIP6), 30)

	var socket *os.File
	require.NoError(t, nsthread.InNamed(attacker.name, func() (err error) {
		socket, err = openPacketSocket(attacker.eth0.Attrs().Index, 0, filter4())
		return err
	}))
	frame := validFrames()[0]
	copy(frame, []byte{255, 255, 255, 255, 255, 255})
	var sent atomic.Int64
	var flood sync.WaitGroup
	flood.Go(func() {
		for ctx.Err() == nil {
			for range 20 {
				if _, err := socket.Write(frame); err == nil {
					sent.Add(1)
				}
			}
			time.Sleep(time.Millisecond)
		}
	})
	require.Eventually(t, func() bool { return sent.Load() > 100*requestBurst }, patience, poll)
	for range 3 {
		_, err := guest.Request(ctx)
		require.NoError(t, err)
	}
	cancel()
	flood.Wait()
	require.NoError(t, socket.Close())
}
