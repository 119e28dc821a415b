package vpc

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// answeredTwice is the message of the failure if two hosts answered for one address.
const answeredTwice = "two hosts answered for"

// arpProbe asks for addresses from the external network.
type arpProbe struct {
	lab    *lab
	socket int
	device *net.Interface

	mu    sync.Mutex
	twice []string // addresses for which two hosts answered
}

// newARPProbe makes the external network of the lab, and a station in it.
func newARPProbe(l *lab) *arpProbe {
	l.addNamespace("x")
	l.ip("x", "link add ext address 02:00:00:00:00:01 type bridge")
	l.ip("x", "link set ext up")
	l.ip("x", "address add 203.0.113.1/24 dev ext")
	p := &arpProbe{lab: l}
	require.NoError(l, l.in("x", func() (err error) {
		if p.device, err = net.InterfaceByName("ext"); err != nil {
			return err
		}
		const protocol = unix.ETH_P_ARP>>8 | unix.ETH_P_ARP&0xff<<8 // in network byte order
		if p.socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol); err != nil {
			return err
		}
		l.Cleanup(func() { unix.Close(p.socket) })
		return unix.Bind(p.socket, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: p.device.Index})
	}))
	l.external = true
	return p
}

// owners sends an ARP request for an address and returns the MAC addresses of all stations that answer.
func (p *arpProbe) owners(address string) []string {
	p.lab.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	target := netip.MustParseAddr(address)
	frame := slices.Concat([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, p.device.HardwareAddr,
		[]byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 1}, p.device.HardwareAddr, []byte{203, 0, 113, 1}, make([]byte, 6), target.AsSlice())
	require.NoError(p.lab, unix.Sendto(p.socket, frame, 0, &unix.SockaddrLinklayer{Ifindex: p.device.Index}))
	found := map[string]bool{}
	buffer := make([]byte, 1500)
	for until := time.Now().Add(200 * time.Millisecond); time.Now().Before(until); {
		wait := unix.NsecToTimeval(max(int64(time.Until(until)), int64(time.Millisecond)))
		require.NoError(p.lab, unix.SetsockoptTimeval(p.socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait))
		n, _, err := unix.Recvfrom(p.socket, buffer, 0)
		if err != nil || n < 42 || binary.BigEndian.Uint16(buffer[20:]) != 2 {
			continue
		}
		if source, _ := netip.AddrFromSlice(buffer[28:32]); source == target {
			found[net.HardwareAddr(buffer[22:28]).String()] = true
		}
	}
	if len(found) > 1 {
		p.twice = append(p.twice, address)
	}
	return slices.Sorted(maps.Keys(found))
}

// awaitOwners asks for the addresses until each has the wanted number of owners, and returns the owner of the first. It
// returns "" after the given time.
func (p *arpProbe) awaitOwners(count int, within time.Duration, addresses ...string) string {
	p.lab.Helper()
	for until := time.Now().Add(within); time.Now().Before(until); {
		done, first := true, ""
		for i, a := range addresses {
			owners := p.owners(a)
			done = done && len(owners) == count
			if i == 0 && len(owners) > 0 {
				first = owners[0]
			}
		}
		if done {
			return first
		}
	}
	return ""
}

// connection is the contact of a host to the control plane.
type connection struct {
	mu  sync.Mutex // guards cut
	cut time.Time  // the last contact; zero while the host is connected
}

func (c *connection) last() (time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut.IsZero() {
		return time.Now(), true
	}
	return c.cut, true
}

func (c *connection) set(connected bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut = time.Now(); connected {
		c.cut = time.Time{}
	}
}

// TestCutOffHostWithdraws requires that a host without contact to the control plane withdraws the addresses of a NAT
// gateway and of a floating IP of a service IP before another host takes them over, and keeps the floating IP of its
// own port. It requires that the host answers again only with a snapshot that still assigns the addresses to the host.
func TestCutOffHostWithdraws(t *testing.T) {
	l := newEmptyLab(t)
	probe := newARPProbe(l)
	contact := &connection{}
	one := l.addHost(1, func(h *labHost) { h.contact, h.lease = contact.last, time.Second })
	two := l.addHost(2)
	const gateway, service, port = "203.0.113.9", "203.0.113.10", "203.0.113.11"
	on := func(node string, generation int) string {
		const text = `
			nat g vpc=a address=203.0.113.9 default node=NODE vni=200 gen=GEN
			nat f vpc=a service=web address=203.0.113.10 node=NODE vni=201 gen=GEN`
		return strings.NewReplacer("NODE", node, "GEN", fmt.Sprint(generation)).Replace(text)
	}
	const rest = `
		vpc a
		subnet s1 vpc=a net=1
		port p vpc=a subnet=s1 at=10.0.1.5 node=n1 gen=1
		port q vpc=a subnet=s1 at=10.0.1.6 node=n2 gen=1
		port vip vpc=a subnet=s1 at=10.0.1.50
		service web vpc=a at=10.0.1.50 ports=80/tcp to=p,q
		floating h port=p address=203.0.113.11 fixed=10.0.1.5`
	for _, h := range l.hosts {
		h.snapshot(1, rest+on("n1", 1))
	}
	first := probe.awaitOwners(1, wait, gateway, service, port)
	require.NotEmpty(t, first)

	t.Log("the host is cut off, and another host takes over")
	before := time.Now()
	contact.set(false)
	probe.awaitOwners(0, 15*time.Second, gateway, service)
	two.change(2, on("n2", 2))
	second := probe.awaitOwners(1, 15*time.Second, gateway, service)
	require.Empty(t, probe.twice, answeredTwice)
	require.NotEqual(t, first, second)
	require.Equal(t, []string{first}, probe.owners(port), "the floating IP of a port stays with the port")

	t.Log("the host is connected again, and its records are from before")
	contact.set(true)
	one.change(3, "floating h port=p address=203.0.113.11 fixed=10.0.1.5") // of the former stream
	for range 5 {
		require.Equal(t, []string{second}, probe.owners(gateway))
	}
	one.snapshotOf(before, 4, rest+on("n1", 1)) // of a connection that was opened before the lease ended
	for range 5 {
		require.Equal(t, []string{second}, probe.owners(gateway), "the snapshot was read before the address moved")
	}
	one.snapshot(4, rest+on("n2", 2))
	for range 5 {
		require.Equal(t, []string{second}, probe.owners(service))
	}

	t.Log("the addresses return to the host")
	two.change(5, on("n1", 3))
	one.change(5, on("n1", 3))
	require.Equal(t, first, probe.awaitOwners(1, wait, gateway, service))

	t.Log("a host that is cut off and still has the addresses afterwards answers again")
	contact.set(false)

	probe.awaitOwners(0, wait, gateway, service)
	require.Empty(t, probe.owners(gateway))
	contact.set(true)
	one.snapshot(6, rest+on("n1", 3))
	require.Equal(t, first, probe.awaitOwners(1, wait, gateway, service, port))
	require.Empty(t, probe.twice, answeredTwice)
	require.Contains(t, one.log.String(), "external addresses that other hosts can take over are withdrawn")
}
