package firewall

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// randomVPCs returns the number of VPCs of TestChainsDecideAsThePolicy: TRIVET_FIREWALL_VPCS, or 8.
func randomVPCs(t *testing.T) int {
	if text := os.Getenv("TRIVET_FIREWALL_VPCS"); text != "" {
		n, err := strconv.Atoi(text)
		require.NoError(t, err)
		return n
	}
	return 8
}

// TestChainsDecideAsThePolicy gives six endpoints random groups, rules and address pairs, and sends packets between
// them: from and to own addresses and addresses of pairs. The kernel must pass the packets that policy.permits permits,
// and no others.
func TestChainsDecideAsThePolicy(t *testing.T) {
	const seed = 20
	random := rand.New(rand.NewPCG(seed, 0))
	s := newCallStage(t)
	var ends []*endpoint
	for i := range 6 {
		ends = append(ends, s.add(t, i/4, 10+i))
	}
	// A port on another host. Address pairs of the other endpoints may contain its address.
	remote := cloud.RemotePort{MAC: cloud.MAC{2, 0, 0, 0, 9, 9}, IP: parseAddr("10.0.0.99"), IP6: parseAddr("fd00::99")}
	s.vpc.Subnets[0].Remotes = []cloud.RemotePort{remote}
	verdicts := map[bool]int{}
	for round := range randomVPCs(t) {
		s.randomize(t, random, ends)
		var err error
		if round%2 == 0 {
			_, err = s.firewall.Set(t.Context(), s.ns, s.vpc)
		} else {
			_, err = s.firewall.Update(t.Context(), s.ns, s.vpc)
		}
		require.NoError(t, err)
		want, err := render(&s.vpc, &testOptions)
		require.NoError(t, err)
		for i := range 30 {
			c, f := randomCall(random, ends)
			permitted := want.policy.permits(&f)
			verdicts[permitted]++
			s.forget(t)
			require.Equal(t, map[bool]string{true: "arrives", false: "group"}[permitted], s.verdict(t, c),
				"VPC %d, packet %d: %+v from %s to %s\n%+v", round, i, f, c.from.port.ID, c.to.port.ID, s.vpc)
		}
	}
	require.Greater(t, verdicts[true], verdicts[false]/10)
	require.Greater(t, verdicts[false], verdicts[true]/10)
}

// randomize gives groups, members and ports random contents.
func (s *callStage) randomize(t *testing.T, r *rand.Rand, ends []*endpoint) {
	t.Helper()
	var ids []cloud.SecurityGroupID
	for range 8 {
		ids = append(ids, cloud.SecurityGroupID(fmt.Sprintf("group-%d", r.IntN(1000))))
	}
	s.vpc.Groups, s.vpc.Members = nil, nil
	for _, id := range ids {
		var rules []cloud.Rule
		for range r.IntN(4) {
			rules = append(rules, randomUDPRule(r, ids))
		}
		s.group(id, rules...)
		var members []netip.Addr
		for _, e := range ends {
			if r.IntN(2) == 0 {
				members = append(members, e.port.IP, e.port.IP6)
			}
		}
		s.members(id, members...)
	}
	for _, e := range ends {
		s.change(e, func(p *cloud.HostPort) {
			p.Groups, p.Pairs = nil, nil
			for range r.IntN(4) {
				p.Groups = append(p.Groups, pick(r, ids...))
			}
			if p.Secured = r.IntN(5) > 0; p.Secured && r.IntN(2) == 0 {
				p.Pairs = []cloud.AddressPair{
					{CIDR: parsePrefix(pick(r, "0.0.0.0/0", "10.0.0.0/16", "10.0.0.8/29", "10.0.0.99/32", "172.16.0.0/12"))},
					{CIDR: parsePrefix(pick(r, "::/0", "fd00::/64", "fd00::99/128", "fd12:3456::/32"))},
				}
			}
		})
	}
}

// randomUDPRule returns a rule that often matches the packets of randomCall.
func randomUDPRule(r *rand.Rand, ids []cloud.SecurityGroupID) cloud.Rule {
	rule := cloud.Rule{Direction: pick(r, cloud.Ingress, cloud.Egress), IPv6: r.IntN(2) == 0}
	if rule.AnyProtocol = r.IntN(2) == 0; !rule.AnyProtocol {
		rule.Protocol, rule.Ports = cloud.ProtocolUDP, cloud.PortRange{First: 80, Last: 90}
	}
	switch r.IntN(4) {
	case 0:
		rule.Group = pick(r, ids...)
	case 1:
		rule.CIDR = parsePrefix(pick(r, "10.0.0.0/24", "172.16.0.0/12"))
		if rule.IPv6 {
			rule.CIDR = parsePrefix(pick(r, "fd00::/64", "fd12:3456::/32"))
		}
	}
	return rule
}

// randomCall returns a UDP packet between two endpoints and its flow. The source is an address that the sender may use.
// In the same subnet, the destination can be an address of one of the receiver's address pairs.
func randomCall(r *rand.Rand, ends []*endpoint) (call, flow) {
	from, to := pick(r, ends...), pick(r, ends...)
	for from == to {
		to = pick(r, ends...)
	}
	c := call{from: from, to: to, ipv6: r.IntN(2) == 0}
	source := randomAddress(r, from, c.ipv6,
		"10.0.0.13", "10.0.0.99", "10.0.1.14", "10.0.7.7", "172.16.5.5", "fd00::99", "fd12:3456::1")
	// A policy does not know to which port the bridge sends a packet, so no destination is the address of two ports.
	destination := randomAddress(r, to, c.ipv6, "10.0.7.7", "172.16.5.5", "fd00::77", "fd12:3456::1")
	if from.subnet != to.subnet {
		source, destination = from.port.IP, to.port.IP
		if c.ipv6 {
			source, destination = from.port.IP6, to.port.IP6
		}
	}
	port := pick[uint16](r, 80, 443)
	c.build = func(_, _ netip.Addr, tag string) []byte { return udp(at(source, 4000), at(destination, port), tag) }
	return c, flow{
		source: source, destination: destination, protocol: cloud.ProtocolUDP, port: port, fromPort: from.port.Secured,
	}
}

// randomAddress returns the own address of an endpoint, or another address that one of the endpoint's address pairs
// contains.
func randomAddress(r *rand.Rand, e *endpoint, ipv6 bool, others ...string) netip.Addr {
	own := e.port.IP
	if ipv6 {
		own = e.port.IP6
	}
	a := parseAddr(pick(r, others...))
	for _, pair := range e.port.Pairs {
		if a.Is6() == ipv6 && pair.CIDR.Contains(a) {
			return a
		}
	}
	return own
}
