package firewall

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// state is the wanted state of a namespace.
type state struct {
	looseTCP bool // of the HostVPC
	bridge   *bridgeTable
	sets     []addressSet // sorted by name
	tables   [2]table     // of iptables: IPv4, IPv6
	policy   *policy
}

// addressSet is an ipset of type hash:ip.
type addressSet struct {
	name      string
	ipv6      bool
	addresses []netip.Addr // sorted
}

// table holds the package's chains in the table "filter" of one family. Rules have the form in which iptables-save
// prints them, without "-A" and the name of the chain.
type table struct {
	chains []chain // sorted by name
	dispatched
}

func newTable(chains map[string][]string, d dispatched) table {
	t := table{dispatched: d}
	for _, name := range slices.Sorted(maps.Keys(chains)) {
		t.chains = append(t.chains, chain{name, chains[name]})
	}
	return t
}

type chain struct {
	name  string
	rules []string
}

// Names of chains. The names of all chains and ipsets of the package begin with prefix.
const (
	prefix        = "trivet-"
	forwardChain  = prefix + "forward" // called by FORWARD for all packets
	inputChain    = prefix + "input"   // called by INPUT for all packets
	egressChain   = prefix + "egress"  // selects the egress rules by source address
	ingressChain  = prefix + "ingress" // selects the ingress rules by destination address
	noRuleChain   = prefix + "norule"  // drops and counts what no rule of a group permits
	invalidChain  = prefix + "invalid" // drops and counts packets that belong to no connection and cannot begin one
	deniedChain   = prefix + "denied"  // drops and counts packets to the prefixes in Options.Denied
	closedChain   = prefix + "closed"  // drops and counts packets to the namespace itself
	egressPrefix  = prefix + "e-"      // egress rules of a list of groups
	ingressPrefix = prefix + "i-"      // ingress rules of a list of groups
	egressNode    = prefix + "et"      // part of egressChain for a range of lists; see tree
	ingressNode   = prefix + "it"      // part of ingressChain for a range of lists
)

// render returns the wanted state of a VPC.
func render(vpc *cloud.HostVPC, o *Options) (*state, error) {
	bridge, err := renderBridge(vpc, o.Trusted)
	if err != nil {
		return nil, err
	}
	p := &policy{
		subjects: newSubjects(vpc), rules: newRuleBook(vpc), vpc: [2]netip.Prefix{vpc.CIDR, vpc.CIDR6},
		denied: o.Denied, deniedAddresses: map[netip.Addr]bool{},
	}
	for _, a := range vpc.Denied {
		p.deniedAddresses[a] = true
	}
	for _, peer := range vpc.Peerings {
		p.peers = append(p.peers, peer.CIDR, peer.CIDR6)
	}
	s := &state{looseTCP: vpc.LooseTCP, bridge: bridge, policy: p}
	for i, ipv6 := range []bool{false, true} {
		r := &tableRenderer{policy: p, vpc: vpc, ipv6: ipv6, sets: map[string][]netip.Addr{}, chains: map[string][]string{}}
		s.tables[i] = r.render()
		for _, name := range slices.Sorted(maps.Keys(r.sets)) {
			addresses := slices.SortedFunc(slices.Values(r.sets[name]), netip.Addr.Compare)
			s.sets = append(s.sets, addressSet{name, ipv6, slices.Compact(addresses)})
		}
	}
	slices.SortFunc(s.sets, func(a, b addressSet) int { return cmp.Compare(a.name, b.name) })
	return s, nil
}

// tableRenderer renders the chains of one family, and the ipsets that they refer to.
type tableRenderer struct {
	policy *policy
	vpc    *cloud.HostVPC
	ipv6   bool
	sets   map[string][]netip.Addr
	chains map[string][]string
	dispatched
}

// setName returns the name of a set. It consists of the kind of the set, the IP version and an optional suffix.
func setName(kind string, ipv6 bool, suffix string) string {
	if ipv6 {
		return prefix + kind + "6" + suffix
	}
	return prefix + kind + "4" + suffix
}

// groupSet returns the name of the set with the addresses of the members of a group.
func groupSet(id cloud.SecurityGroupID, ipv6 bool) string {
	return setName("group", ipv6, "-"+hash(string(id)))
}

// set returns the name of a set of this family. The set contains those of the addresses that belong to the family.
func (r *tableRenderer) set(kind, suffix string, addresses iter.Seq[netip.Addr]) string {
	name := setName(kind, r.ipv6, suffix)
	if _, done := r.sets[name]; done {
		return name
	}
	r.sets[name] = nil
	for a := range addresses {
		if a.Is6() == r.ipv6 {
			r.sets[name] = append(r.sets[name], a)
		}
	}
	return name
}

func (r *tableRenderer) render() table {
	r.chains[forwardChain] = r.forward()
	r.chains[inputChain] = r.input()
	r.chains[noRuleChain] = []string{"-j DROP"}
	r.chains[invalidChain] = []string{"-j DROP"}
	r.chains[closedChain] = []string{"-j DROP"}
	r.dispatch()
	return newTable(r.chains, r.dispatched)
}

var (
	markedFromPort = fmt.Sprintf("-m mark --mark %#x/%#x", fromPort, fromPort)
	markedToPort   = fmt.Sprintf("-m mark --mark %#x/%#x", toPort, toPort)
	saveFromPort   = fmt.Sprintf("CONNMARK --set-xmark %#x/%#x", fromPort, fromPort) // see flow.fromPort
	unmarkedToPort = fmt.Sprintf("-m mark ! --mark %#x/%#x", toPort, toPort)
)

// tracked are the first rules for all packets.
func tracked() []string {
	return []string{
		"-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
		"-m conntrack --ctstate INVALID -j " + invalidChain,
	}
}

func (r *tableRenderer) forward() []string {
	rules := tracked()
	if mutant.On(mutant.AcceptBeforeRules) {
		rules = append(rules, "-j ACCEPT")
	}
	if r.ipv6 {
		// Connection tracking does not track neighbour discovery. The bridge table has checked solicitations and
		// advertisements, and drops the other two types unless they are fragmented.
		rules = append(rules,
			"-p ipv6-icmp -m icmp6 --icmpv6-type 135 -j ACCEPT",
			"-p ipv6-icmp -m icmp6 --icmpv6-type 136 -j ACCEPT",
			"-p ipv6-icmp "+markedFromPort+" -m icmp6 --icmpv6-type 134 -j "+noRuleChain,
			"-p ipv6-icmp "+markedFromPort+" -m icmp6 --icmpv6-type 137 -j "+noRuleChain)
	}
	if denied := r.denied(); len(denied) > 0 && !mutant.On(mutant.ForwardDenied) {
		r.chains[deniedChain] = denied
		rules = append(rules, "-j "+deniedChain)
	}
	return append(rules, markedFromPort+" -j "+saveFromPort, markedFromPort+" -j "+egressChain,
		"-j "+ingressChain, "-j ACCEPT")
}

// denied returns the rules that drop packets to the denied prefixes and to the VPC's denied addresses. It returns none
// if no denied prefix or address is of the renderer's address family.
func (r *tableRenderer) denied() []string {
	var rules []string
	for _, p := range r.policy.denied {
		if p.Addr().Is6() == r.ipv6 {
			rules = append(rules, "-d "+p.String()+" -j DROP")
		}
	}
	if slices.ContainsFunc(r.vpc.Denied, func(a netip.Addr) bool { return a.Is6() == r.ipv6 }) {
		name := r.set("denied", "", slices.Values(r.vpc.Denied))
		rules = append(rules, "-m set --match-set "+name+" dst -j DROP")
	}
	vpc := r.vpc.CIDR
	if r.ipv6 {
		vpc = r.vpc.CIDR6
	}
	if len(rules) > 0 && len(r.vpc.Peerings) > 0 {
		rules = slices.Insert(rules, 0, "-o "+cloud.PeeringDevices+"+ -j RETURN")
	}
	if len(rules) > 0 && vpc.IsValid() {
		rules = slices.Insert(rules, 0, "-d "+vpc.Masked().String()+" -j RETURN")
	}
	return rules
}

// input returns the rules for packets to the namespace itself, which answers at its gateways' addresses and at that of
// the metadata service. Only sources of the VPC are answered, so the resolver is closed to other networks.
func (r *tableRenderer) input() []string {
	answering := maps.Clone(r.policy.subjects.gateways)
	delete(answering, metadata4)
	delete(answering, metadata6)
	gateways := r.set("gateway", "", maps.Keys(answering))
	rules := tracked()
	vpc, dhcp, metadata := r.vpc.CIDR, "--sport 68 --dport 67", netip.PrefixFrom(metadata4, 32)
	ping := "-p icmp -m set --match-set %s dst -m icmp --icmp-type 8"
	if r.ipv6 {
		vpc, dhcp, metadata = r.vpc.CIDR6, "--sport 546 --dport 547", netip.PrefixFrom(metadata6, 128)
		ping = "-p ipv6-icmp -m set --match-set %s dst -m icmp6 --icmpv6-type 128"
		for _, icmp := range []int{130, 131, 132, 143, 133, 135, 136} { // multicast listeners, router and neighbour discovery
			rules = append(rules, fmt.Sprintf("-p ipv6-icmp -m icmp6 --icmpv6-type %d -j ACCEPT", icmp))
		}
	}
	rules = append(rules, "-p udp -m udp "+dhcp+" -j ACCEPT")
	if vpc.IsValid() {
		from := "-s " + vpc.Masked().String() + " "
		rules = append(rules,
			from+fmt.Sprintf(ping, gateways)+" -j ACCEPT",
			from+fmt.Sprintf("-p tcp -m set --match-set %s dst -m tcp --dport 53 -j ACCEPT", gateways),
			from+fmt.Sprintf("-p udp -m set --match-set %s dst -m udp --dport 53 -j ACCEPT", gateways),
			from+"-d "+metadata.String()+" -p tcp -m tcp --dport 80 -j ACCEPT")
	}
	return append(rules, "-j "+closedChain)
}

// groupChains adds the ingress chain of a list of groups, and the egress chain unless the list permits all egress.
func (r *tableRenderer) groupChains(list groupList) {
	id := list.id()
	if _, done := r.chains[ingressPrefix+id.String()]; done {
		return
	}
	r.chains[ingressPrefix+id.String()] = r.groupRules(list, cloud.Ingress, "ACCEPT")
	egress := r.groupRules(list, cloud.Egress, "RETURN")
	if r.unlimited[id] = permitAll(egress); !r.unlimited[id] {
		r.chains[egressPrefix+id.String()] = egress
	}
}

// permitAll reports whether the egress rules of a list permit all packets.
func permitAll(egress []string) bool { return slices.Contains(egress, "-j RETURN") }

// groupRules returns the sorted rules of a list of groups in one direction, and at last the rule that drops the rest.
func (r *tableRenderer) groupRules(list groupList, direction cloud.Direction, target string) []string {
	var rules []string
	for _, m := range r.policy.rules.of(list, ruleKind{direction, r.ipv6}) {
		rules = append(rules, r.rule(m, direction)+"-j "+target)
	}
	slices.Sort(rules)
	return append(slices.Compact(rules), "-j "+noRuleChain)
}

// rule returns the condition of a rule as iptables-save prints it, with a space at its end unless it is empty.
func (r *tableRenderer) rule(m match, direction cloud.Direction) string {
	address, peer := "-s ", "src"
	if direction == cloud.Egress {
		address, peer = "-d ", "dst"
	}
	var b strings.Builder
	if m.prefix.IsValid() {
		b.WriteString(address + m.prefix.String() + " ")
	}
	if m.protocol >= 0 {
		b.WriteString("-p " + protocolName(m.protocol) + " ")
	}
	if m.group != "" {
		members := maps.Keys(r.policy.rules.members[m.group])
		set := r.set("group", "-"+hash(string(m.group)), members)
		b.WriteString("-m set --match-set " + set + " " + peer + " ")
	}
	if m.ports != nil {
		fmt.Fprintf(&b, "-m %s --dport %d", protocolName(m.protocol), m.ports.First)
		if m.ports.Last != m.ports.First {
			fmt.Fprintf(&b, ":%d", m.ports.Last)
		}
		b.WriteString(" ")
	}
	if m.icmp != nil {
		option := "-m icmp --icmp-type"
		if r.ipv6 {
			option = "-m icmp6 --icmpv6-type"
		}
		fmt.Fprintf(&b, "%s %d", option, m.icmp.Type)
		if !m.icmp.AnyCode {
			fmt.Fprintf(&b, "/%d", m.icmp.Code)
		}
		b.WriteString(" ")
	}
	return b.String()
}

// protocolName returns the name of a protocol in the package's rules: a number but for the protocols whose matches
// iptables loads by name.
func protocolName(protocol int) string {
	if name, ok := matchNames[protocol]; ok {
		return name
	}
	return strconv.Itoa(protocol)
}

var matchNames = map[int]string{
	cloud.ProtocolICMP: "icmp", cloud.ProtocolTCP: "tcp", cloud.ProtocolUDP: "udp",
	cloud.ProtocolICMPv6: "ipv6-icmp", cloud.ProtocolSCTP: "sctp",
}
