package resolver

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"
	"github.com/stretchr/testify/require"
)

// upstream is a resolver of the host for tests. It listens on an address of the loopback device.
type upstream struct {
	address  netip.AddrPort
	udp, tcp atomic.Int32 // queries received
}

// newUpstream starts an upstream that answers by f; a nil answer means silence.
func newUpstream(t *testing.T, f func(udp bool, query *dns.Msg) *dns.Msg) *upstream {
	packets, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	u := &upstream{address: packets.LocalAddr().(*net.UDPAddr).AddrPort()}
	connections, err := net.Listen("tcp", u.address.String())
	require.NoError(t, err)
	for _, server := range []*dns.Server{{PacketConn: packets}, {Listener: connections}} {
		server.UDPSize = dns.MaxMsgSize
		server.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, query *dns.Msg) {
			_, udp := w.RemoteAddr().(*net.UDPAddr)
			if udp {
				u.udp.Add(1)
			} else {
				u.tcp.Add(1)
			}
			size := int(query.IsEdns0().UDPSize())
			if answer := f(udp, query); answer != nil {
				if udp {
					answer.Truncate(size)
				}
				w.WriteMsg(answer)
			}
		})
		var ended sync.WaitGroup
		started := make(chan struct{})
		server.NotifyStartedFunc = func() { close(started) }
		ended.Go(func() { server.ActivateAndServe() })
		<-started
		t.Cleanup(func() { server.Shutdown(); ended.Wait() })
	}
	return u
}

// good answers with n addresses.
func good(n int) func(bool, *dns.Msg) *dns.Msg {
	return func(_ bool, query *dns.Msg) *dns.Msg {
		m := new(dns.Msg).SetReply(query)
		for i := range n {
			m.Answer = append(m.Answer, &dns.A{A: net.IPv4(192, 0, 2, byte(i+1)),
				Hdr: dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 300}})
		}
		return m
	}
}

func silent(bool, *dns.Msg) *dns.Msg { return nil }

func failing(rcode int) func(bool, *dns.Msg) *dns.Msg {
	return func(_ bool, query *dns.Msg) *dns.Msg { return new(dns.Msg).SetRcode(query, rcode) }
}

// askAs returns the server's reply to a query of a guest.
func (s *Server) askAs(client, name string) *dns.Msg {
	return s.reply(address(client), new(dns.Msg).SetQuestion(name, dns.TypeA))
}

func TestForward(t *testing.T) {
	truncating := func(udp bool, query *dns.Msg) *dns.Msg {
		m := good(40)(udp, query)
		if udp {
			m.Answer, m.Truncated = m.Answer[:3], true
		}
		return m
	}
	onlyTruncated := func(udp bool, query *dns.Msg) *dns.Msg {
		if !udp {
			return new(dns.Msg).SetRcode(query.SetQuestion("other.example.", dns.TypeA), dns.RcodeSuccess)
		}
		return truncating(true, query)
	}
	wrongQuestion := func(udp bool, query *dns.Msg) *dns.Msg {
		m := good(1)(udp, query)
		m.Question[0].Name = "evil.example."
		return m
	}
	type handler = func(bool, *dns.Msg) *dns.Msg
	for name, c := range map[string]struct {
		upstreams []handler
		rcode     int
		answers   int
		truncated bool
		queries   []int32 // over UDP, of each upstream
	}{
		"one":                        {upstreams: []handler{good(2)}, answers: 2, queries: []int32{1}},
		"first is silent":            {upstreams: []handler{silent, good(1)}, answers: 1, queries: []int32{1, 1}},
		"first fails":                {upstreams: []handler{failing(dns.RcodeServerFailure), good(1)}, answers: 1, queries: []int32{1, 1}},
		"first refuses":              {upstreams: []handler{failing(dns.RcodeRefused), good(1)}, answers: 1, queries: []int32{1, 1}},
		"first gives a wrong answer": {upstreams: []handler{wrongQuestion, good(1)}, answers: 1, queries: []int32{1, 1}},
		"no such name":               {upstreams: []handler{failing(dns.RcodeNameError), good(1)}, rcode: dns.RcodeNameError, queries: []int32{1, 0}},
		"all fail":                   {upstreams: []handler{failing(dns.RcodeServerFailure), failing(dns.RcodeRefused)}, rcode: dns.RcodeServerFailure, queries: []int32{1, 1}},
		"silent, asked again":        {upstreams: []handler{silent}, rcode: dns.RcodeServerFailure, queries: []int32{2}},
		"none":                       {rcode: dns.RcodeServerFailure},
		"TCP after truncation":       {upstreams: []handler{truncating}, answers: 40, queries: []int32{1}},
		"truncated without TCP":      {upstreams: []handler{onlyTruncated}, answers: 3, truncated: true, queries: []int32{1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var addresses []netip.AddrPort
			var all []*upstream
			for _, f := range c.upstreams {
				all = append(all, newUpstream(t, f))
				addresses = append(addresses, all[len(all)-1].address)
			}
			m := newTestServer(testView(), addresses...).askAs("10.0.16.17", "www.example.")
			require.Equal(t, dns.RcodeToString[c.rcode], dns.RcodeToString[m.Rcode])
			require.Len(t, m.Answer, c.answers)
			require.Equal(t, c.truncated, m.Truncated)
			for i, u := range all {
				require.Equal(t, c.queries[i], u.udp.Load(), "queries of upstream %d", i)
			}
		})
	}
}

// TestForwardedQuery checks what an upstream sees of a query.
func TestForwardedQuery(t *testing.T) {
	queries := make(chan *dns.Msg, 10)
	u := newUpstream(t, func(udp bool, query *dns.Msg) *dns.Msg {
		queries <- query.Copy()
		return good(1)(udp, query)
	})
	s := newTestServer(testView(), u.address)
	request := new(dns.Msg).SetQuestion("WWW.example.", dns.TypeA)
	request.Id = 4711
	request.SetEdns0(4096, true)
	option := request.IsEdns0()
	option.Option = append(option.Option, &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 32, Address: net.IPv4(10, 0, 16, 17).To4()})
	reply := s.reply(address("10.0.16.17"), request)
	require.Equal(t, uint16(4711), reply.Id)
	require.Equal(t, "WWW.example.", reply.Question[0].Name)
	seen := <-queries
	require.True(t, seen.IsEdns0().Do())
	require.Empty(t, seen.IsEdns0().Option, "the client's address is not passed on")
	require.Equal(t, uint16(upstreamSize), seen.IsEdns0().UDPSize())
	require.NotEqual(t, request.Id, seen.Id)
}

func TestForwardCaches(t *testing.T) {
	u := newUpstream(t, good(1))
	s := newTestServer(testView(), u.address)
	for _, name := range []string{"www.example.", "WWW.example.", "www.example."} {
		require.Len(t, s.askAs("10.0.16.17", name).Answer, 1)
	}
	require.Equal(t, int32(1), u.udp.Load())
	other := newTestServer(testView(), u.address)
	other.forwarder = s.forwarder
	require.Len(t, other.askAs("10.0.16.17", "www.example.").Answer, 1)
	require.Equal(t, int32(2), u.udp.Load(), "VPCs share no cache")
}

// TestPreferredUpstream checks that an upstream that does not answer delays only the first query.
func TestPreferredUpstream(t *testing.T) {
	dead, alive := newUpstream(t, silent), newUpstream(t, good(1))
	s := newTestServer(testView(), dead.address, alive.address)
	for i := range 5 {
		require.Len(t, s.askAs("10.0.16.17", fmt.Sprintf("%d.example.", i)).Answer, 1)
	}
	require.Equal(t, int32(1), dead.udp.Load())
	require.Equal(t, int32(5), alive.udp.Load())
}

// TestConcurrentQueries checks that equal queries are sent once, that a client with too many queries is refused, and
// that other clients are not.
func TestConcurrentQueries(t *testing.T) {
	proceed := make(chan struct{})
	u := newUpstream(t, func(udp bool, query *dns.Msg) *dns.Msg {
		<-proceed
		return good(1)(udp, query)
	})
	s := newTestServer(testView(), u.address)
	var clients sync.WaitGroup
	var answered atomic.Int32
	ask := func(client, name string) {
		clients.Go(func() {
			if len(s.askAs(client, name).Answer) == 1 {
				answered.Add(1)
			}
		})
	}
	waiting := func(n int) func() bool {
		return func() bool {
			s.limits.mu.Lock()
			defer s.limits.mu.Unlock()
			return s.limits.forwarded == n
		}
	}
	for range clientForwarded {
		ask("10.0.16.17", "www.example.")
	}
	require.Eventually(t, waiting(clientForwarded), patience, poll)
	require.Equal(t, dns.RcodeRefused, s.askAs("10.0.16.17", "other.example.").Rcode)
	ask("10.0.16.18", "other.example.")
	require.Eventually(t, waiting(clientForwarded+1), patience, poll)
	require.Eventually(t, func() bool { return u.udp.Load() >= 2 }, patience, poll)
	close(proceed)
	clients.Wait()
	require.Equal(t, int32(clientForwarded+1), answered.Load())
	require.Equal(t, int32(2), u.udp.Load())
	require.Zero(t, s.limits.forwarded)
}

func TestHostLimit(t *testing.T) {
	s := newTestServer(testView(), newUpstream(t, good(1)).address)
	for range hostForwarded {
		s.forwarder.slots <- struct{}{}
	}
	require.Equal(t, dns.RcodeServerFailure, s.askAs("10.0.16.17", "www.example.").Rcode)
	<-s.forwarder.slots
	require.Equal(t, dns.RcodeSuccess, s.askAs("10.0.16.17", "www.example.").Rcode)
}
