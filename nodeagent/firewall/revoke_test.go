package firewall

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// listenUDP opens a UDP socket in the namespace of an endpoint.
func listenUDP(t *testing.T, e *endpoint, port uint16, ipv6 bool) *net.UDPConn {
	t.Helper()
	a := e.port.IP
	if ipv6 {
		a = e.port.IP6
	}
	var socket *net.UDPConn
	require.NoError(t, nsthread.In(e.ns, func() (err error) {
		socket, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, port)))
		return err
	}))
	t.Cleanup(func() { socket.Close() })
	return socket
}

// A stream sends burst datagrams, then pauses. It sends many during a Set, but leaves the processors to the Set.
const (
	burst       = 10
	streamPause = 50 * time.Microsecond
)

// stream sends numbered datagrams, and records the highest number that arrives.
type stream struct {
	sent     atomic.Uint64 // number of the datagram that is being sent
	received atomic.Uint64 // highest number that has arrived
	to       *net.UDPConn
	stop     chan struct{}
	done     sync.WaitGroup // the sender and the receiver
}

func startStream(t *testing.T, from, to *net.UDPConn) *stream {
	t.Helper()
	s := &stream{to: to, stop: make(chan struct{})}
	destination := to.LocalAddr().(*net.UDPAddr).AddrPort()
	s.done.Go(func() {
		for {
			select {
			case <-s.stop:
				return
			case <-time.After(streamPause):
			}
			for range burst {
				// An error, such as of a full queue or a refused earlier datagram, is the same as a lost datagram.
				_, _ = from.WriteToUDPAddrPort(binary.BigEndian.AppendUint64(nil, s.sent.Add(1)), destination)
			}
		}
	})
	s.done.Go(func() {
		buffer := make([]byte, 100)
		for {
			n, err := to.Read(buffer)
			if err != nil {
				return // the deadline that end sets, or the cleanup of the test
			}
			if n == 8 {
				s.received.Store(max(s.received.Load(), binary.BigEndian.Uint64(buffer)))
			}
		}
	})
	t.Cleanup(s.end)
	return s
}

// end ends the sender and the receiver. Other streams may use the sockets afterwards.
func (s *stream) end() {
	select {
	case <-s.stop:
		return
	default:
	}
	close(s.stop)
	_ = s.to.SetReadDeadline(time.Now()) // fails if the socket is closed, which ends the receiver too
	s.done.Wait()
	_ = s.to.SetReadDeadline(time.Time{})
}

// flowing waits until datagrams that are sent from now on arrive.
func (s *stream) flowing(t *testing.T) {
	t.Helper()
	now := s.sent.Load()
	arrives := func() bool { return s.received.Load() > now }
	require.Eventually(t, arrives, patience, time.Millisecond, "the stream does not arrive")
}

// stopped checks that no datagram arrives that is sent from now on. It returns after 2,000 of them.
func (s *stream) stopped(t *testing.T) {
	t.Helper()
	now := s.sent.Load()
	require.Eventually(t, func() bool { return s.sent.Load() > now+2000 }, patience, time.Millisecond)
	require.LessOrEqual(t, s.received.Load(), now, "datagrams arrive after the permission was revoked")
}

// revocations are the ways in which a connection from client to server loses its permission.
func revocations(l *lab, client, server *endpoint) map[string]struct{ grant, revoke func() } {
	rule := cloud.Rule{Direction: cloud.Ingress, AnyProtocol: true, Group: "friends"}
	rule6 := rule
	rule6.IPv6 = true
	friends := func() { l.members("friends", client.port.IP, client.port.IP6) }
	grant := func() {
		l.group("server", rule, rule6)
		l.group("client", allowAll(cloud.Egress)...)
		friends()
		l.change(server, func(p *cloud.HostPort) { p.Groups = []cloud.SecurityGroupID{"server"} })
		l.change(client, func(p *cloud.HostPort) { p.Groups = []cloud.SecurityGroupID{"client"} })
	}
	return map[string]struct{ grant, revoke func() }{
		"ingress rule deleted":     {grant, func() { l.group("server") }},
		"egress rule deleted":      {grant, func() { l.group("client", allowAll(cloud.Ingress)...) }},
		"member left remote group": {grant, func() { l.members("friends") }},
		"server's port lost group": {grant, func() { l.change(server, func(p *cloud.HostPort) { p.Groups = nil }) }},
		"client's port got another": {grant, func() {
			l.group("ingress", allowAll(cloud.Ingress)...)
			l.change(client, func(p *cloud.HostPort) { p.Groups = []cloud.SecurityGroupID{"ingress"} })
		}},
	}
}

// TestRevokeUDP revokes the permission of a stream of datagrams in each way, while datagrams flow in both directions of
// the connection.
func TestRevokeUDP(t *testing.T) {
	for _, ipv6 := range []bool{false, true} {
		for _, subnet := range []int{0, 1} {
			t.Run(fmt.Sprintf("ipv6=%t routed=%t", ipv6, subnet == 1), func(t *testing.T) {
				t.Parallel()
				testRevokeUDP(t, subnet, ipv6, (*lab).set)
			})
		}
	}
}

// testRevokeUDP grants and revokes a permission by calls of apply. The server is in the subnet with the index subnet,
// and the client in the first subnet.
func testRevokeUDP(t *testing.T, subnet int, ipv6 bool, apply func(*lab, *testing.T) Result) {
	l := newLab(t)
	client, server := l.add(t, 0, 5), l.add(t, subnet, 6)
	client.configure(t, l)
	server.configure(t, l)
	there, back := listenUDP(t, client, 4000, ipv6), listenUDP(t, server, 5000, ipv6)
	requests := startStream(t, there, back)
	for name, c := range revocations(l, client, server) {
		c.grant()
		apply(l, t)
		requests.flowing(t)
		replies := startStream(t, back, there)
		replies.flowing(t)
		c.revoke()
		r := apply(l, t)
		requests.stopped(t)
		replies.stopped(t)
		require.NotZero(t, r.Revoked, name)
		require.Zero(t, l.set(t).Writes, name)
		replies.end()
	}
}

// dial opens a TCP connection between two endpoints.
func dial(t *testing.T, client, server *endpoint, ipv6 bool) (net.Conn, net.Conn) {
	t.Helper()
	a := server.port.IP
	if ipv6 {
		a = server.port.IP6
	}
	var listener net.Listener
	require.NoError(t, nsthread.In(server.ns, func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(a, 0).String())
		return err
	}))
	defer listener.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		conn, _ := listener.Accept()
		accepted <- conn
	}()
	var conn net.Conn
	require.NoError(t, nsthread.In(client.ns, func() (err error) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", listener.Addr().String())
		return err
	}))
	other := <-accepted
	require.NotNil(t, other)
	t.Cleanup(func() { conn.Close(); other.Close() })
	return conn, other
}

// TestRevokeTCP revokes the permission of TCP connections in each way, while both ends send. Afterwards both ends
// repeat their segments, none of which may arrive.
func TestRevokeTCP(t *testing.T) {
	for _, ipv6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("ipv6=%t", ipv6), func(t *testing.T) {
			t.Parallel()
			testRevokeTCP(t, ipv6)
		})
	}
}

func testRevokeTCP(t *testing.T, ipv6 bool) {
	l := newLab(t)
	client, server := l.add(t, 0, 5), l.add(t, 0, 6)
	client.configure(t, l)
	server.configure(t, l)
	wires := []*wire{openWire(t, client.ns, "eth0"), openWire(t, server.ns, "eth0")}
	for name, c := range revocations(l, client, server) {
		c.grant()
		// The client may receive everything too. Otherwise the client's ingress rules would drop the server's segments,
		// whether or not they begin a connection.
		l.group("client", allowAll(cloud.Ingress, cloud.Egress)...)
		l.group("server", append(l.rules("server"), allowAll(cloud.Egress)...)...)
		l.set(t)
		near, far := dial(t, client, server, ipv6)
		var bytes [2]atomic.Int64
		for i, pair := range [][2]net.Conn{{near, far}, {far, near}} {
			go func() {
				block := []byte(strings.Repeat("x", 1000))
				for {
					if _, err := pair[0].Write(block); err != nil {
						return
					}
				}
			}()
			go func() {
				block := make([]byte, 100_000)
				for {
					n, err := pair[1].Read(block)
					if err != nil {
						return
					}
					bytes[i].Add(int64(n))
				}
			}()
		}
		flows := func() bool { return bytes[0].Load() > 1e6 && bytes[1].Load() > 1e6 }
		require.Eventually(t, flows, patience, time.Millisecond)
		c.revoke()
		r := l.set(t)
		require.NotZero(t, r.Revoked, name)
		dropped := func() uint64 { d := l.drops(t); return d.Group + d.Invalid }
		first := dropped()
		settle(t, wires, "%s: segments arrive after the permission was revoked", name)
		arrived := segments(wires)
		// Three more drops are the repeated segments of both ends.
		repeated := func() bool { return dropped() >= first+3 || segments(wires) != arrived }
		require.Eventually(t, repeated, patience, time.Millisecond, name)
		require.Equal(t, arrived, segments(wires), "%s: segments arrive after the permission was revoked", name)
		near.Close()
		far.Close()
	}
}

// rules returns the rules of a group.
func (l *lab) rules(id cloud.SecurityGroupID) []cloud.Rule {
	for _, g := range l.vpc.Groups {
		if g.ID == id {
			return g.Rules
		}
	}
	return nil
}

// segments returns the number of TCP segments with data that the devices have received.
func segments(wires []*wire) int {
	n := 0
	for _, w := range wires {
		n += w.Count(func(frame []byte) bool { return len(frame) > 500 })
	}
	return n
}

// settle waits until the recorders have handled all frames that arrived before the call. It fails with the message if
// frames continue to arrive.
func settle(t *testing.T, wires []*wire, message ...any) {
	t.Helper()
	for _, w := range wires {
		last := -1
		require.Eventually(t, func() bool {
			before := last
			last = frames(w)
			return before == last
		}, patience, 100*time.Millisecond, message...)
	}
}

// frames returns the number of frames that the wire has received.
func frames(w *wire) int { return w.Count(func([]byte) bool { return true }) }

// TestRevokeICMP checks that an exchange of ICMP queries ends when the rule for their type is deleted, and not when
// another rule changes.
func TestRevokeICMP(t *testing.T) {
	s := newCallStage(t)
	s.group("out", allowAll(cloud.Egress)...)
	client, server := s.add(t, 0, 5, "out"), s.add(t, 0, 6, "in")
	for _, c := range []struct {
		ipv6       bool
		protocol   uint8
		typ, reply uint8
	}{{false, cloud.ProtocolICMP, 8, 0}, {true, cloud.ProtocolICMPv6, 128, 129}} {
		rule := cloud.Rule{Direction: cloud.Ingress, IPv6: c.ipv6, Protocol: c.protocol,
			ICMP: &cloud.ICMP{Type: c.typ, AnyCode: true}}
		other := rule
		other.ICMP = &cloud.ICMP{Type: 13, AnyCode: true}
		s.group("in", rule)
		s.set(t)
		require.Equal(t, "arrives", s.verdict(t, call{client, server, c.ipv6, icmpOf(c.typ, 0)}))
		s.group("in", rule, other)
		require.Zero(t, s.set(t).Revoked)
		require.Equal(t, "arrives", s.verdict(t, call{server, client, c.ipv6, icmpOf(c.reply, 0)}), "the reply")
		s.group("in", other)
		require.Equal(t, 1, s.set(t).Revoked)
		require.Equal(t, "group", s.verdict(t, call{client, server, c.ipv6, icmpOf(c.typ, 0)}))
		require.NotEqual(t, "arrives", s.verdict(t, call{server, client, c.ipv6, icmpOf(c.reply, 0)}), "the reply")
	}
}

// TestRevokeTranslated checks connections to a service address, whose destination the kernel translates.
func TestRevokeTranslated(t *testing.T) {
	s := newCallStage(t)
	s.group("out", allowAll(cloud.Egress)...)
	rule := cloud.Rule{Direction: cloud.Ingress, Protocol: cloud.ProtocolUDP,
		Ports: cloud.PortRange{First: 8080, Last: 8080}}
	s.group("in", rule)
	client, server := s.add(t, 0, 5, "out"), s.add(t, 1, 6, "in")
	runIn(t, s.ns, "", "iptables-nft", "-t", "nat", "-A", "PREROUTING", "-d", "10.0.9.9", "-p", "udp", "--dport", "80",
		"-j", "DNAT", "--to", at(server.port.IP, 8080).String())
	s.set(t)
	service := func(source, _ netip.Addr, tag string) []byte {
		return udp(at(source, 4000), at(parseAddr("10.0.9.9"), 80), tag)
	}
	require.Equal(t, "arrives", s.verdict(t, call{client, server, false, service}))
	require.Equal(t, Result{}, s.set(t))
	s.group("in")
	require.Equal(t, 1, s.set(t).Revoked)
	require.Equal(t, "group", s.verdict(t, call{client, server, false, service}))
}
