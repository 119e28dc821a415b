package resolver

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/miekg/dns"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

func address(s string) netip.Addr { return netip.MustParseAddr(s) }

func testVPC() *cloud.HostVPC {
	return &cloud.HostVPC{
		ID: "vpc-1", CIDR: netip.MustParsePrefix("10.0.0.0/16"), CIDR6: netip.MustParsePrefix("2600:1:2::/48"),
		Subnets: []cloud.HostSubnet{{
			ID: "subnet-1", CIDR: netip.MustParsePrefix("10.0.16.0/20"), Gateway: address("10.0.16.1"),
			CIDR6: netip.MustParsePrefix("2600:1:2:3::/64"),
			Ports: []cloud.HostPort{
				{ID: "port-web", HostName: "Web", IP: address("10.0.16.17"), IP6: address("2600:1:2:3::11")},
				{ID: "port-anonymous", IP: address("10.0.16.18")},
			},
			Remotes: []cloud.RemotePort{{HostName: "db", IP: address("10.0.16.19")}},
		}},
	}
}

func testView() View {
	v := ViewOf(testVPC(), "shop.internal")
	v.Hosts = append(v.Hosts, Host{Name: "api.production", Addresses: []netip.Addr{address("10.0.16.50"), address("10.0.16.51")}})
	return v
}

// newTestServer returns a server that listens nowhere.
func newTestServer(v View, upstreams ...netip.AddrPort) *Server {
	s := New("", NewForwarder(func() []netip.AddrPort { return upstreams }), discardLog)
	s.zone.Store(newZone(v))
	return s
}

func TestViewOf(t *testing.T) {
	require.Equal(t, View{
		Listen:  []netip.Addr{address("10.0.16.1"), address("2600:1:2:3::1")},
		Clients: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("2600:1:2::/48")},
		Domain:  "shop.internal",
		Hosts: []Host{
			{Name: "Web", Addresses: []netip.Addr{address("10.0.16.17"), address("2600:1:2:3::11")}},
			{Name: "db", Addresses: []netip.Addr{address("10.0.16.19")}},
		},
	}, ViewOf(testVPC(), "shop.internal"))
}

// TestServiceNames requires that service IPs have names, and that a name is that of the port if a port and a service IP
// have the same name.
func TestServiceNames(t *testing.T) {
	vpc := testVPC()
	vpc.Services = []cloud.HostService{
		{Name: "api", Address: address("10.0.16.50")}, {Name: "web", Address: address("10.0.16.51")}, {Address: address("10.0.16.52")},
	}
	hosts := ViewOf(vpc, "shop.internal").Hosts
	require.Equal(t, ViewOf(testVPC(), "shop.internal").Hosts, hosts[:2])
	require.Equal(t, []Host{{Name: "api", Addresses: []netip.Addr{address("10.0.16.50")}}}, hosts[2:])
}

// TestResolve runs testdata/resolve. "query name type" prints the answer, or that the query is forwarded. Arguments:
// class, edns (the size that the client accepts), version (of EDNS), norecurse, notify, no-domain.
func TestResolve(t *testing.T) {
	datadriven.RunTest(t, "testdata/resolve", func(t *testing.T, d *datadriven.TestData) string {
		require.Equal(t, "query", d.Cmd)
		v := testView()
		request := new(dns.Msg).SetQuestion(dns.Fqdn(d.CmdArgs[0].Key), dns.StringToType[d.CmdArgs[1].Key])
		request.Id = 1
		for _, a := range d.CmdArgs[2:] {
			switch a.Key {
			case "class":
				request.Question[0].Qclass = dns.StringToClass[a.Vals[0]]
			case "edns":
				var size uint16
				a.Scan(t, 0, &size)
				request.SetEdns0(size, false)
			case "version":
				request.IsEdns0().SetVersion(1)
			case "two-options":
				request.SetEdns0(512, false)
			case "norecurse":
				request.RecursionDesired = false
			case "notify":
				request.Opcode = dns.OpcodeNotify
			case "no-domain":
				v.Domain = ""
			}
		}
		s := newTestServer(v)
		if _, ok := s.zone.Load().resolve(request.Question[0]); !ok && request.RecursionDesired {
			return "forwarded\n"
		}
		reply := s.reply(address("10.0.16.17"), request)
		_, err := reply.Pack()
		require.NoError(t, err)
		return describe(reply)
	})
}

// describe returns the code, the flags and the records of a reply.
func describe(m *dns.Msg) string {
	out := dns.RcodeToString[m.Rcode]
	if m.Authoritative {
		out += " authoritative"
	}
	for i, section := range [][]dns.RR{m.Answer, m.Ns, m.Extra} {
		for _, r := range section {
			text := strings.ReplaceAll(strings.TrimSpace(r.String()), "\t", " ")
			out += "\n" + []string{"answer", "authority", "additional"}[i] + ": " + strings.ReplaceAll(text, "\n", "")
		}
	}
	return out + "\n"
}

func TestParseReverse(t *testing.T) {
	for name, want := range map[string]string{
		"17.16.0.10.in-addr.arpa.":               "10.0.16.17/32",
		"16.0.10.in-addr.arpa.":                  "10.0.16.0/24",
		"10.in-addr.arpa.":                       "10.0.0.0/8",
		"0-127.2.168.192.in-addr.arpa.":          "192.168.2.0/24",
		"b._dns-sd._udp.0.16.0.10.in-addr.arpa.": "10.0.16.0/32",
		"9.17.16.0.10.in-addr.arpa.":             "10.0.16.17/32",
		"256.10.in-addr.arpa.":                   "10.0.0.0/8",
		"in-addr.arpa.":                          "",
		"x.in-addr.arpa.":                        "",
		"10.in-addr.arpa.example.":               "",
		"1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.3.0.0.0.2.0.0.0.1.0.0.0.0.0.6.2.ip6.arpa.": "2600:1:2:3::1/128",
		"0.0.6.2.ip6.arpa.": "2600::/16",
		"6.2.ip6.arpa.":     "2600::/8",
		"10.2.ip6.arpa.":    "2000::/4",
		"g.ip6.arpa.":       "",
	} {
		t.Run(name, func(t *testing.T) {
			prefix, ok := parseReverse(name)
			require.Equal(t, want != "", ok)
			if ok {
				require.Equal(t, want, prefix.String())
			}
		})
	}
	for prefix, want := range map[string]string{
		"10.1.2.3/8": "10.in-addr.arpa.", "172.20.2.3/12": "20.172.in-addr.arpa.", "10.0.16.17/32": "17.16.0.10.in-addr.arpa.",
		"fd00::1/7": "d.f.ip6.arpa.", "2600:1:2:3::1/48": "2.0.0.0.1.0.0.0.0.0.6.2.ip6.arpa.",
	} {
		p := netip.MustParsePrefix(prefix)
		require.Equal(t, want, reverseZone(p.Addr(), p.Bits()))
	}
}

// records parses records in the format of zone files.
func records(t *testing.T, lines ...string) []dns.RR {
	var all []dns.RR
	for _, line := range lines {
		r, err := dns.NewRR(line)
		require.NoError(t, err)
		all = append(all, r)
	}
	return all
}

func TestCache(t *testing.T) {
	soa := "example. 900 IN SOA ns.example. root.example. 1 2 3 4 60"
	for name, c := range map[string]struct {
		rcode      int
		truncated  bool
		answer, ns []string
		want       time.Duration
	}{
		"answer":                {answer: []string{"a.example. 300 IN A 1.2.3.4", "a.example. 200 IN A 1.2.3.5"}, want: 200 * time.Second},
		"long answer":           {answer: []string{"a.example. 86400 IN A 1.2.3.4"}, want: maxPositive},
		"TTL 0":                 {answer: []string{"a.example. 0 IN A 1.2.3.4"}},
		"truncated":             {answer: []string{"a.example. 300 IN A 1.2.3.4"}, truncated: true},
		"no data":               {ns: []string{soa}, want: time.Minute},
		"no such name":          {rcode: dns.RcodeNameError, ns: []string{soa}, want: time.Minute},
		"alias of no such name": {rcode: dns.RcodeNameError, answer: []string{"a.example. 30 IN CNAME b.example."}, ns: []string{soa}, want: 30 * time.Second},
		"negative without SOA":  {rcode: dns.RcodeNameError},
		"referral":              {ns: []string{"example. 900 IN NS ns.example."}},
		"failure":               {rcode: dns.RcodeServerFailure, ns: []string{soa}},
	} {
		t.Run(name, func(t *testing.T) {
			m := &dns.Msg{Answer: records(t, c.answer...), Ns: records(t, c.ns...)}
			m.Rcode, m.Truncated = c.rcode, c.truncated
			require.Equal(t, c.want, lifetime(m))
		})
	}

	now := time.Unix(1000, 0)
	stored := newCache()
	stored.now = func() time.Time { return now }
	key := cacheKey{name: "a.example.", kind: dns.TypeA}
	stored.put(key, &dns.Msg{Answer: records(t, "a.example. 300 IN A 1.2.3.4")})
	now = now.Add(100 * time.Second)
	require.Equal(t, uint32(200), stored.get(key).Answer[0].Header().Ttl)
	require.Nil(t, stored.get(cacheKey{name: "a.example.", kind: dns.TypeA, dnssecOK: true}))
	now = now.Add(200 * time.Second)
	require.Nil(t, stored.get(key), "expired")

	large := &dns.Msg{}
	for i := range 400 {
		large.Answer = append(large.Answer, records(t, fmt.Sprintf("a.example. 300 IN A 10.0.%d.%d", i/256, i%256))...)
	}
	stored.put(key, large)
	require.Nil(t, stored.get(key), "larger than the limit")
}

// TestManyVPCsLeaveSlots requires that VPCs whose queries are all unanswered do not keep another VPC from forwarding.
func TestManyVPCsLeaveSlots(t *testing.T) {
	f := NewForwarder(nil)
	fill := func() (taken int) {
		l := newLimits()
		for n := range byte(20) {
			for range clientForwarded {
				if _, ok := l.forward(netip.AddrFrom4([4]byte{10, 0, 1, n}), f.free()); !ok {
					return taken
				}
				require.NotZero(t, f.free())
				f.slots <- struct{}{}
				taken++
			}
		}
		return taken
	}
	require.Equal(t, vpcForwarded, fill(), "a VPC alone")
	for range 4 {
		fill()
	}
	require.GreaterOrEqual(t, fill(), clientForwarded)
}

func TestLimits(t *testing.T) {
	l := newLimits()
	one, two := address("10.0.0.1"), address("10.0.0.2")
	var ends []func()
	for range clientForwarded {
		end, ok := l.forward(one, hostForwarded)
		require.True(t, ok)
		ends = append(ends, end)
	}
	_, ok := l.forward(one, hostForwarded)
	require.False(t, ok, "the client's limit")
	_, ok = l.forward(two, hostForwarded)
	require.True(t, ok, "another client")
	_, ok = l.connect(one)
	require.True(t, ok, "another limit")
	ends[0]()
	_, ok = l.forward(one, hostForwarded)
	require.True(t, ok, "after one ended")

	for n := range byte(100) {
		for range clientConnections {
			l.connect(netip.AddrFrom4([4]byte{10, 0, 1, n}))
		}
	}
	require.Equal(t, vpcConnections, l.connections)

	admitted := 0
	for range 100 * clientRate {
		if l.admit(one) {
			admitted++
		}
	}
	require.GreaterOrEqual(t, admitted, clientRate)
	require.Less(t, admitted, 50*clientRate)
	require.True(t, l.admit(two))
}

// FuzzReply checks that no query causes a panic, that every reply can be packed within the client's size, and that
// names of the VPC and private names are not forwarded.
func FuzzReply(f *testing.F) {
	for _, name := range []string{"web.shop.internal.", "17.16.0.10.in-addr.arpa.", "example.com.", "a.b.internal."} {
		m := new(dns.Msg).SetQuestion(name, dns.TypeA)
		m.Id = 1
		plain, err := m.Pack()
		require.NoError(f, err)
		f.Add(plain)
		f.Add(plain[:len(plain)-1])
		m.SetEdns0(4096, true)
		options, err := m.Pack()
		require.NoError(f, err)
		f.Add(options)
	}
	s := newTestServer(testView())
	f.Fuzz(func(t *testing.T, packet []byte) {
		m := new(dns.Msg)
		if m.Unpack(packet) != nil {
			return
		}
		reply := s.reply(address("10.0.16.17"), m)
		size := replySize(m, true)
		reply.Truncate(size)
		packed, err := reply.Pack()
		if err == nil && len(m.Question) == 1 {
			require.LessOrEqual(t, len(packed), max(size, len(packet)))
			require.Equal(t, m.Id, reply.Id)
			require.True(t, reply.Response)
		}
		if len(m.Question) == 1 {
			name := dns.CanonicalName(m.Question[0].Name)
			_, local := s.zone.Load().resolve(m.Question[0])
			if strings.HasSuffix(name, ".internal.") || strings.HasSuffix(name, ".10.in-addr.arpa.") {
				require.True(t, local, "%s is forwarded", name)
			}
		}
	})
}
