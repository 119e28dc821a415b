package netdev

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// tap is the guest's side of a tap. Its frames have a virtio-net header, as those of a virtual machine have.
type tap struct {
	t    *testing.T
	file *os.File
	mac  cloud.MAC
	ip   netip.Addr
}

const vnetHeader = 10 // bytes, struct virtio_net_hdr

// openTap opens and activates the tap of a port.
func (h *labHost) openTap(vpc cloud.HostVPC, id cloud.PortID) *tap {
	t := h.lab.t
	t.Helper()
	file, err := h.OpenTap(t.Context(), vpc, id)
	require.NoError(t, err)
	t.Cleanup(func() { file.Close() })
	_, p, err := findPort(&vpc, id)
	require.NoError(t, err)
	activated, err := h.Activate(t.Context(), vpc)
	require.NoError(t, err)
	require.NotContains(t, activated.Missing, id)
	return &tap{t: t, file: file, mac: p.MAC, ip: p.IP}
}

// send sends an Ethernet frame.
func (p *tap) send(to, from cloud.MAC, kind uint16, payload []byte) error {
	frame := make([]byte, vnetHeader, vnetHeader+14+len(payload))
	frame = append(append(frame, to[:]...), from[:]...)
	frame = binary.BigEndian.AppendUint16(frame, kind)
	_, err := p.file.Write(append(frame, payload...))
	return err
}

// receive returns frames until one matches, and that one. It fails after 10 seconds.
func (p *tap) receive(matches func(kind uint16, payload []byte) bool) (before [][]byte, last []byte) {
	p.t.Helper()
	require.NoError(p.t, p.file.SetReadDeadline(time.Now().Add(10*time.Second)))
	for buffer := make([]byte, 65536); ; {
		n, err := p.file.Read(buffer)
		require.NoError(p.t, err)
		frame := bytes.Clone(buffer[vnetHeader:n])
		if matches(binary.BigEndian.Uint16(frame[12:]), frame[14:]) {
			return before, frame
		}
		before = append(before, frame)
	}
}

var broadcast = cloud.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// resolve sends an ARP request and returns the MAC address in the reply.
func (p *tap) resolve(addr netip.Addr) (mac cloud.MAC) {
	p.t.Helper()
	request := []byte{0, 1, 8, 0, 6, 4, 0, 1}
	request = append(append(request, p.mac[:]...), p.ip.AsSlice()...)
	request = append(append(request, 0, 0, 0, 0, 0, 0), addr.AsSlice()...)
	require.NoError(p.t, p.send(broadcast, p.mac, unix.ETH_P_ARP, request))
	_, frame := p.receive(func(kind uint16, payload []byte) bool {
		return kind == unix.ETH_P_ARP && payload[7] == 2 && bytes.Equal(payload[14:18], addr.AsSlice())
	})
	copy(mac[:], frame[14+8:])
	return mac
}

func TestTap(t *testing.T) {
	l := newLab(t, 2)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0}, place{1, 20, 1}, place{2, 30, 1})[0]
	_, err := h.OpenTap(t.Context(), vpc, "p1-10")
	require.ErrorIs(t, err, os.ErrNotExist, "the VPC is not prepared")
	prepared, err := h.Prepare(t.Context(), vpc)
	require.NoError(t, err)
	require.Equal(t, []cloud.PortID{"p1-10"}, prepared.Missing)

	file, err := h.OpenTap(t.Context(), vpc, "p1-10")
	require.NoError(t, err)
	_, err = file.Write(make([]byte, 100))
	require.ErrorIs(t, err, syscall.EIO, "the device is down before Activate")
	_, err = h.OpenTap(t.Context(), vpc, "p1-10")
	require.ErrorIs(t, err, syscall.EBUSY)
	prepared, err = h.Prepare(t.Context(), vpc)
	require.NoError(t, err)
	require.Empty(t, prepared, "OpenTap left nothing to do")
	require.NoError(t, file.Close())
	require.NotContains(t, l.ip(h.vpcName("a"), "link"), "port1-10", "the tap ends with its descriptor")

	guest := h.openTap(vpc, "p1-10")
	require.Equal(t, cloud.GatewayMAC, guest.resolve(netip.MustParseAddr("10.0.1.1")))
	require.Equal(t, cloud.MAC{2, 0, 0, 0, 1, 20}, guest.resolve(netip.MustParseAddr("10.0.1.20")), "the bridge answers for remote ports")

	guest.file.Close()
	activated, err := h.Activate(t.Context(), vpc)
	require.NoError(t, err)
	require.Equal(t, Result{Missing: []cloud.PortID{"p1-10"}}, activated)
	require.NoError(t, h.Detach(t.Context(), "a", "p1-10"))
}

// TestActivatePort sets one of two ports up. It requires that ActivatePort ignores a device that does not exist and a
// device that another program made.
func TestActivatePort(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0}, place{1, 11, 0}, place{1, 12, 0})[0]
	_, err := h.Prepare(t.Context(), vpc)
	require.NoError(t, err)
	h.attach(vpc, "p1-10")
	h.attach(vpc, "p1-11")
	name := h.vpcName("a")
	for range 2 {
		require.NoError(t, h.ActivatePort(t.Context(), vpc, "p1-10"))
		require.Contains(t, l.ip(name, "link show port1-10"), ",UP")
		require.NotContains(t, l.ip(name, "link show port1-11"), ",UP")
	}
	require.NoError(t, h.ActivatePort(t.Context(), vpc, "p1-12"), "a port without a device")
	l.ip(name, "link add port1-12 master br101 type veth peer name other")
	require.NoError(t, h.ActivatePort(t.Context(), vpc, "p1-12"), "a device of another program")
	require.NotContains(t, l.ip(name, "link show port1-12"), ",UP")
	require.ErrorContains(t, h.ActivatePort(t.Context(), vpc, "unknown"), "unknown")
	require.Error(t, h.ActivatePort(t.Context(), cloud.HostVPC{ID: "b", Subnets: vpc.Subnets}, "p1-10"), "a VPC that is not prepared")
}

// TestMACAddresses requires that a port without port security may have further MAC addresses but not those of others,
// and that a port with port security may have none.
func TestMACAddresses(t *testing.T) {
	l := newLab(t, 2)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0}, place{1, 11, 0}, place{1, 20, 1})[0]
	vpc.Subnets[0].Ports[0].Secured = false
	_, err := h.Prepare(t.Context(), vpc)
	require.NoError(t, err)
	unsecured, secured := h.openTap(vpc, "p1-10"), h.openTap(vpc, "p1-11")

	before := l.dump(h.vpcName("a"))
	for strings.Contains(before, "NO-CARRIER") { // The kernel reports the carrier of a new device later.
		require.NoError(t, t.Context().Err())
		time.Sleep(10 * time.Millisecond)
		before = l.dump(h.vpcName("a"))
	}
	for _, stolen := range []cloud.MAC{secured.mac, {2, 0, 0, 0, 1, 20}, cloud.GatewayMAC} {
		require.NoError(t, unsecured.send(broadcast, stolen, 0x88b5, make([]byte, 50)))
	}
	require.NoError(t, secured.send(broadcast, cloud.MAC{2, 9, 0, 0, 0, 2}, 0x88b5, make([]byte, 50)))
	further := cloud.MAC{2, 9, 0, 0, 0, 1}
	require.NoError(t, unsecured.send(broadcast, further, 0x88b5, make([]byte, 50)))
	require.Eventually(t, func() bool {
		return strings.Contains(l.bridge(h.vpcName("a"), "fdb"), further.String()+" dev port1-10 master br101")
	}, 10*time.Second, 10*time.Millisecond)
	require.NotContains(t, l.bridge(h.vpcName("a"), "fdb"), "02:09:00:00:00:02")
	require.Equal(t, before, l.dump(h.vpcName("a")))
	require.Empty(t, h.apply(vpc))

	// A frame to the further address reaches the port.
	require.NoError(t, secured.send(further, secured.mac, 0x88b6, make([]byte, 50)))
	unsecured.receive(func(kind uint16, _ []byte) bool { return kind == 0x88b6 })
}

// TestUnknownAddresses requires that the gateway drops packets to unknown addresses of a subnet without asking for
// them, unless a port of the subnet may have unknown addresses.
func TestUnknownAddresses(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0}, place{2, 40, 0})[0]
	from := h.endpoint("a", "p1-10")
	prepared, err := h.Prepare(t.Context(), vpc)
	require.NoError(t, err)
	require.Len(t, prepared.Missing, 2)
	h.attach(vpc, "p1-10")
	guest := h.openTap(vpc, "p2-40")
	l.requirePing(from, "10.0.1.1")

	ping := func(to string) { // without waiting for an answer
		err := l.ping(from, netip.MustParseAddr(to), 100, time.Millisecond)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	}
	isARP := func(kind uint16, payload []byte) bool { return kind == unix.ETH_P_ARP }
	isEcho := func(kind uint16, payload []byte) bool { return kind == unix.ETH_P_IP && payload[9] == 1 }
	ping("10.0.2.99")
	ping("10.0.2.40")
	before, _ := guest.receive(isEcho)
	for _, frame := range before {
		require.False(t, isARP(binary.BigEndian.Uint16(frame[12:]), frame[14:]), "the gateway sent an ARP request")
	}

	vpc.Subnets[1].Ports[0].Pairs = []cloud.AddressPair{{CIDR: netip.MustParsePrefix("10.0.2.99/32")}}
	require.Len(t, h.apply(vpc), 2) // one sysctl for each IP version
	ping("10.0.2.99")
	_, request := guest.receive(isARP)
	require.Equal(t, cloud.GatewayMAC[:], request[6:12])
	require.Equal(t, []byte{10, 0, 2, 1}, request[14+14:14+18])
	require.Equal(t, []byte{10, 0, 2, 99}, request[14+24:14+28])
}

func TestAttachVeth(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0}, place{1, 11, 0})[0]
	h.apply(vpc)
	e := h.endpoint("a", "p1-10")
	require.Contains(t, l.ip(e, "link show eth0"), "02:00:00:00:01:0a")
	require.Contains(t, l.ip(e, "link show eth0"), "mtu 1450")

	// Again, as after a failure whose reason the caller does not know.
	h.attach(vpc, "p1-10")
	require.Equal(t, []string{"ip link set port1-10 up"}, texts(h.apply(vpc)))
	requireReach(l, "a", place{1, 10, 0}, place{1, 11, 0})

	for _, test := range []struct {
		name, want string
		attach     func() error
	}{
		{"unknown port", "no such port", func() error { return h.AttachVeth(t.Context(), vpc, "p9", Endpoint{l.path(e), "eth1"}) }},
		{"no namespace", "no such file", func() error { return h.AttachVeth(t.Context(), vpc, "p1-10", Endpoint{l.path("none"), "eth1"}) }},
		{"device exists", "file exists", func() error { return h.AttachVeth(t.Context(), vpc, "p1-11", Endpoint{l.path(e), "eth0"}) }},
		{"VPC is not prepared", "trivet-absent", func() error {
			other := vpc
			other.ID = "trivet-absent"
			return h.AttachVeth(t.Context(), other, "p1-10", Endpoint{l.path(e), "eth1"})
		}},
		{"ID is a path", "not a file name", func() error {
			other := vpc
			other.ID = "../a"
			return h.AttachVeth(t.Context(), other, "p1-10", Endpoint{l.path(e), "eth1"})
		}},
	} {
		require.ErrorContains(t, test.attach(), test.want, test.name)
	}
	require.NotContains(t, l.ip(e, "link"), "eth1")

	// The failed attachment of p1-11 replaced its device, so the port has none now.
	prepared, err := h.Prepare(t.Context(), vpc)
	require.NoError(t, err)
	require.Equal(t, []cloud.PortID{"p1-11"}, prepared.Missing)
	h.apply(vpc)

	require.NoError(t, h.Detach(t.Context(), "a", "p1-10"))
	require.NoError(t, h.Detach(t.Context(), "a", "p1-10"), "again")
	require.NoError(t, h.Detach(t.Context(), "absent", "p1-10"))
	require.NotContains(t, l.ip(e, "link"), "eth0")
	require.NotEmpty(t, h.apply(vpc))
	requireReach(l, "a", place{1, 10, 0}, place{1, 11, 0})
}

// TestVanish requires that a device that disappears during Prepare is reported as missing and does not fail the others.
func TestVanish(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	vpc := testVPC(l, "a", 100, place{1, 10, 0})[0]
	h.apply(vpc)
	want := newState()
	want.links["gone"] = link{kind: portLink}
	changes := []Change{
		setMTU{"gone", 1400}, setMaster{"gone", "br101"}, setMTU{"port1-10", 1400},
		writeSetting{sysctl{"net/ipv6/conf/gone/disable_ipv6", "1"}}, replaceFDB{device: "gone", bridge: true},
	}
	require.NoError(t, h.enter(t.Context(), "a", func(k *kernel) error {
		done, vanished, err := k.apply(changes, want)
		require.Equal(t, []Change{setMTU{"port1-10", 1400}}, done)
		require.Equal(t, []string{"gone"}, vanished)
		return err
	}))
	require.Error(t, h.enter(t.Context(), "a", func(k *kernel) error {
		_, _, err := k.apply(changes, newState()) // the device is not that of a port
		return err
	}))
}

// TestIsolation gives two VPCs the same prefixes, addresses and MAC addresses on the same hosts.
func TestIsolation(t *testing.T) {
	l := newLab(t, 2)
	places := []place{{1, 10, 0}, {1, 20, 1}, {2, 30, 1}}
	for i, h := range l.hosts {
		h.apply(testVPC(l, "a", 100, places...)[i])
		h.apply(testVPC(l, "b", 200, append(places, place{1, 99, 1})...)[i])
	}
	for _, vpc := range []cloud.VPCID{"a", "b"} {
		for _, p := range places[1:] {
			l.serve(l.hosts[p.host].endpoint(vpc, portID(p.subnet, p.n)), string(vpc))
		}
	}
	for _, vpc := range []cloud.VPCID{"a", "b"} {
		from := l.hosts[0].endpoint(vpc, "p1-10")
		for _, p := range places[1:] {
			requireReach(l, string(vpc), places[0], p)
			ip, _ := guest(p.subnet, p.n)
			answer, err := l.read(from, ip)
			require.NoError(t, err)
			require.Equal(t, string(vpc), answer)
		}
	}
	requireReach(l, "b", places[0], place{1, 99, 1})
	require.Error(t, l.ping(l.hosts[0].endpoint("a", "p1-10"), netip.MustParseAddr("10.0.1.99"), 100, time.Second))
}

// serve answers TCP connections to port 80 in a namespace with a text.
func (l *lab) serve(name, text string) {
	l.t.Helper()
	require.NoError(l.t, l.in(name, func() error { return serveText(l.t, text) }))
}

// read returns what the server at an address sends.
func (l *lab) read(from, addr string) (string, error) {
	var answer []byte
	err := l.in(from, func() error {
		conn, err := dialText(addr)
		if err != nil {
			return err
		}
		defer conn.Close()
		answer, err = io.ReadAll(conn)
		return errors.Join(err)
	})
	return string(answer), err
}
