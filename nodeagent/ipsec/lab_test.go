package ipsec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var parseAddr = netip.MustParseAddr

// patience limits how long tests wait for the kernel.
const patience = 30 * time.Second

// lab is an underlay of two hosts, each a network namespace. A VXLAN device on each connects them to an overlay with
// the addresses 10.99.0.1 and 10.99.0.2.
type lab struct {
	t     testing.TB
	hosts [2]*labHost
}

type labHost struct {
	t     testing.TB
	in    func(f func() error) // calls f on a thread in the host's namespace
	path  string
	vtep  netip.Addr
	inner string
	ipsec *IPsec
}

// newLab makes the hosts with an underlay of IPv4 or IPv6. It uses no programs, because the small guest has none.
func newLab(t testing.TB, v6 bool) *lab {
	t.Helper()
	l, namespaces := &lab{t: t}, nettest.NewNamespaces(t, "is")
	for i := range l.hosts {
		name := fmt.Sprintf("h%d", i+1)
		namespaces.Add(name)
		h := &labHost{
			t: t, path: namespaces.Path(name), in: func(f func() error) { t.Helper(); require.NoError(t, namespaces.In(name, f)) },
			vtep: parseAddr(fmt.Sprintf("192.0.2.%d", i+1)), inner: fmt.Sprintf("10.99.0.%d", i+1),
		}
		if v6 {
			h.vtep = parseAddr(fmt.Sprintf("fd99::%d", i+1))
		}
		l.hosts[i] = h
	}
	l.connect()
	for i, h := range l.hosts {
		h.addVXLAN(l.hosts[1-i].vtep)
		var err error
		h.ipsec, err = New(Options{VTEP: h.vtep, Namespace: h.path})
		require.NoError(t, err)
		t.Cleanup(func() { h.ipsec.Close() })
	}
	return l
}

// connect makes the underlay, a veth pair.
func (l *lab) connect() {
	l.t.Helper()
	l.hosts[0].in(func() error {
		peer, err := netns.GetFromPath(l.hosts[1].path)
		if err != nil {
			return err
		}
		defer peer.Close()
		attributes := netlink.NewLinkAttrs()
		attributes.Name = "eth0"
		veth := netlink.NewVeth(attributes)
		veth.PeerName, veth.PeerNamespace = "eth0", netlink.NsFd(int(peer))
		return netlink.LinkAdd(veth)
	})
	for _, h := range l.hosts {
		h.in(func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			bits := 24
			if h.vtep.Is6() {
				bits = 64
			}
			prefix := &net.IPNet{IP: h.vtep.AsSlice(), Mask: net.CIDRMask(bits, h.vtep.BitLen())}
			a := &netlink.Addr{IPNet: prefix, Flags: unix.IFA_F_NODAD}
			return errors.Join(netlink.AddrAdd(link, a), netlink.LinkSetUp(link))
		})
	}
}

func (h *labHost) addVXLAN(peer netip.Addr) {
	h.t.Helper()
	h.in(func() error {
		attributes := netlink.NewLinkAttrs()
		attributes.Name, attributes.MTU = "vx7", 1400
		vx := &netlink.Vxlan{
			LinkAttrs: attributes, VxlanId: 7, Port: Port, SrcAddr: h.vtep.AsSlice(), Group: peer.AsSlice(), Learning: true,
		}
		if err := netlink.LinkAdd(vx); err != nil {
			return err
		}
		a, err := netlink.ParseAddr(h.inner + "/24")
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrAdd(vx, a), netlink.LinkSetUp(vx))
	})
}

// set sets the peers of the host and returns the writes.
func (h *labHost) set(peers ...cloud.EncryptedPeer) []string {
	h.t.Helper()
	writes, err := h.ipsec.Set(h.t.Context(), peers)
	require.NoError(h.t, err)
	return writes
}

// keyOf returns a key that depends on its arguments.
func keyOf(from, to netip.Addr, epoch uint32) (key cloud.ESPKey) {
	copy(key[:], fmt.Sprintf("%s>%s#%d", from, to, epoch))
	key[35] = 1
	return key
}

func stateOf(from, to netip.Addr, epoch uint32) cloud.ESPState {
	return cloud.ESPState{SPI: 1<<8 | epoch, Key: keyOf(from, to, epoch)}
}

// peerOf returns the states of the host for another one. The host sends with the key of an epoch, and accepts those of
// the epochs before and after it too.
func (h *labHost) peerOf(other *labHost, epoch uint32) cloud.EncryptedPeer {
	p := cloud.EncryptedPeer{VTEP: other.vtep, Send: stateOf(h.vtep, other.vtep, epoch)}
	for e := epoch - 1; e <= epoch+1; e++ {
		p.Receive = append(p.Receive, stateOf(other.vtep, h.vtep, e))
	}
	return p
}

// rotate sets the epoch of the host.
func (l *lab) rotate(host int, epoch uint32) []string {
	l.t.Helper()
	return l.hosts[host].set(l.hosts[host].peerOf(l.hosts[1-host], epoch))
}

// listen opens a UDP port of the host's overlay or underlay address.
func (h *labHost) listen(address string) *net.UDPConn {
	h.t.Helper()
	var conn *net.UDPConn
	h.in(func() (err error) {
		a := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(net.JoinHostPort(address, "7000")))
		conn, err = net.ListenUDP("udp", a)
		return err
	})
	h.t.Cleanup(func() { conn.Close() })
	return conn
}

// arrives reports whether a packet from conn arrives at the overlay address of another host within a time limit. It
// sends the packet again until then.
func arrives(conn, at *net.UDPConn, limit time.Duration) bool {
	buffer := make([]byte, 64)
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); {
		if _, err := conn.WriteToUDP([]byte("hello"), at.LocalAddr().(*net.UDPAddr)); err != nil {
			time.Sleep(20 * time.Millisecond) // no state yet
		}
		_ = at.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if _, _, err := at.ReadFromUDP(buffer); err == nil {
			return true
		}
	}
	return false
}

// capture counts the frames on a host's underlay device.
type capture struct {
	t  testing.TB
	fd int
	// esp and bare are the received frames with ESP, and with UDP to the port of VXLAN. sentESP and sentBare are those
	// that the host has sent.
	esp, bare, sentESP, sentBare int
}

func (h *labHost) capture() *capture {
	h.t.Helper()
	c := &capture{t: h.t}
	h.in(func() (err error) {
		all := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL))
		if c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(all)); err != nil {
			return err
		}
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return errors.Join(unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Attrs().Index}))
	})
	h.t.Cleanup(func() { unix.Close(c.fd) })
	return c
}

// read counts the frames that have arrived.
func (c *capture) read() {
	c.t.Helper()
	buffer := make([]byte, 1<<16)
	for {
		n, from, err := unix.Recvfrom(c.fd, buffer, 0)
		if errors.Is(err, unix.EAGAIN) {
			return
		}
		require.NoError(c.t, err)
		esp, bare := &c.esp, &c.bare
		if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
			esp, bare = &c.sentESP, &c.sentBare
		}
		count(buffer[:n], esp, bare)
	}
}

// count increments the number of frames with ESP or with VXLAN.
func count(frame []byte, esp, bare *int) {
	if len(frame) < 14+40 {
		return
	}
	protocol, header := frame[14+9], 20
	switch binary.BigEndian.Uint16(frame[12:]) {
	case unix.ETH_P_IP:
	case unix.ETH_P_IPV6:
		protocol, header = frame[14+6], 40
	default:
		return
	}
	switch protocol {
	case unix.IPPROTO_ESP:
		*esp++
	case unix.IPPROTO_UDP:
		if binary.BigEndian.Uint16(frame[14+header+2:]) == Port {
			*bare++
		}
	}
}
