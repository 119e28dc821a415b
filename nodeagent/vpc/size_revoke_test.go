package vpc

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// pair is a client and a server with a UDP and a TCP connection, on which both sides send all the time.
type pair struct {
	number         int
	client, server cloudPort
	// The streams of datagrams from the client and from the server.
	there, back numbered
	tcp         [2]*net.TCPConn
	// wires record TCP segments with data at the client and at the server.
	wires [2]*nettest.Recorder
	// sent and repeated are the values at the call of revoked: the numbers of the last datagrams that were sent, and of
	// the TCP segments that each side had retransmitted.
	sent     [2]uint64
	repeated [2]uint32
	stop     chan struct{}
	done     sync.WaitGroup
}

// cloudPort is a port with the name of its guest's namespace.
type cloudPort struct {
	id, namespace string
	address       netip.Addr
}

// numbered is a stream of numbered datagrams.
type numbered struct{ sent, received atomic.Uint64 }

const pairUDPPort, pairTCPPort = 5000, 5001

// lines returns the records that permit the connections of a pair: the client's group permits only outgoing packets,
// so the server can only answer.
func (p *pair) lines() []string {
	at := func(c *cloudPort, group string) string {
		return fmt.Sprintf("port %s vpc=big subnet=s1 at=%s node=n1 groups=%s gen=1", c.id, c.address, group)
	}
	return []string{
		fmt.Sprintf("group client%d any->", p.number),
		fmt.Sprintf("group server%d any-> any<-client%d", p.number, p.number),
		at(&p.client, fmt.Sprint("client", p.number)), at(&p.server, fmt.Sprint("server", p.number)),
	}
}

// revocations are the ways in which a pair loses its permission.
var revocations = []struct {
	name string
	line func(*pair) string
}{
	{"ingress rule", func(p *pair) string { return fmt.Sprintf("group server%d any->", p.number) }},
	{"egress rule", func(p *pair) string { return fmt.Sprintf("group client%d icmp->", p.number) }},
	{"member of a remote group", func(p *pair) string {
		return fmt.Sprintf("port %s vpc=big subnet=s1 at=%s node=n1 groups=closed gen=1", p.client.id, p.client.address)
	}},
	{"group of a port", func(p *pair) string {
		return fmt.Sprintf("port %s vpc=big subnet=s1 at=%s node=n1 groups=closed gen=1", p.server.id, p.server.address)
	}},
}

// newPair makes the ports of a pair and attaches their guests.
func (m *manyPorts) newPair(number int) *pair {
	p := &pair{number: number}
	for i, c := range []*cloudPort{&p.client, &p.server} {
		c.id = fmt.Sprintf("p%s%d", []string{"c", "s"}[i], number)
		c.address = netip.AddrFrom4([4]byte{10, 0, 1, byte(210 + 2*number + i)})
	}
	m.update(p.lines()...)
	p.client.namespace = m.prefix + m.labHost.endpoint(cloud.PortID(p.client.id))
	p.server.namespace = m.prefix + m.labHost.endpoint(cloud.PortID(p.server.id))
	for i, namespace := range []string{p.client.namespace, p.server.namespace} {
		p.wires[i] = nettest.Record(m.lab.T, namespace)
	}
	return p
}

// open makes the connections, and begins to send on them in both directions.
func (p *pair) open(t *testing.T) {
	t.Helper()
	p.stop = make(chan struct{})
	to := netip.AddrPortFrom(p.server.address, pairUDPPort)
	var near, far *net.UDPConn
	require.NoError(t, nsthread.InNamed(p.server.namespace, func() (err error) {
		far, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(to))
		return err
	}))
	require.NoError(t, nsthread.InNamed(p.client.namespace, func() (err error) {
		near, err = net.ListenUDP("udp4", &net.UDPAddr{IP: p.client.address.AsSlice(), Port: pairUDPPort})
		return err
	}))
	from := netip.AddrPortFrom(p.client.address, pairUDPPort)
	p.done.Go(func() { p.there.run(near, far, to, p.stop) })
	// The client is the first to send: the server may only answer.
	p.there.flowing(t, p.number)
	p.done.Go(func() { p.back.run(far, near, from, p.stop) })
	p.back.flowing(t, p.number)
	p.dial(t)
	p.done.Go(func() {
		<-p.stop
		near.Close()
		far.Close()
		for _, conn := range p.tcp {
			conn.Close()
		}
	})
}

// dial opens the TCP connection, on which both sides send until the pair is closed.
func (p *pair) dial(t *testing.T) {
	t.Helper()
	address := &net.TCPAddr{IP: p.server.address.AsSlice(), Port: pairTCPPort}
	var listener *net.TCPListener
	require.NoError(t, nsthread.InNamed(p.server.namespace, func() (err error) {
		listener, err = net.ListenTCP("tcp4", address)
		return err
	}))
	defer listener.Close()
	require.NoError(t, nsthread.InNamed(p.client.namespace, func() (err error) {
		p.tcp[0], err = net.DialTCP("tcp4", nil, address)
		return err
	}))
	require.NoError(t, listener.SetDeadline(time.Now().Add(wait)))
	var err error
	p.tcp[1], err = listener.AcceptTCP()
	require.NoError(t, err)
	var arrived [2]atomic.Uint64
	for i, conn := range p.tcp {
		p.done.Go(func() {
			for {
				select {
				case <-p.stop:
					return
				case <-time.After(2 * time.Millisecond):
				}
				// A revoked connection must not block the sender.
				_ = conn.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
				_, _ = conn.Write(make([]byte, 600))
			}
		})
		p.done.Go(func() {
			block := make([]byte, 4096)
			for {
				n, err := conn.Read(block)
				if err != nil {
					return
				}
				arrived[i].Add(uint64(n))
			}
		})
	}
	for i := range arrived {
		flows := func() bool { return arrived[i].Load() > 2000 }
		require.Eventually(t, flows, wait, time.Millisecond, "pair %d, TCP", p.number)
	}
}

// run sends and receives datagrams until stop is closed. The caller must then close the sockets.
func (n *numbered) run(from, to *net.UDPConn, address netip.AddrPort, stop chan struct{}) {
	var receiver sync.WaitGroup
	receiver.Go(func() {
		buffer := make([]byte, 100)
		for {
			size, err := to.Read(buffer)
			if err != nil {
				return
			}
			if size == 8 {
				n.received.Store(max(n.received.Load(), binary.BigEndian.Uint64(buffer)))
			}
		}
	})
	for {
		select {
		case <-stop:
			receiver.Wait()
			return
		case <-time.After(2 * time.Millisecond):
		}
		_, _ = from.WriteToUDPAddrPort(binary.BigEndian.AppendUint64(nil, n.sent.Add(1)), address)
	}
}

func (n *numbered) flowing(t *testing.T, pair int) {
	t.Helper()
	now := n.sent.Load()
	require.Eventually(t, func() bool { return n.received.Load() > now }, wait, time.Millisecond, "pair %d, UDP", pair)
}

// retransmits returns how many TCP segments each side has retransmitted.
func (p *pair) retransmits(t *testing.T) (counts [2]uint32) {
	t.Helper()
	for i, conn := range p.tcp {
		raw, err := conn.SyscallConn()
		require.NoError(t, err)
		require.NoError(t, raw.Control(func(fd uintptr) {
			info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			require.NoError(t, err)
			counts[i] = info.Total_retrans
		}))
	}
	return counts
}

// revoked stores what was sent before the permission of the pair was revoked. It waits until the packets that had
// passed the packet filter before have arrived.
func (p *pair) revoked(t *testing.T) {
	t.Helper()
	p.sent = [2]uint64{p.there.sent.Load(), p.back.sent.Load()}
	require.Eventually(t, func() bool { return p.there.sent.Load() > p.sent[0]+10 }, wait, time.Millisecond)
	p.wires[0].TCPData(pairTCPPort)
	p.wires[1].TCPData(pairTCPPort)
	p.repeated = p.retransmits(t)
}

// late returns a text for each connection of the pair on which packets have arrived that were sent after the call of
// revoked. It first waits until both sides have sent more datagrams and have retransmitted TCP segments.
func (p *pair) late(t *testing.T) (late []string) {
	t.Helper()
	segments := 0
	require.Eventually(t, func() bool {
		now := p.retransmits(t)
		segments += p.wires[0].TCPData(pairTCPPort) + p.wires[1].TCPData(pairTCPPort)
		return segments > 0 || now[0] > p.repeated[0] && now[1] > p.repeated[1] &&
			p.there.sent.Load() > p.sent[0]+50 && p.back.sent.Load() > p.sent[1]+50
	}, wait, time.Millisecond, "pair %d does not send any more", p.number)
	if segments > 0 {
		late = append(late, fmt.Sprintf("pair %d: %d TCP segments", p.number, segments))
	}
	for i, n := range []*numbered{&p.there, &p.back} {
		if received := n.received.Load(); received > p.sent[i] {
			late = append(late, fmt.Sprintf("pair %d, UDP direction %d: datagram %d, which was sent after %d",
				p.number, i, received, p.sent[i]))
		}
	}
	return late
}

func (p *pair) close() {
	close(p.stop)
	p.done.Wait()
}

// revoke makes the given number of revocations while both sides of each pair send. It returns the packets that arrive
// although they were sent after the host has acknowledged the revocation.
func (m *manyPorts) revoke(count int) (late []string) {
	t := m.lab.T
	pairs := make([]*pair, 10)
	for i := range pairs {
		pairs[i] = m.newPair(i)
	}
	for made := 0; made < count; {
		var grants []string
		for _, p := range pairs {
			grants = append(grants, p.lines()...)
		}
		m.update(grants...)
		for _, p := range pairs {
			p.open(t)
		}
		for _, p := range pairs {
			way := revocations[made%len(revocations)]
			m.update(way.line(p))
			p.revoked(t)
			made++
		}
		for _, p := range pairs {
			late = append(late, p.late(t)...)
			p.close()
		}
	}
	return late
}

// TestRevocations revokes permissions (TRIVET_VPC_PORTS, default 30) of connections over UDP and TCP, in four ways,
// while both sides send. No packet arrives that is sent after the acknowledgment. The datagrams of other ports all
// arrive.
func TestRevocations(t *testing.T) {
	count := size(t)
	m := newManyPorts(t, 30)
	m.startQuietly()
	others := nettest.StartStreams(t, 20*time.Millisecond, m.ring()...)
	require.Empty(t, m.revoke(count))
	others.Flow()
	others.RequireComplete()
}

// TestDriftAmongPorts changes one thing of each kind by hand. The agent repairs it within one resync, and changes
// nothing else: the datagrams between other ports all arrive.
func TestDriftAmongPorts(t *testing.T) {
	m := newManyPorts(t, size(t))
	last := subnetOf(m.count) + 1
	m.update(fmt.Sprintf("subnet s%d vpc=big net=%d", last, last),
		fmt.Sprintf("port pd vpc=big subnet=s%d at=10.0.%d.10 node=n1 groups=drift gen=1", last, last),
		fmt.Sprintf("port pf vpc=big subnet=s%d at=10.0.%d.11 node=n2 groups=drift gen=1", last, last),
		"group drift any-> tcp/80<-drift tcp/81<-closed")
	m.startQuietly()
	m.labHost.endpoint("pd")
	namespace := m.vpcName("big")
	in := func(format string, args ...any) string {
		words := append([]string{"netns", "exec", m.prefix + namespace}, strings.Fields(fmt.Sprintf(format, args...))...)
		return m.run("ip", words...)
	}
	bridge, vxlan := fmt.Sprint("br", 100+last), fmt.Sprint("vx", 100+last)
	far, mac := fmt.Sprintf("10.0.%d.11", last), fmt.Sprintf("02:00:0a:00:%02x:0b", last)
	state := func() string { return m.state(m.labHost, "big") + "\n" + members(in("ipset save")) }
	before := state()
	set := setWith(t, in("ipset save"), fmt.Sprintf("10.0.%d.10", last))
	others := nettest.StartStreams(t, 20*time.Millisecond, m.ring()...)
	writes := nettest.WatchWrites(t, m.prefix+namespace)
	const many = 40 // more than the messages for one object of each kind
	for _, c := range []struct {
		name   string
		damage func()
		most   int // messages of the damage and of its repair
	}{
		{"rule added", func() { in("iptables-nft -I trivet-forward 1 -s 10.99.0.0/16 -j ACCEPT") }, 4 * many},
		{"rule deleted", func() {
			in("iptables-nft -D %s", ruleWith(t, in("iptables-nft-save -t filter"), "--dport 81 "))
		}, 4 * many},
		{"set member deleted", func() { in("ipset del %s 10.0.%d.10", set, last) }, many},
		{"set member added", func() { in("ipset add %s 10.0.%d.99", set, last) }, many},
		{"FDB entry deleted", func() { in("bridge fdb delete %s dev %s self", mac, vxlan) }, many},
		{"neighbour deleted", func() { in("ip neigh delete %s dev %s", far, bridge) }, many},
		{"sysctl", func() { in("sysctl -q -w net.netfilter.nf_conntrack_tcp_loose=1") }, many},
		{"sysctl of a bridge", func() { in("sysctl -q -w net.ipv4.conf.%s.send_redirects=1", bridge) }, many},
		{"link down", func() { in("ip link set %s down", DeviceName("pd")) }, many},
		{"bridge deleted", func() { in("ip link delete %s", bridge) }, 4 * many},
	} {
		writes.Take()
		repairs := m.Counts().Repairs
		c.damage()
		require.Eventually(t, func() bool { return m.Counts().Repairs > repairs }, wait, 5*time.Millisecond, c.name)
		same := func(t *assert.CollectT) { require.Equal(t, before, state()) }
		require.EventuallyWithT(t, same, wait, 10*time.Millisecond, c.name)
		require.Equal(t, repairs+1, m.Counts().Repairs, "%s: one resync must be enough: %s", c.name, m.log)
		require.Equal(t, "0", strings.TrimSpace(in("sysctl -n net.netfilter.nf_conntrack_tcp_loose")), c.name)
		require.Equal(t, "0", strings.TrimSpace(in("sysctl -n net.ipv4.conf.%s.send_redirects", bridge)), c.name)
		require.LessOrEqual(t, len(writes.Take()), c.most, c.name)
		others.Flow()
	}
	others.RequireComplete()
}

// ruleWith returns the rule that contains a text, as the argument of iptables -D, from the output of iptables-save.
func ruleWith(t *testing.T, save, text string) string {
	for line := range strings.Lines(save) {
		if rule, ok := strings.CutPrefix(line, "-A "); ok && strings.Contains(rule, text) {
			return rule
		}
	}
	t.Fatalf("no rule contains %q: %s", text, save)
	return ""
}

// members returns the sets and members in the output of `ipset save`, sorted.
func members(save string) string {
	lines := strings.Split(save, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// setWith returns the name of a set with a member, from the output of `ipset save`.
func setWith(t *testing.T, save, member string) string {
	for line := range strings.Lines(save) {
		if words := strings.Fields(line); len(words) >= 3 && words[0] == "add" && words[2] == member {
			return words[1]
		}
	}
	t.Fatalf("no set has the member %s: %s", member, save)
	return ""
}
