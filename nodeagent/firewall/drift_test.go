package firewall

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestDriftIsRepaired changes the kernel's state by hand in many ways and checks that Set restores it.
func TestDriftIsRepaired(t *testing.T) {
	l := newLab(t)
	l.add(t, 0, 5, "a")
	l.add(t, 0, 6, "a", "b")
	l.group("a", cloud.Rule{Direction: cloud.Ingress, AnyProtocol: true, Group: "b"},
		cloud.Rule{Direction: cloud.Egress, AnyProtocol: true, IPv6: true})
	l.group("b", allowAll(cloud.Egress)...)
	l.members("b", l.vpc.Subnets[0].Ports[1].IP)
	l.set(t)
	before := l.dump(t)
	group := prefix + "group4-" + hash("b")
	list := newGroupList([]cloud.SecurityGroupID{"a"}).id().String()
	for _, command := range []string{
		"nft delete table bridge trivet",
		"nft flush chain bridge trivet from_ip4",
		"nft insert rule bridge trivet prerouting accept",
		"nft add rule bridge trivet pass drop",
		"nft add chain bridge trivet prerouting { policy accept ; }",
		"nft add chain bridge trivet foreign",
		"nft add set bridge trivet foreign { type ipv4_addr ; }",
		`nft delete element bridge trivet mac { "p0-5" . 02:00:00:00:00:05 }`,
		`nft add element bridge trivet source4 { "p0-5" . 02:00:00:00:00:05 . 10.0.0.99 }`,
		`nft add element bridge trivet source4_nets { "p0-5" . 02:00:00:00:00:05 . 10.0.0.0/8 }`,
		`nft add element bridge trivet target6_nets { "p0-5" . 02:00:00:00:00:05 . 0xfd00-0xfdff }`,
		`nft add element bridge trivet open { "p0-5" }`,
		"nft flush set bridge trivet gateway6_target",
		"iptables-nft -D FORWARD 1",
		"ip6tables-nft -D INPUT 1",
		"iptables-nft -P FORWARD ACCEPT",
		"iptables-nft -F trivet-forward",
		"iptables-nft -I trivet-ingress -j ACCEPT",
		"ip6tables-nft -D trivet-i-" + list + " 1",
		"iptables-nft -F trivet-egress",
		"iptables-nft -A trivet-i-" + list + " -j ACCEPT",
		"iptables-nft -N trivet-foreign",
		"iptables-nft -R trivet-norule 1 -j ACCEPT",
		"ip6tables-nft -F",
		"nft flush ruleset",
		"ipset add " + group + " 10.0.0.250",
		"ipset del " + group + " 10.0.0.6",
		"ipset flush",
		"ipset create trivet-foreign hash:ip",
		"sysctl -w net.bridge.bridge-nf-call-iptables=0",
		"sysctl -w net.bridge.bridge-nf-call-ip6tables=0",
		"sysctl -w net.netfilter.nf_conntrack_tcp_loose=1",
	} {
		runIn(t, l.ns, "", strings.Fields(command)...)
		require.NotZero(t, l.set(t).Writes, command)
		require.Equal(t, before, l.dump(t), command)
		require.Equal(t, Result{}, l.set(t), command)
	}
	// Rules of others stay, but after those of the package.
	runIn(t, l.ns, "", "iptables-nft", "-I", "FORWARD", "-j", "ACCEPT")
	require.NotZero(t, l.set(t).Writes)
	require.Contains(t, l.dump(t), "-A FORWARD -j trivet-forward\n-A FORWARD -j ACCEPT\n")
	require.Equal(t, Result{}, l.set(t))
}

// TestMembersChangeBySteps checks that a change of a large remote group writes the difference only, and that a set with
// many obsolete members is replaced.
func TestMembersChangeBySteps(t *testing.T) {
	l := newLab(t)
	l.add(t, 0, 5, "a")
	l.group("a", cloud.Rule{Direction: cloud.Ingress, AnyProtocol: true, Group: "big"})
	var members []netip.Addr
	for a := parseAddr("10.0.16.0"); len(members) < 3000; a = a.Next() {
		members = append(members, a)
	}
	l.members("big", members...)
	l.set(t)
	l.members("big", append(slices.Clone(members), parseAddr("10.0.200.1"))...)
	require.Equal(t, Result{Writes: 1}, l.set(t))
	slices.Reverse(members)
	l.members("big", members...)
	require.Equal(t, Result{Writes: 1}, l.set(t))
	require.Equal(t, Result{}, l.set(t), "in another order")
	l.members("big", members[:10]...)
	require.Equal(t, Result{Writes: 13}, l.set(t), "create, fill, swap and destroy a set")
	require.Equal(t, Result{}, l.set(t))
	require.Equal(t, 10, strings.Count(l.dump(t), "add trivet-group4-"))
}

// TestEveryStateFromEveryOther applies random VPCs one after the other. Each must result in the same state as in a new
// namespace, independent of the order of its parts.
func TestEveryStateFromEveryOther(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	l := newLab(t)
	for i := range 15 {
		l.vpc = randomVPC(random)
		l.set(t)
		shuffle(random, &l.vpc)
		require.Equal(t, Result{}, l.set(t), "VPC %d", i)
		fresh := &lab{ns: newNamespace(t, "fresh"), firewall: l.firewall, vpc: l.vpc}
		fresh.set(t)
		require.Equal(t, fresh.dump(t), l.dump(t), "VPC %d", i)
		text, err := Text(l.vpc, testOptions)
		require.NoError(t, err)
		shuffle(random, &l.vpc)
		again, err := Text(l.vpc, testOptions)
		require.NoError(t, err)
		require.Equal(t, text, again)
	}
}

func pick[T any](r *rand.Rand, list ...T) T { return list[r.IntN(len(list))] }

// randomVPC returns a small VPC from few values, so that parts of successive VPCs are equal.
func randomVPC(r *rand.Rand) cloud.HostVPC {
	vpc := cloud.HostVPC{ID: "vpc", CIDR: parsePrefix("10.0.0.0/16"), CIDR6: parsePrefix("fd00::/56")}
	ids := []cloud.SecurityGroupID{"a", "b", "c"}
	for _, id := range ids {
		group := cloud.HostGroup{ID: id}
		for range r.IntN(8) {
			group.Rules = append(group.Rules, randomRule(r, ids))
		}
		vpc.Groups = append(vpc.Groups, group)
		members := cloud.GroupMembers{ID: id}
		for range r.IntN(5) {
			a := parseAddr(fmt.Sprintf(pick(r, "10.0.0.%d", "fd00::%d"), r.IntN(9)))
			members.Addresses = append(members.Addresses, a)
		}
		vpc.Members = append(vpc.Members, members)
	}
	for s := range 1 + r.IntN(2) {
		subnet := cloud.HostSubnet{
			CIDR:    parsePrefix(fmt.Sprintf("10.0.%d.0/24", s)),
			Gateway: parseAddr(fmt.Sprintf("10.0.%d.1", s)),
		}
		if r.IntN(2) == 0 {
			subnet.CIDR6 = parsePrefix(fmt.Sprintf("fd00:0:0:%d::/64", s))
		}
		for n := range 5 {
			if r.IntN(2) == 0 {
				subnet.Ports = append(subnet.Ports, randomPort(r, &subnet, s, n, ids))
			} else {
				mac, a := cloud.MAC{2, 0, 0, 0, byte(s), byte(n)}, parseAddr(fmt.Sprintf("10.0.%d.%d", s, 10+n))
				subnet.Remotes = append(subnet.Remotes, cloud.RemotePort{MAC: mac, IP: a})
			}
		}
		vpc.Subnets = append(vpc.Subnets, subnet)
	}
	return vpc
}

func randomPort(r *rand.Rand, subnet *cloud.HostSubnet, s, n int, ids []cloud.SecurityGroupID) cloud.HostPort {
	port := cloud.HostPort{
		ID: cloud.PortID(fmt.Sprint(s, n)), Device: fmt.Sprintf("tap%d.%d", s, n),
		MAC: cloud.MAC{2, 0, 0, 0, byte(s), byte(n)},
		IP:  parseAddr(fmt.Sprintf("10.0.%d.%d", s, 10+n)), Secured: r.IntN(4) > 0,
	}
	if subnet.CIDR6.IsValid() {
		port.IP6 = parseAddr(fmt.Sprintf("fd00:0:0:%d::%d", s, 10+n))
	}
	for _, id := range ids {
		if r.IntN(2) == 0 {
			port.Groups = append(port.Groups, id)
		}
	}
	for range r.IntN(4) {
		port.Pairs = append(port.Pairs, cloud.AddressPair{
			CIDR: parsePrefix(pick(r, "10.0.0.100/32", "10.9.0.0/16", "10.0.0.0/8", "0.0.0.0/0", "10.9.8.0/31",
				"fd00:9::/64", "fd00:9::/48", "::/0", "fd00::100/128")),
			MAC: pick(r, cloud.MAC{}, cloud.MAC{0, 0, 0x5e, 0, 1, 1}, cloud.GatewayMAC),
		})
	}
	return port
}

func randomRule(r *rand.Rand, ids []cloud.SecurityGroupID) cloud.Rule {
	rule := cloud.Rule{
		Direction: pick(r, cloud.Ingress, cloud.Egress), IPv6: r.IntN(2) == 0,
		AnyProtocol: r.IntN(5) == 0, Protocol: uint8(r.IntN(256)),
	}
	if r.IntN(3) > 0 {
		rule.Protocol = pick[uint8](r, cloud.ProtocolTCP, cloud.ProtocolUDP, cloud.ProtocolSCTP,
			cloud.ProtocolICMP, cloud.ProtocolICMPv6)
	}
	switch r.IntN(4) {
	case 0:
		rule.Ports = cloud.PortRange{First: pick[uint16](r, 0, 1, 80), Last: pick[uint16](r, 0, 80, 65535)}
	case 1:
		rule.ICMP = &cloud.ICMP{Type: uint8(r.IntN(256)), Code: uint8(r.IntN(256)), AnyCode: r.IntN(2) == 0}
	}
	switch r.IntN(3) {
	case 0:
		rule.CIDR = parsePrefix(pick(r, "10.0.0.0/8", "0.0.0.0/0", "10.0.0.5/32", "fd00::/48", "::/0", "fd00::5/128"))
	case 1:
		rule.Group = pick(r, append(ids, "unknown")...)
	}
	return rule
}

// shuffle changes the order of the parts of a VPC.
func shuffle(r *rand.Rand, vpc *cloud.HostVPC) {
	mix := r.Shuffle
	mix(len(vpc.Subnets), func(i, j int) { vpc.Subnets[i], vpc.Subnets[j] = vpc.Subnets[j], vpc.Subnets[i] })
	for s := range vpc.Subnets {
		ports := vpc.Subnets[s].Ports
		mix(len(ports), func(i, j int) { ports[i], ports[j] = ports[j], ports[i] })
		for p := range ports {
			pairs, groups := ports[p].Pairs, ports[p].Groups
			mix(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
			mix(len(groups), func(i, j int) { groups[i], groups[j] = groups[j], groups[i] })
		}
	}
	for g := range vpc.Groups {
		rules := vpc.Groups[g].Rules
		mix(len(rules), func(i, j int) { rules[i], rules[j] = rules[j], rules[i] })
	}
	for m := range vpc.Members {
		list := vpc.Members[m].Addresses
		mix(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	}
	mix(len(vpc.Groups), func(i, j int) { vpc.Groups[i], vpc.Groups[j] = vpc.Groups[j], vpc.Groups[i] })
}
