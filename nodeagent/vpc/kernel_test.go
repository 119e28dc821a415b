package vpc

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// shop are the records of a VPC with two ports on host n1 and one on n2. Port 80 is open to members of group web.
const shop = `
	vpc shop
	subnet s1 vpc=shop net=1
	subnet s2 vpc=shop net=2
	port p5 vpc=shop subnet=s1 at=10.0.1.5 node=n1 groups=web name=front gen=1
	port p6 vpc=shop subnet=s1 at=10.0.1.6 node=n1 groups=other gen=1
	port p7 vpc=shop subnet=s2 at=10.0.2.7 node=n2 groups=web name=back gen=1
	group web any-> tcp/80<-web
	group other any->
`

// TestShop follows a VPC on two hosts: reachability across hosts, the servers, a rule that is revoked, an agent that
// restarts, a change by hand that is repaired, and the removal.
func TestShop(t *testing.T) {
	l := newLab(t, 2)
	one, two := l.hosts[0], l.hosts[1]
	for _, h := range l.hosts {
		h.snapshot(1, shop)
	}
	front, other, back := one.endpoint("p5"), one.endpoint("p6"), two.endpoint("p7")
	l.listen(back, 80)
	require.Eventually(t, func() bool { return l.connects(front, "10.0.2.7", 80, 5*time.Second) }, wait, time.Millisecond)
	require.False(t, l.connects(other, "10.0.2.7", 80, time.Second), "a port without the group reached a member")

	requireServers(l, front)
	open := l.dial(front, "10.0.2.7:80")
	requireEcho(t, open)

	t.Log("a rule is revoked on the receiver's host: new connections and the open one end")
	two.change(2, "group web any->")
	require.False(t, l.connects(front, "10.0.2.7", 80, time.Second))
	require.Error(t, echo(open, 2*time.Second))
	two.change(3, "group web any-> tcp/80<-web")
	require.Eventually(t, func() bool { return l.connects(front, "10.0.2.7", 80, 5*time.Second) }, wait, time.Millisecond)

	t.Log("a port that leaves the group is no member any more")
	two.change(4, "port p5 vpc=shop subnet=s1 at=10.0.1.5 node=n1 groups=other gen=1")
	require.False(t, l.connects(front, "10.0.2.7", 80, time.Second))
	two.change(5, "port p5 vpc=shop subnet=s1 at=10.0.1.5 node=n1 groups=web gen=1")

	t.Log("a restarted agent writes nothing, and touches nothing before its first snapshot")
	open = l.dial(front, "10.0.2.7:80")
	before := l.state(one, "shop")
	one.stop()
	requireEcho(t, open)
	one.start()
	one.change0(t)
	requireEcho(t, open)
	one.snapshot(6, shop)
	require.Zero(t, one.Counts().Writes, "%s", one.log)
	require.Equal(t, before, l.state(one, "shop"))
	requireEcho(t, open)
	requireServers(l, front)

	t.Log("drift is repaired, logged and counted")
	l.ip(one.vpcName("shop"), "link delete vx102")
	l.run("ip", "netns", "exec", l.prefix+one.vpcName("shop"), "iptables-nft", "-F")
	require.Eventually(t, func() bool { return one.Counts().Repairs > 0 }, wait, 10*time.Millisecond)
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, before, l.state(one, "shop")) }, wait, 50*time.Millisecond)
	require.Contains(t, one.log.String(), "repaired")
	require.Eventually(t, func() bool { return l.connects(front, "10.0.2.7", 80, 5*time.Second) }, wait, time.Millisecond)

	t.Log("a VPC that the snapshot does not name is removed")
	one.snapshot(7, "")
	require.NoFileExists(t, l.path(one.vpcName("shop")))
	require.Empty(t, one.Status())
	two.change(8, "delete shop")
	require.NoFileExists(t, l.path(two.vpcName("shop")))
}

// TestHostsAreDenied requires that a guest does not reach the underlay address of a host, although a route leads there,
// and that this holds for hosts that are added later.
func TestHostsAreDenied(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	records := "vpc a\nsubnet s1 vpc=a net=1\nport p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 groups=g\ngroup g any->"
	h.snapshot(1, records+"\nprotected 192.0.2.1")
	guest := h.endpoint("p5")
	l.addNamespace("far") // a host at the other end of a link that a NAT gateway could use
	l.ip(h.vpcName("a"), "link add out type veth peer name eth0 netns %sfar", l.prefix)
	l.ip(h.vpcName("a"), "address add 198.51.100.1/24 dev out")
	l.ip(h.vpcName("a"), "link set out up")
	l.ip("far", "link set eth0 up")
	l.ip("far", "address add 198.51.100.2/24 dev eth0")
	l.ip("far", "address add 198.51.100.3/24 dev eth0")
	l.ip("far", "route add default via 198.51.100.1")
	l.listen("far", 80)
	reaches := func(to string, within time.Duration) bool { return l.connects(guest, to, 80, within) }
	require.Eventually(t, func() bool { return reaches("198.51.100.2", 5*time.Second) }, wait, time.Millisecond)

	h.change(2, "protected 192.0.2.1 198.51.100.2")
	require.False(t, reaches("198.51.100.2", time.Second), "a guest reached a host")
	require.True(t, reaches("198.51.100.3", 5*time.Second))
	h.snapshot(3, records)
	require.False(t, reaches("198.51.100.2", time.Second), "a guest reached a host")
	h.change(4, "protected 192.0.2.1")
	require.Eventually(t, func() bool { return reaches("198.51.100.2", 5*time.Second) }, wait, time.Millisecond)
}

// change0 applies a change before the first snapshot, which must have no effect.
func (h *labHost) change0(t *testing.T) {
	h.Apply(cloud.NetworkUpdate{Node: h.node, Stream: h.stream, Revision: 1, Deleted: []string{"shop"}})
	require.FileExists(t, h.lab.path(h.vpcName("shop")))
	require.Empty(t, h.Status())
}

// vpcName returns the name of the VPC's namespace in the lab.
func (h *labHost) vpcName(id string) string { return h.name + "-" + id }

// state returns what the kernel has of a VPC: devices, addresses, forwarding entries and packet filter.
func (l *lab) state(h *labHost, vpc string) string {
	name := h.vpcName(vpc)
	var out []string
	for _, command := range []string{"ip -br address", "ip neigh show nud permanent", "bridge fdb show", "bridge -d link show", "nft -s list table bridge trivet", "iptables-nft-save -t filter"} {
		args := append([]string{"netns", "exec", l.prefix + name}, strings.Fields(command)...)
		for line := range strings.Lines(l.run("ip", args...)) {
			if !strings.HasPrefix(line, "#") {
				out = append(out, strings.TrimSpace(line))
			}
		}
	}
	for i := range out {
		out[i] = counters.ReplaceAllString(out[i], "")
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// counters matches what differs between equal states: the parts of the packet filter that traffic changes, indexes of
// devices, and the random MAC addresses of the VXLAN devices themselves.
var counters = regexp.MustCompile(`^\d+: |packets \d+ bytes \d+|\[\d+:\d+\]|@if\d+|(?m)^\S+ dev vx\d+ master br\d+ permanent$`)

// dial connects over TCP from a namespace of the lab.
func (l *lab) dial(from, to string) net.Conn {
	l.Helper()
	addr := netip.MustParseAddrPort(to)
	var conn net.Conn
	// A dial with a timeout would continue on another thread.
	require.NoError(l, l.in(from, func() (err error) {
		conn, err = net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(addr))
		return err
	}))
	l.Cleanup(func() { conn.Close() })
	return conn
}

// echo sends a byte and waits for it to come back.
func echo(conn net.Conn, within time.Duration) error {
	if err := conn.SetDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("x")); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, make([]byte, 1))
	return err
}

func requireEcho(t *testing.T, conn net.Conn) {
	t.Helper()
	require.NoError(t, echo(conn, wait))
}

// requireServers requires answers from DHCP, DNS and metadata in the endpoint of port p5.
func requireServers(l *lab, from string) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), wait)
	defer cancel()
	var client *nclient4.Client
	require.NoError(l, l.in(from, func() (err error) {
		client, err = nclient4.New("eth0")
		return err
	}))
	defer client.Close()
	offer, err := client.DiscoverOffer(ctx)
	require.NoError(l, err)
	require.Equal(l, "10.0.1.5", offer.YourIPAddr.String())
	require.Equal(l, "web.internal", offer.DomainName())
	require.Equal(l, []byte{1400 >> 8, 1400 & 0xff}, offer.Options.Get(dhcpv4.OptionInterfaceMTU))

	var conn net.Conn
	require.NoError(l, l.in(from, func() (err error) {
		conn, err = net.DialUDP("udp", nil, &net.UDPAddr{IP: net.IPv4(10, 0, 1, 1), Port: 53})
		return err
	}))
	defer conn.Close()
	require.NoError(l, conn.SetDeadline(time.Now().Add(wait)))
	question := new(dns.Msg).SetQuestion("back.web.internal.", dns.TypeA)
	wire := &dns.Conn{Conn: conn}
	require.NoError(l, wire.WriteMsg(question))
	answer, err := wire.ReadMsg()
	require.NoError(l, err)
	require.Len(l, answer.Answer, 1, "%s", answer)
	require.Equal(l, "10.0.2.7", answer.Answer[0].(*dns.A).A.String())

	status, _ := l.askMetadata(from, "GET /latest/meta-data/local-ipv4", "")
	require.Equal(l, http.StatusUnauthorized, status, "without a token")
	status, token := l.askMetadata(from, "PUT /latest/api/token", "X-aws-ec2-metadata-token-ttl-seconds: 60")
	require.Equal(l, http.StatusOK, status)
	status, body := l.askMetadata(from, "GET /latest/meta-data/local-ipv4", "X-aws-ec2-metadata-token: "+token)
	require.Equal(l, http.StatusOK, status)
	require.Equal(l, "10.0.1.5", body)
}

// askMetadata sends a request with a header to the metadata service, and returns the status and the body.
func (l *lab) askMetadata(from, request, header string) (int, string) {
	l.Helper()
	web := l.dial(from, "169.254.169.254:80")
	require.NoError(l, web.SetDeadline(time.Now().Add(wait)))
	if header != "" {
		header += "\r\n"
	}
	fmt.Fprintf(web, "%s HTTP/1.1\r\nHost: 169.254.169.254\r\nConnection: close\r\n%s\r\n", request, header)
	response, err := http.ReadResponse(bufio.NewReader(web), nil)
	require.NoError(l, err)
	body, err := io.ReadAll(response.Body)
	require.NoError(l, err)
	return response.StatusCode, string(body)
}

// TestTap requires that OpenTap waits for the port, that the tap is up when OpenTap returns, and that an agent restart
// leaves the tap of a running guest alone.
func TestTap(t *testing.T) {
	l := newLab(t, 1)
	h := l.hosts[0]
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := h.OpenTap(short, "p5")
	require.ErrorContains(t, err, "has not sent the networks")
	require.ErrorIs(t, err, context.DeadlineExceeded)

	opened := make(chan *os.File, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		defer cancel()
		tap, err := h.OpenTap(ctx, "p5")
		if err != nil {
			t.Error(err)
		}
		opened <- tap
	}()
	h.snapshot(1, "vpc a\nsubnet s1 vpc=a net=1")
	h.change(2, "port p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 groups=g\ngroup g any->")
	tap := <-opened
	require.NotNil(t, tap)
	defer tap.Close()
	device := DeviceName("p5")
	require.Contains(t, l.ip(h.vpcName("a"), "-br link show %s", device), "LOWER_UP")
	require.Equal(t, []netip.Addr{netip.MustParseAddr("10.0.1.5")}, h.Addresses("p5"))

	h.stop()
	h.start()
	h.snapshot(3, "vpc a\nsubnet s1 vpc=a net=1\nport p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 groups=g\ngroup g any->")
	require.Zero(t, h.Counts().Writes, "%s", h.log)
	require.Contains(t, l.ip(h.vpcName("a"), "-br link show %s", device), "LOWER_UP")
	_, err = h.OpenTap(t.Context(), "p5")
	require.ErrorIs(t, err, unix.EBUSY)

	require.NoError(t, h.CloseTap(t.Context(), "p5"))
	require.NotContains(t, l.ip(h.vpcName("a"), "-br link"), device)
	require.NoError(t, h.CloseTap(t.Context(), "p5"))
	require.NoError(t, h.CloseTap(t.Context(), "unknown"))
	again, err := h.OpenTap(t.Context(), "p5")
	require.NoError(t, err)
	require.NoError(t, again.Close())
}

// brokenFilter is a packet filter that cannot be installed.
type brokenFilter struct{}

func (brokenFilter) Counters(context.Context, netns.NsHandle) (firewall.Counters, error) {
	return firewall.Counters{}, errors.New("no counters")
}

func (brokenFilter) Set(context.Context, netns.NsHandle, cloud.HostVPC) (firewall.Result, error) {
	return firewall.Result{}, errors.New("no packet filter")
}

func (f brokenFilter) Update(ctx context.Context, ns netns.NsHandle, vpc cloud.HostVPC) (firewall.Result, error) {
	return f.Set(ctx, ns, vpc)
}

func (brokenFilter) Forget(cloud.VPCID) {}

// activatesUnfiltered reports whether a port is set up although its packet filter cannot be installed.
func activatesUnfiltered(t *testing.T) bool {
	l := newLab(t, 1)
	h := l.hosts[0]
	h.snapshot(1, "vpc a\nsubnet s1 vpc=a net=1\nport p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 groups=g\ngroup g any->")
	h.endpoint("p5")
	l.ip(h.vpcName("a"), "link set %s down", DeviceName("p5"))
	h.stop()
	h.start()
	h.plane.(*kernelPlane).filter = brokenFilter{}
	h.stream++
	u := parseUpdate(t, "vpc a\nsubnet s1 vpc=a net=1\nport p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 groups=g\ngroup g any->")
	u.Node, u.Stream, u.Revision, u.Snapshot = h.node, h.stream, 2, true
	h.Apply(u)
	require.Eventually(t, func() bool { return len(h.lastAck().Failures) > 0 }, wait, 5*time.Millisecond)
	require.Contains(t, h.lastAck().Failures[0].Error, "no packet filter")
	return strings.Contains(l.ip(h.vpcName("a"), "-br link show %s", DeviceName("p5")), ",UP")
}

func TestPortsStayDownWithoutPacketFilter(t *testing.T) { require.False(t, activatesUnfiltered(t)) }
