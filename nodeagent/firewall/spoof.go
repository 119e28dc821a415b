package firewall

import (
	"encoding/hex"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Marks of packets. The bridge table sets them and the chains of iptables match them. The kernel clears marks when a
// packet leaves the network namespace.
const (
	fromPort = 0x1000000 // the packet came from a port with port security
	toPort   = 0x2000000 // the packet is being bridged to a port with port security
)

// validDevice matches names of devices that need no escaping in the text of nftables, with an optional * at the end.
var validDevice = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}\*?$`)

// bridgeSet is the definition of a set in the bridge table.
type bridgeSet struct {
	name     string
	typ      string // the types of the key's fields
	typeOf   string // the expression with the same type as the key, if the type has no name
	interval bool   // the elements may be prefixes
}

// Sets of the bridge table. The keys begin with the name of the device. Sets with names in …_nets hold the address
// pairs with prefixes; they are separate because lookups and changes of sets with intervals cost more.
var bridgeSets = []bridgeSet{
	{name: "open", typ: "ifname"},
	{name: "secured", typ: "ifname"},
	{name: "mac", typ: "ifname . ether_addr"},
	{name: "sender", typ: "ifname . ether_addr . ether_addr . ipv4_addr"},
	{name: "sender_nets", typ: "ifname . ether_addr . ether_addr . ipv4_addr", interval: true},
	{name: "source4", typ: "ifname . ether_addr . ipv4_addr"},
	{name: "source4_nets", typ: "ifname . ether_addr . ipv4_addr", interval: true},
	{name: "source6", typ: "ifname . ether_addr . ipv6_addr"},
	{name: "source6_nets", typ: "ifname . ether_addr . ipv6_addr", interval: true},
	{name: "target6", typeOf: "iifname . ether saddr . @th,64,128"},
	{name: "target6_nets", typeOf: "iifname . ether saddr . @th,64,128", interval: true},
	{name: "gateway4", typ: "ipv4_addr"},
	{name: "gateway6", typ: "ipv6_addr"},
	{name: "gateway6_target", typeOf: "@th,64,128"},
}

// bridgeChain is a chain of the bridge table. A chain without a hook is called by other chains.
type bridgeChain struct {
	name, hook, priority, policy string
	rules                        []string
}

// bridgeTable is the wanted content of the bridge table. Elements are the sorted elements of each set, as nft prints
// them, with their fields separated by " . ".
type bridgeTable struct {
	chains   []bridgeChain
	elements map[string][]string
}

const drop = `counter name "spoof" drop`

// bridgeChains returns the chains of the bridge table. They do not depend on the ports, which are in the sets.
//
// One lookup (from_own4 and from_own6) decides about a frame with an IP packet from the port's own address, or from an
// address pair with a single address. The other rules decide about the remaining frames. Bridged frames pass the hooks
// prerouting and forward, and frames of the namespace itself the hook output, so no hook postrouting is necessary.
//
// Version 1.0.6 of nft has no name for the target address of neighbour discovery messages. The rules therefore use the
// raw expression @th,64,128: 128 bits, 64 bits after the start of the ICMPv6 header (RFC 4861, part 4.4).
func bridgeChains(trusted []string) []bridgeChain {
	var prerouting, toTrusted []string
	for _, device := range slices.Sorted(slices.Values(trusted)) {
		prerouting = append(prerouting, fmt.Sprintf("iifname %q accept", device))
		toTrusted = append(toTrusted, fmt.Sprintf("oifname %q accept", device))
	}
	// A device that is in neither set is not a port.
	leave := append(slices.Clone(toTrusted), "oifname @open accept", `counter name "unassigned" drop`)
	forward := append([]string{fmt.Sprintf("oifname @secured meta mark set meta mark or %#x accept", toPort)}, leave...)
	output := append([]string{"oifname @secured accept"}, leave...)
	// Without "ether type", nft would compare the type behind a VLAN tag.
	prerouting = append(prerouting,
		"ether type ip iifname . ether saddr . ip saddr @source4 goto from_own4",
		"ether type ip6 iifname . ether saddr . ip6 saddr @source6 goto from_own6",
		"iifname @open accept")
	if mutant.On(mutant.PassForged) {
		prerouting = append(prerouting, "iifname @secured goto pass")
	}
	prerouting = append(prerouting,
		"ether saddr "+cloud.GatewayMAC.String()+" "+drop,
		"iifname . ether saddr != @mac "+drop,
		"ether type arp goto from_arp",
		"ether type ip goto from_ip4",
		"ether type ip6 goto from_ip6",
		drop)
	// A fragment whose next header is an extension header could hide the type of an ICMPv6 message from the other rules
	// (RFC 7112).
	fragment := "frag nexthdr { 0, 43, 60 } " + drop
	forged6 := "icmpv6 type { nd-router-advert, nd-redirect } " + drop
	server4, server6 := "udp sport 67 "+drop, "udp sport 547 "+drop // of DHCP
	pass := fmt.Sprintf("meta mark set %#x accept", fromPort)
	return []bridgeChain{
		{name: "pass", rules: []string{pass}},
		{name: "from_own4", rules: []string{server4, pass}},
		{name: "from_own6", rules: []string{
			"ip6 nexthdr tcp " + pass, fragment, forged6, server6,
			"icmpv6 type nd-neighbor-advert jump advertised",
			pass,
		}},
		{name: "from_arp", rules: []string{
			// The lookups below read fixed offsets, which these four conditions make valid.
			"arp htype != 1 " + drop, "arp ptype != ip " + drop, "arp hlen != 6 " + drop, "arp plen != 4 " + drop,
			"arp saddr ip @gateway4 " + drop,
			// Probes before use of an address (RFC 5227, part 2.1.1). A probe for the address of another port would
			// make that port give up its address.
			"arp saddr ip 0.0.0.0 arp operation != request " + drop,
			"arp saddr ip 0.0.0.0 iifname . ether saddr . arp saddr ether . arp daddr ip @sender goto pass",
			"arp saddr ip 0.0.0.0 iifname . ether saddr . arp saddr ether . arp daddr ip @sender_nets goto pass",
			"arp saddr ip 0.0.0.0 " + drop,
			"iifname . ether saddr . arp saddr ether . arp saddr ip @sender goto pass",
			"iifname . ether saddr . arp saddr ether . arp saddr ip @sender_nets goto pass",
			drop,
		}},
		{name: "from_ip4", rules: []string{
			"ip saddr 0.0.0.0 ip daddr 255.255.255.255 udp sport 68 udp dport 67 goto pass",
			"ip saddr 0.0.0.0 " + drop,
			server4,
			"ip saddr @gateway4 " + drop,
			"iifname . ether saddr . ip saddr @source4_nets goto pass",
			drop,
		}},
		{name: "from_ip6", rules: []string{
			fragment,
			forged6,
			server6,
			"ip6 saddr @gateway6 " + drop,
			"icmpv6 type nd-neighbor-advert jump advertised",
			"ip6 saddr :: goto from_unspecified",
			"iifname . ether saddr . ip6 saddr @source6_nets goto pass",
			drop,
		}},
		{name: "advertised", rules: []string{
			"@th,64,128 @gateway6_target " + drop,
			"iifname . ether saddr . @th,64,128 @target6 return",
			"iifname . ether saddr . @th,64,128 @target6_nets return",
			drop,
		}},
		{name: "from_unspecified", rules: []string{
			// Duplicate address detection (RFC 4862, part 5.4) and its multicast listener reports (RFC 3590).
			"icmpv6 type nd-neighbor-solicit iifname . ether saddr . @th,64,128 @target6 goto pass",
			"icmpv6 type nd-neighbor-solicit iifname . ether saddr . @th,64,128 @target6_nets goto pass",
			"icmpv6 type { mld-listener-report, mld2-listener-report } goto pass",
			drop,
		}},
		{name: "prerouting", hook: "prerouting", priority: "-300", policy: "drop", rules: prerouting},
		{name: "forward", hook: "forward", priority: "-200", policy: "drop", rules: forward},
		{name: "output", hook: "output", priority: "-300", policy: "drop", rules: output},
	}
}

// matchesDevice reports whether a name in Options.Trusted stands for the device.
func matchesDevice(pattern, device string) bool {
	prefix, wildcard := strings.CutSuffix(pattern, "*")
	return device == prefix || wildcard && strings.HasPrefix(device, prefix)
}

// renderBridge returns the wanted bridge table. It fails if a port's device has an invalid name or that of a trusted
// device.
func renderBridge(vpc *cloud.HostVPC, trusted []string) (*bridgeTable, error) {
	b := elementSets{}
	b.gateway(metadata4)
	b.gateway(metadata6)
	b.gateway(cloud.LinkLocal(cloud.GatewayMAC))
	for i := range vpc.Subnets {
		subnet := &vpc.Subnets[i]
		b.gateway(subnet.Gateway)
		b.gateway(subnet.Gateway6())
	}
	for i := range vpc.Subnets {
		subnet := &vpc.Subnets[i]
		for j := range subnet.Ports {
			port := &subnet.Ports[j]
			if !validDevice.MatchString(port.Device) || strings.HasSuffix(port.Device, "*") {
				return nil, fmt.Errorf("port %s: %q is not the name of a device", port.ID, port.Device)
			}
			if slices.ContainsFunc(trusted, func(pattern string) bool { return matchesDevice(pattern, port.Device) }) {
				return nil, fmt.Errorf("port %s: the frames of device %s would not be checked, because it has the name "+
					"of a trusted device", port.ID, port.Device)
			}
			b.port(port)
		}
	}
	t := &bridgeTable{chains: bridgeChains(trusted), elements: map[string][]string{}}
	for _, set := range bridgeSets {
		t.elements[set.name] = slices.Sorted(maps.Keys(b[set.name]))
	}
	return t, nil
}

// elementSets are the elements by the name of their set.
type elementSets map[string]map[string]bool

func (b elementSets) add(set string, fields ...string) {
	if b[set] == nil {
		b[set] = map[string]bool{}
	}
	b[set][strings.Join(fields, " . ")] = true
}

func (b elementSets) gateway(a netip.Addr) {
	switch {
	case a.Is4():
		b.add("gateway4", a.String())
	case a.Is6():
		b.add("gateway6", a.String())
		b.add("gateway6_target", integer(a))
	}
}

// port adds the elements of a port. For a port with port security these are its own addresses and its pairs.
func (b elementSets) port(port *cloud.HostPort) {
	device := `"` + port.Device + `"`
	if !port.Secured {
		b.add("open", device)
		return
	}
	b.add("secured", device)
	prefixes := map[cloud.MAC][]netip.Prefix{}
	add := func(mac cloud.MAC, p netip.Prefix) {
		if mac != cloud.GatewayMAC && p.IsValid() {
			prefixes[mac] = append(prefixes[mac], p.Masked())
		}
	}
	for _, a := range ownAddresses(port) {
		add(port.MAC, netip.PrefixFrom(a, a.BitLen()))
	}
	for _, pair := range port.Pairs {
		mac := pair.MAC
		if mac == (cloud.MAC{}) {
			mac = port.MAC
		}
		add(mac, pair.CIDR)
	}
	if port.MAC != cloud.GatewayMAC {
		b.add("mac", device, port.MAC.String())
	}
	for mac, list := range prefixes {
		b.add("mac", device, mac.String())
		for _, p := range disjoint(list) {
			b.source(device, mac.String(), p)
		}
	}
}

// source adds the elements that let a device use the addresses of p with a MAC address. The gateways' elements must
// have been added before.
func (b elementSets) source(device, mac string, p netip.Prefix) {
	suffix, text := "", p.Addr().String()
	if !p.IsSingleIP() {
		suffix, text = "_nets", p.String()
	}
	// The rules for the sets of single addresses do not check these addresses again.
	reserved := p.IsSingleIP() && (p.Addr().IsUnspecified() || b["gateway4"][text] || b["gateway6"][text]) &&
		!mutant.On(mutant.PassReserved)
	if p.Addr().Is4() {
		b.add("sender"+suffix, device, mac, mac, text)
		if !reserved {
			b.add("source4"+suffix, device, mac, text)
		}
		return
	}
	if !reserved {
		b.add("source6"+suffix, device, mac, text)
	}
	if suffix != "" {
		text = integer(p.Addr()) + "-" + integer(cloud.Last(p))
	} else {
		text = integer(p.Addr())
	}
	b.add("target6"+suffix, device, mac, text)
}

// disjoint returns the single addresses of the list, and those of the other prefixes that no other one contains: the
// kernel refuses overlapping elements of a set with intervals.
func disjoint(list []netip.Prefix) []netip.Prefix {
	slices.SortFunc(list, func(a, b netip.Prefix) int { return a.Bits() - b.Bits() })
	var kept []netip.Prefix
	for _, p := range list {
		if p.IsSingleIP() || !slices.ContainsFunc(kept, func(wide netip.Prefix) bool { return wide.Contains(p.Addr()) }) {
			kept = append(kept, p)
		}
	}
	return kept
}

// integer returns an address as the hexadecimal number that nft prints for raw expressions, without leading zeros.
func integer(a netip.Addr) string {
	digits := strings.TrimLeft(hex.EncodeToString(a.AsSlice()), "0")
	if digits == "" {
		digits = "0"
	}
	return "0x" + digits
}
