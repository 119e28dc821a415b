package resolver

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// The tests in this file use network namespaces of the real kernel: one for a VPC, whose gateway addresses are on its
// ends of veth pairs, and one for each guest.

var discardLog = slog.New(slog.DiscardHandler)

const (
	patience = 20 * time.Second // limit of every wait
	poll     = 20 * time.Millisecond
	silence  = 300 * time.Millisecond // how long a test waits for an answer that must not come
)

// newNamespace makes a network namespace that is removed with the test, and returns its name and a handle.
func newNamespace(t *testing.T, suffix string) (string, *netlink.Handle) {
	require.Zero(t, os.Getuid(), "this test makes network namespaces: run it as root")
	name := fmt.Sprintf("dnstest-%d-%s", os.Getpid(), suffix)
	require.NoError(t, exec.Command("ip", "netns", "add", name).Run())
	t.Cleanup(func() { netns.DeleteNamed(name) })
	ns, err := netns.GetFromName(name)
	require.NoError(t, err)
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	require.NoError(t, err)
	t.Cleanup(h.Close)
	return name, h
}

func setSysctl(t *testing.T, namespace, path, value string) {
	require.NoError(t, nsthread.InNamed(namespace, func() error {
		return os.WriteFile(filepath.Join("/proc/sys/net", path), []byte(value), 0)
	}))
}

// configure sets the addresses of a device and sets it up.
func configure(t *testing.T, namespace string, h *netlink.Handle, device string, prefixes ...string) {
	link, err := h.LinkByName(device)
	require.NoError(t, err)
	for _, p := range prefixes {
		a, err := netlink.ParseAddr(p)
		require.NoError(t, err)
		a.Flags |= unix.IFA_F_NODAD
		require.NoError(t, h.AddrAdd(link, a))
	}
	require.NoError(t, h.LinkSetUp(link))
}

// addGuest connects a guest to the VPC and returns its namespace. The guest's default routes lead to the gateways.
func addGuest(t *testing.T, vpc string, h *netlink.Handle, suffix string, gateways, own []string) string {
	name, guest := newNamespace(t, suffix)
	ns, err := netns.GetFromName(name)
	require.NoError(t, err)
	defer ns.Close()
	require.NoError(t, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: suffix}, PeerName: "eth0", PeerNamespace: netlink.NsFd(ns)}))
	configure(t, vpc, h, suffix, gateways...)
	configure(t, name, guest, "eth0", own...)
	eth0, err := guest.LinkByName("eth0")
	require.NoError(t, err)
	for _, g := range gateways {
		p := netip.MustParsePrefix(g)
		require.NoError(t, guest.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: net.IP(p.Addr().AsSlice())}))
	}
	return name
}

// query asks a server from within a namespace.
func query(t *testing.T, namespace, network, server, name string, kind uint16, change ...func(*dns.Msg)) (*dns.Msg, error) {
	return queryFor(t, patience, namespace, network, server, name, kind, change...)
}

// queryFor is query with a limit of the wait.
func queryFor(t *testing.T, limit time.Duration, namespace, network, server, name string, kind uint16, change ...func(*dns.Msg)) (*dns.Msg, error) {
	m := new(dns.Msg).SetQuestion(name, kind)
	for _, f := range change {
		f(m)
	}
	client := dns.Client{Net: network, Timeout: limit}
	var conn *dns.Conn
	if err := nsthread.InNamed(namespace, func() (err error) {
		conn, err = client.Dial(net.JoinHostPort(server, "53"))
		return err
	}); err != nil {
		return nil, err
	}
	defer conn.Close()
	reply, _, err := client.ExchangeWithConn(m, conn)
	return reply, err
}

type lab struct {
	vpc, guest, outside string
	h                   *netlink.Handle
	server              *Server
	view                View
}

// newLab makes a VPC with a guest, and with a device outside of its prefixes that can reach it.
func newLab(t *testing.T, upstreams ...netip.AddrPort) *lab {
	l := &lab{view: testView()}
	l.vpc, l.h = newNamespace(t, "vpc")
	setSysctl(t, l.vpc, "ipv4/ip_forward", "1")
	setSysctl(t, l.vpc, "ipv6/conf/all/forwarding", "1")
	l.server = New(l.vpc, NewForwarder(func() []netip.AddrPort { return upstreams }), discardLog)
	t.Cleanup(func() { l.server.Close(context.Background()) })
	require.NoError(t, l.server.Set(t.Context(), l.view), "the addresses do not exist yet")
	l.guest = addGuest(t, l.vpc, l.h, "guest", []string{"10.0.16.1/20", "2600:1:2:3::1/64"}, []string{"10.0.16.17/20", "2600:1:2:3::11/64"})
	l.outside = addGuest(t, l.vpc, l.h, "outside", []string{"203.0.113.1/24", "2600:9::1/64"}, []string{"203.0.113.7/24", "2600:9::7/64"})
	return l
}

func TestServer(t *testing.T) {
	upstream := newUpstream(t, good(100))
	l := newLab(t, upstream.address)
	for _, server := range []string{"10.0.16.1", "2600:1:2:3::1"} {
		for _, network := range []string{"udp", "tcp"} {
			t.Run(network+" "+server, func(t *testing.T) {
				m, err := query(t, l.guest, network, server, "web.shop.internal.", dns.TypeA)
				require.NoError(t, err)
				require.Equal(t, "NOERROR authoritative\nanswer: web.shop.internal. 15 IN A 10.0.16.17\n", describe(m))
				m, err = query(t, l.guest, network, server, "17.16.0.10.in-addr.arpa.", dns.TypePTR)
				require.NoError(t, err)
				require.Len(t, m.Answer, 1)

				m, err = query(t, l.guest, network, server, "many.example.", dns.TypeA)
				require.NoError(t, err)
				require.Equal(t, network == "udp", m.Truncated)
				if network == "tcp" {
					require.Len(t, m.Answer, 100)
				}
				require.Nil(t, m.IsEdns0(), "the client did not use it, and has a buffer of 512 bytes")
				m, err = query(t, l.guest, network, server, "many.example.", dns.TypeA, func(m *dns.Msg) { m.SetEdns0(4096, false) })
				require.NoError(t, err)
				require.Equal(t, network == "udp", m.Truncated)
				require.NotNil(t, m.IsEdns0())
				require.Greater(t, len(m.Answer), 50, "more than without EDNS0")
			})
		}
	}
	require.Equal(t, int32(1), upstream.udp.Load(), "then from the cache")
	require.Equal(t, int32(1), upstream.tcp.Load(), "after the truncated answer")
}

// TestOutside checks that addresses outside of the VPC get no answer, not even to malformed queries.
func TestOutside(t *testing.T) {
	l := newLab(t)
	for _, server := range []string{"10.0.16.1", "2600:1:2:3::1"} {
		for _, network := range []string{"udp", "tcp"} {
			_, err := queryFor(t, silence, l.outside, network, server, "web.shop.internal.", dns.TypeA)
			require.Error(t, err, "%s %s", network, server)
		}
		_, err := queryFor(t, silence, l.outside, "udp", server, "web.shop.internal.", dns.TypeA, func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) })
		require.Error(t, err)
		_, err = query(t, l.guest, "udp", server, "web.shop.internal.", dns.TypeA)
		require.NoError(t, err, "the same query of the guest")
	}
}

// TestTCPLimit checks that a client cannot hold more than its share of TCP connections, and that closed ones do not
// count.
func TestTCPLimit(t *testing.T) {
	l := newLab(t)
	dial := func() net.Conn {
		var conn net.Conn
		require.NoError(t, nsthread.InNamed(l.guest, func() (err error) {
			conn, err = net.Dial("tcp", "10.0.16.1:53")
			return err
		}))
		return conn
	}
	var held []net.Conn
	for range clientConnections {
		held = append(held, dial())
	}
	served := func() bool {
		m, err := query(t, l.guest, "tcp", "10.0.16.1", "web.shop.internal.", dns.TypeA)
		return err == nil && len(m.Answer) == 1
	}
	require.False(t, served(), "beyond the limit")
	m, err := query(t, l.guest, "udp", "10.0.16.1", "web.shop.internal.", dns.TypeA)
	require.NoError(t, err)
	require.Len(t, m.Answer, 1, "UDP is not affected")
	for _, c := range held {
		require.NoError(t, c.Close())
	}
	require.Eventually(t, served, patience, poll)
}

func TestSet(t *testing.T) {
	l := newLab(t)
	before := l.server.listeners[address("10.0.16.1")]
	zone := l.server.zone.Load()
	require.NoError(t, l.server.Set(t.Context(), testView()))
	require.Same(t, zone, l.server.zone.Load(), "an equal view changes nothing")

	// A renamed host, and an address that is no longer one of a gateway.
	l.view.Hosts = []Host{{Name: "renamed", Addresses: []netip.Addr{address("10.0.16.17")}}}
	l.view.Listen = l.view.Listen[:1]
	require.NoError(t, l.server.Set(t.Context(), l.view))
	require.Same(t, before, l.server.listeners[address("10.0.16.1")], "the socket stays")
	m, err := query(t, l.guest, "udp", "10.0.16.1", "renamed.shop.internal.", dns.TypeA)
	require.NoError(t, err)
	require.Len(t, m.Answer, 1)
	_, err = query(t, l.guest, "tcp", "2600:1:2:3::1", "renamed.shop.internal.", dns.TypeA)
	require.Error(t, err)

	// A server that ended is started again.
	require.NoError(t, before.servers[0].Shutdown())
	require.Eventually(t, before.ended, patience, poll)
	require.NoError(t, l.server.Set(t.Context(), l.view))
	_, err = query(t, l.guest, "udp", "10.0.16.1", "renamed.shop.internal.", dns.TypeA)
	require.NoError(t, err)

	// The namespace is made again under its name.
	require.NoError(t, netns.DeleteNamed(l.vpc))
	require.ErrorContains(t, l.server.Set(t.Context(), l.view), "network namespace")
	l.vpc, l.h = newNamespace(t, "vpc")
	require.NoError(t, l.server.Set(t.Context(), l.view))
	guest := addGuest(t, l.vpc, l.h, "again", []string{"10.0.16.1/20"}, []string{"10.0.16.17/20"})
	_, err = query(t, guest, "udp", "10.0.16.1", "renamed.shop.internal.", dns.TypeA)
	require.NoError(t, err)

	l.server.Close(t.Context())
	l.server.Close(t.Context())
	require.ErrorContains(t, l.server.Set(t.Context(), l.view), "closed")
	_, err = query(t, guest, "tcp", "10.0.16.1", "renamed.shop.internal.", dns.TypeA)
	require.Error(t, err)
}

// TestMalformedQueries sends garbage to the sockets and checks that they still answer.
func TestMalformedQueries(t *testing.T) {
	l := newLab(t)
	valid, err := new(dns.Msg).SetQuestion("web.shop.internal.", dns.TypeA).Pack()
	require.NoError(t, err)
	for _, network := range []string{"udp", "tcp"} {
		for n := range valid {
			var conn net.Conn
			require.NoError(t, nsthread.InNamed(l.guest, func() (err error) {
				conn, err = net.Dial(network, "10.0.16.1:53")
				return err
			}))
			_, err := conn.Write(valid[:n])
			require.NoError(t, err)
			require.NoError(t, conn.Close())
		}
		require.Eventually(t, func() bool {
			m, err := query(t, l.guest, network, "10.0.16.1", "web.shop.internal.", dns.TypeA)
			return err == nil && len(m.Answer) == 1
		}, patience, poll)
	}
}
