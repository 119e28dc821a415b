package vpc

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// greet answers TCP connections and UDP datagrams at a port in a namespace of the lab with a line that has name and the
// client's address. TCP connections then echo.
func (l *lab) greet(in, name string, port int) (stop func()) {
	l.Helper()
	var listener net.Listener
	var packets net.PacketConn
	require.NoError(l, l.in(in, func() (err error) {
		if listener, err = net.Listen("tcp4", fmt.Sprintf(":%d", port)); err != nil {
			return err
		}
		packets, err = net.ListenPacket("udp4", fmt.Sprintf(":%d", port))
		return err
	}))
	nettest.Accept(l, listener, func(conn net.Conn) {
		defer conn.Close()
		fmt.Fprintln(conn, name, netip.MustParseAddrPort(conn.RemoteAddr().String()).Addr())
		io.Copy(conn, conn)
	})
	go func() {
		buffer := make([]byte, 100)
		for {
			_, from, err := packets.ReadFrom(buffer)
			if err != nil {
				return
			}
			packets.WriteTo([]byte(name+"\n"), from)
		}
	}()
	stop = func() { listener.Close(); packets.Close() }
	l.Cleanup(stop)
	return stop
}

// ask connects to a service and returns the name of the backend and the client's address, as the backend sees it.
func (l *lab) ask(from, to string) (backend, client string) {
	l.Helper()
	conn := l.dial(from, to)
	defer conn.Close()
	return l.greeting(conn)
}

func (l *lab) greeting(conn net.Conn) (backend, client string) {
	l.Helper()
	require.NoError(l, conn.SetDeadline(time.Now().Add(wait)))
	line, err := bufio.NewReader(conn).ReadString('\n')
	require.NoError(l, err)
	backend, client, _ = strings.Cut(strings.TrimSpace(line), " ")
	return backend, client
}

// askOften connects count times and returns how often each backend answered.
func (l *lab) askOften(count int, from, to string) map[string]int {
	l.Helper()
	out := map[string]int{}
	for range count {
		backend, _ := l.ask(from, to)
		out[backend]++
	}
	return out
}

// refused opens a TCP connection and returns the error.
func (l *lab) refused(from, to string) error {
	address := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(to))
	return l.in(from, func() error {
		conn, err := net.DialTCP("tcp", nil, address)
		if err == nil {
			conn.Close()
		}
		return err
	})
}

// exchange sends a datagram and returns the name of the backend that answers.
func exchange(t *testing.T, conn net.Conn) (string, error) {
	t.Helper()
	require.NoError(t, conn.SetDeadline(time.Now().Add(wait)))
	if _, err := conn.Write([]byte("x")); err != nil {
		return "", err
	}
	buffer := make([]byte, 100)
	n, err := conn.Read(buffer)
	return strings.TrimSpace(string(buffer[:n])), err
}

func (l *lab) dialUDP(from, to string) net.Conn {
	l.Helper()
	var conn net.Conn
	require.NoError(l, l.in(from, func() (err error) {
		conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
		return err
	}))
	l.Cleanup(func() { conn.Close() })
	return conn
}

// balanced are the records of a service in subnet s1 with backends on both hosts and in both subnets. Backends accept
// connections from group web only.
const balanced = `
	vpc shop
	subnet s1 vpc=shop net=1
	subnet s2 vpc=shop net=2
	port client vpc=shop subnet=s1 at=10.0.1.5 node=n1 groups=web gen=1
	port far vpc=shop subnet=s2 at=10.0.2.5 node=n2 groups=web gen=1
	port other vpc=shop subnet=s1 at=10.0.1.6 node=n1 groups=other gen=1
	port one vpc=shop subnet=s1 at=10.0.1.11 node=n1 groups=backend gen=1
	port two vpc=shop subnet=s1 at=10.0.1.12 node=n2 groups=backend gen=1
	port three vpc=shop subnet=s2 at=10.0.2.13 node=n2 groups=backend gen=1
	port vip vpc=shop subnet=s1 at=10.0.1.50
	group web any->
	group other any->
	group backend any-> any<-web
	service api vpc=shop at=10.0.1.50 ports=80:8080/tcp,81:8080/tcp,53:8080/udp to=one,two,three*2
`

const (
	apiRecord = "service api vpc=shop at=10.0.1.50 ports=80:8080/tcp,81:8080/tcp,53:8080/udp to="
	api       = "10.0.1.50:80"
)

// TestServiceIP follows a service IP with clients in its subnet and in another, on two hosts.
func TestServiceIP(t *testing.T) {
	l := newLab(t, 2)
	one, two := l.hosts[0], l.hosts[1]
	revision := int64(1)
	for _, h := range l.hosts {
		h.snapshot(revision, balanced)
	}
	change := func(record string) {
		revision++
		for _, h := range l.hosts {
			h.change(revision, record)
		}
	}
	client, far, other := one.endpoint("client"), two.endpoint("far"), one.endpoint("other")
	backend := one.endpoint("one")
	l.greet(backend, "one", 8080)
	l.greet(two.endpoint("two"), "two", 8080)
	l.greet(two.endpoint("three"), "three", 8080)

	t.Log("connections are distributed by weight, and backends see the client")
	for from, address := range map[string]string{client: "10.0.1.5", far: "10.0.2.5"} {
		_, seen := l.ask(from, api)
		require.Equal(t, address, seen)
		count := l.askOften(400, from, api)
		for name, share := range map[string]int{"one": 100, "two": 100, "three": 200} {
			require.InDelta(t, share, count[name], 60, "%v", count) // at least six standard deviations
		}
	}
	t.Log("the groups of the backends decide which ports may connect")
	for range 5 {
		require.False(t, l.connects(other, "10.0.1.50", 80, 500*time.Millisecond))
	}
	require.ErrorIs(t, l.refused(client, "10.0.1.50:82"), syscall.ECONNREFUSED, "a port that the service IP does not have")
	l.requireName(client, "api.web.internal.", "10.0.1.50")

	t.Log("with affinity, all ports lead a client to one backend")
	change(strings.Replace(apiRecord, "to=", "affinity=yes to=", 1) + "one,two,three")
	count := l.askOften(20, client, api)
	maps.Copy(count, l.askOften(20, client, "10.0.1.50:81"))
	require.Len(t, count, 1)

	t.Log("an unhealthy backend gets no new connections; TCP continues and UDP moves")
	change(apiRecord + "one,two!,three!")
	open, datagrams := l.dial(client, api), l.dialUDP(client, "10.0.1.50:53")
	name, _ := l.greeting(open)
	require.Equal(t, "one", name)
	name, err := exchange(t, datagrams)
	require.NoError(t, err)
	require.Equal(t, "one", name)
	change(apiRecord + "one!,two,three")
	require.Equal(t, []string{"three", "two"}, slices.Sorted(maps.Keys(l.askOften(60, client, api))))
	require.NoError(t, echo(open, wait))
	name, err = exchange(t, datagrams)
	require.NoError(t, err)
	require.NotEqual(t, "one", name)

	t.Log("a removed backend loses its connections")
	change(apiRecord + "two,three")
	require.ErrorIs(t, echo(open, wait), syscall.ECONNRESET)

	t.Log("without a healthy backend, connections are refused")
	change(apiRecord + "one!,two!,three!")
	for _, from := range []string{client, far} {
		require.ErrorIs(t, l.refused(from, api), syscall.ECONNREFUSED)
		_, err = exchange(t, l.dialUDP(from, "10.0.1.50:53"))
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
	}

	t.Log("a backend reaches itself through its service IP")
	change(apiRecord + "one\ngroup backend any-> any<-web any<-backend")
	name, seen := l.ask(backend, api)
	require.Equal(t, []string{"one", "10.0.1.1"}, []string{name, seen})
	name, err = exchange(t, l.dialUDP(backend, "10.0.1.50:53"))
	require.NoError(t, err)
	require.Equal(t, "one", name)

	require.False(t, l.hearsItself(backend, "10.0.1.11"), "a backend gets its own broadcast")

	t.Log("a restarted agent writes nothing")
	one.stop()
	one.start()
	records := strings.Replace(balanced, "to=one,two,three*2", "to=one", 1)
	one.snapshot(100, records+"group backend any-> any<-web any<-backend")
	require.Zero(t, one.Counts().Writes, "%s", one.log)

	t.Log("a service IP that is deleted is removed completely")
	one.change(101, "delete api")
	require.False(t, l.connects(client, "10.0.1.50", 80, time.Second))
	rules := l.run("ip", "netns", "exec", l.prefix+one.vpcName("shop"), "nft", "list", "tables")
	require.NotContains(t, rules, "trivet-service")
}

// TestHealthChecks follows a backend that dies and returns, on its own host and on another one, with and without the
// control plane.
func TestHealthChecks(t *testing.T) {
	l := newLab(t, 2)
	one, two := l.hosts[0], l.hosts[1]
	checked := strings.Replace(balanced, "to=one,two,three*2", "to=one!,two! check=tcp checked=no", 1)
	for _, h := range l.hosts {
		h.snapshot(1, checked)
	}
	near, far := one.endpoint("client"), two.endpoint("far")
	backend := one.endpoint("one")
	stop := l.greet(backend, "one", 8080)
	l.greet(two.endpoint("two"), "two", 8080)
	ask := func(from string) []string { return slices.Sorted(maps.Keys(l.askOften(60, from, api))) }

	t.Log("each host uses its own backend as soon as it is healthy, and reports it until the records agree")
	one.awaitReport("one", true)
	two.awaitReport("two", true)
	require.Equal(t, []string{"one"}, ask(near))
	require.Equal(t, []string{"two"}, ask(far))
	for _, h := range l.hosts {
		h.change(2, apiRecord+"one,two check=tcp")
		h.requireNoReport()
	}
	require.Equal(t, []string{"one", "two"}, ask(near))
	require.Equal(t, []string{"one", "two"}, ask(far))

	t.Log("a dead backend gets no new connections from its own host, also before the control plane records the report")
	stop()
	one.awaitReport("one", false)
	require.Equal(t, []string{"two"}, ask(near))
	two.change(3, apiRecord+"one!,two check=tcp")
	require.Equal(t, []string{"two"}, ask(far))

	t.Log("the backend returns")
	one.change(3, apiRecord+"one!,two check=tcp")
	one.requireNoReport()
	l.greet(backend, "one", 8080)
	one.awaitReport("one", true)
	require.Equal(t, []string{"one", "two"}, ask(near))
	require.Zero(t, one.Counts().Repairs, "%s", one.log)
}

// awaitReport waits until the host reports the health of a backend and has applied it.
func (h *labHost) awaitReport(port cloud.PortID, healthy bool) {
	h.lab.Helper()
	want := cloud.BackendHealth{VPC: "shop", Service: "api", Port: port, Healthy: healthy}
	require.Eventually(h.lab, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.reports) > 0 && slices.Equal(h.reports[len(h.reports)-1], []cloud.BackendHealth{want})
	}, wait, 5*time.Millisecond, "host %s did not report %v", h.node, want)
}

// requireNoReport requires that the host reports nothing when it applies the VPC the next time.
func (h *labHost) requireNoReport() {
	h.lab.Helper()
	h.mu.Lock()
	h.reports = nil
	h.mu.Unlock()
	before := h.Counts().Applied
	require.Eventually(h.lab, func() bool { return h.Counts().Applied >= before+2 }, wait, 5*time.Millisecond)
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Empty(h.lab, h.reports)
}

// hearsItself reports whether the device eth0 in a namespace receives a broadcast frame that it sends.
func (l *lab) hearsItself(in, address string) bool {
	l.Helper()
	heard := false
	require.NoError(l, l.in(in, func() error {
		link, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		const protocol = unix.ETH_P_ARP>>8 | unix.ETH_P_ARP&0xff<<8 // in network byte order
		socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
		if err != nil {
			return err
		}
		defer unix.Close(socket)
		limit := unix.Timeval{Sec: 1}
		if err := unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
			return err
		}
		ip := netip.MustParseAddr(address).AsSlice()
		broadcast := []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
		arp := []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 1} // the type of the frame, and the beginning of a request (RFC 826)
		frame := slices.Concat(broadcast, link.HardwareAddr, arp, link.HardwareAddr, ip, broadcast, ip)
		to := &unix.SockaddrLinklayer{Ifindex: link.Index}
		if err := unix.Sendto(socket, frame, 0, to); err != nil {
			return err
		}
		buffer := make([]byte, 100)
		for {
			_, from, err := unix.Recvfrom(socket, buffer, 0)
			if err != nil {
				return nil // the time has passed
			}
			sender, ok := from.(*unix.SockaddrLinklayer)
			heard = heard || ok && sender.Ifindex == link.Index && sender.Pkttype == unix.PACKET_BROADCAST
		}
	}))
	return heard
}

// requireName requires that the DNS server of subnet s1 returns an address for a name.
func (l *lab) requireName(from, name, address string) {
	l.Helper()
	wire := &dns.Conn{Conn: l.dialUDP(from, "10.0.1.1:53")}
	require.NoError(l, wire.SetDeadline(time.Now().Add(wait)))
	require.NoError(l, wire.WriteMsg(new(dns.Msg).SetQuestion(name, dns.TypeA)))
	answer, err := wire.ReadMsg()
	require.NoError(l, err)
	require.Len(l, answer.Answer, 1, "%s", answer)
	require.Equal(l, address, answer.Answer[0].(*dns.A).A.String())
}
