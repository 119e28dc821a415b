package peering

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/nodeagent/netfilter"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// table is the package's nftables table in the namespaces of VPCs.
var table = netfilter.Table{Family: "inet", Name: "trivet-peering"}

// edgeDevices matches the devices of package edge in the namespaces of VPCs.
const edgeDevices = cloud.EdgeDevicePrefix + "*"

// anyDevice matches the devices of all peerings, and anyBridge those of all subnets.
const anyDevice, anyBridge = `"` + cloud.PeeringDevices + `*"`, `"br*"`

// smallPair is the largest number of host bits of an address pair whose addresses are reachable over a peering.
const smallPair = 4

// chains renders the rules of the namespace of a VPC with peerings.
func chains(vpc *cloud.HostVPC) []netfilter.Chain {
	prerouting := filter("prerouting", -300)
	for _, ipv6 := range []bool{false, true} {
		var peers []netip.Prefix
		for i := range vpc.Peerings {
			if p := prefixOf(&vpc.Peerings[i], ipv6); p.IsValid() {
				peers = append(peers, p)
			}
		}
		if len(peers) > 0 {
			prerouting.Rules = append(prerouting.Rules,
				fmt.Sprintf("iifname %q %s saddr %s drop", edgeDevices, protocol(ipv6), elements(peers)))
		}
	}
	prerouting.Rules = append(prerouting.Rules, "iifname "+anyDevice+" goto arriving")
	arriving := netfilter.Chain{Name: "arriving"}
	for i := range vpc.Peerings {
		arriving.Rules = append(arriving.Rules, arrivals(vpc, &vpc.Peerings[i])...)
	}
	arriving.Rules = append(arriving.Rules, "drop")
	input := filter("input", -10)
	input.Rules = []string{"iifname " + anyDevice + " drop"}
	return []netfilter.Chain{admitted(vpc), arriving, prerouting, forward(vpc), input}
}

// filter returns a base chain that accepts what its rules do not drop. Its name is that of the hook.
func filter(hook string, priority int) netfilter.Chain {
	return netfilter.Chain{Name: hook, Kind: "filter", Hook: hook, Priority: priority, Policy: "accept"}
}

// forward renders the rules that restrict where a packet from a peering may leave the namespace, and where a packet to
// a peering may come from. They precede those of package firewall, whose priority is 0.
func forward(vpc *cloud.HostVPC) netfilter.Chain {
	c := filter("forward", -10)
	if !mutant.On(mutant.TransitPeering) {
		c.Rules = append(c.Rules, fmt.Sprintf("iifname %s oifname != %s drop", anyDevice, anyBridge))
	}
	c.Rules = append(c.Rules, fmt.Sprintf("oifname %s iifname != %s drop", anyDevice, anyBridge))
	for _, p := range []netip.Prefix{vpc.CIDR, vpc.CIDR6} {
		if p.IsValid() && !mutant.On(mutant.AnyPeerSource) {
			c.Rules = append(c.Rules,
				fmt.Sprintf("oifname %s %s saddr != %s drop", anyDevice, protocol(p.Addr().Is6()), p.Masked()))
		}
	}
	return c
}

// admitted renders the rules for packets from a peering that passed the checks: packets to ports on other hosts are not
// tracked.
func admitted(vpc *cloud.HostVPC) netfilter.Chain {
	c := netfilter.Chain{Name: "admitted"}
	if mutant.On(mutant.TrackTransit) {
		return c
	}
	for _, ipv6 := range []bool{false, true} {
		rule := "meta nfproto ipv4 notrack"
		if ipv6 {
			rule = "meta nfproto ipv6 notrack"
		}
		if local := localAddresses(vpc, ipv6); len(local) > 0 {
			rule = fmt.Sprintf("%s daddr != %s notrack", protocol(ipv6), elements(local))
		}
		c.Rules = append(c.Rules, rule)
	}
	return c
}

// localAddresses returns the addresses of the ports on this host, and of their small address pairs.
func localAddresses(vpc *cloud.HostVPC, ipv6 bool) (out []netip.Prefix) {
	add := func(p netip.Prefix) {
		if p.IsValid() && p.Addr().Is6() == ipv6 && p.Addr().BitLen()-p.Bits() <= smallPair {
			out = append(out, p.Masked())
		}
	}
	for i := range vpc.Subnets {
		for j := range vpc.Subnets[i].Ports {
			port := &vpc.Subnets[i].Ports[j]
			add(netip.PrefixFrom(port.IP, port.IP.BitLen()))
			add(netip.PrefixFrom(port.IP6, port.IP6.BitLen()))
			for _, pair := range port.Pairs {
				add(pair.CIDR)
			}
		}
	}
	return out
}

// arrivals returns the rules that admit packets from a peering: for each subnet, those from sources to which the route
// table of the subnet has a route by the peering. As in a routing table, the longest prefix decides.
func arrivals(vpc *cloud.HostVPC, p *cloud.HostPeering) []string {
	type group struct {
		conditions []string
		subnets    []netip.Prefix
	}
	var groups []*group
	for i := range vpc.Subnets {
		for _, ipv6 := range []bool{false, true} {
			s := &vpc.Subnets[i]
			subnet := s.CIDR
			if ipv6 {
				subnet = s.CIDR6
			}
			conditions := sources(s.Routes, p, prefixOf(p, ipv6))
			if !subnet.IsValid() || len(conditions) == 0 {
				continue
			}
			at := slices.IndexFunc(groups, func(g *group) bool { return slices.Equal(g.conditions, conditions) })
			if at < 0 {
				at = len(groups)
				groups = append(groups, &group{conditions: conditions})
			}
			groups[at].subnets = append(groups[at].subnets, subnet.Masked())
		}
	}
	var rules []string
	for _, g := range groups {
		destination := fmt.Sprintf("%s daddr %s ", protocol(g.subnets[0].Addr().Is6()), elements(g.subnets))
		if mutant.On(mutant.TransitPeering) {
			destination = ""
		}
		for _, condition := range g.conditions {
			rules = append(rules, fmt.Sprintf("iifname %q %s%s", p.ID.Device(), destination, condition))
		}
	}
	return rules
}

// sources returns conditions on the source of a packet, each with its verdict, for a subnet with the given routes.
// There are none if no route leads to sources within peer, the peering's prefix, by the peering.
func sources(routes []cloud.HostRoute, p *cloud.HostPeering, peer netip.Prefix) (out []string) {
	if !peer.IsValid() {
		return nil
	}
	sorted := slices.SortedFunc(slices.Values(routes), func(a, b cloud.HostRoute) int {
		return cmp.Or(b.Destination.Bits()-a.Destination.Bits(), a.Destination.Addr().Compare(b.Destination.Addr()))
	})
	open := false
	for _, r := range sorted {
		if !r.Destination.Overlaps(peer) {
			continue
		}
		// Of two prefixes that overlap, the longer one is their intersection.
		within := r.Destination
		if peer.Bits() > within.Bits() {
			within = peer.Masked()
		}
		verdict := "drop"
		if r.Target == cloud.RoutePeering && r.Peering == p.ID {
			verdict, open = "goto admitted", true
		}
		source := fmt.Sprintf("%s saddr %s ", protocol(peer.Addr().Is6()), within)
		if mutant.On(mutant.AnyPeerSource) {
			source = "meta nfproto ipv4 "
			if peer.Addr().Is6() {
				source = "meta nfproto ipv6 "
			}
		}
		out = append(out, source+verdict)
	}
	if !open {
		return nil
	}
	return out
}

// prefixOf returns the IPv4 or IPv6 prefix of the peer. It is invalid if the peering has none.
func prefixOf(p *cloud.HostPeering, ipv6 bool) netip.Prefix {
	if ipv6 {
		return p.CIDR6
	}
	return p.CIDR
}

func protocol(ipv6 bool) string {
	if ipv6 {
		return "ip6"
	}
	return "ip"
}

// elements returns prefixes as an anonymous set. The order of the elements does not depend on the order of list. A
// prefix within another one is left out, because the intervals of a set must not overlap.
func elements(list []netip.Prefix) string {
	sorted := slices.SortedFunc(slices.Values(list), func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits())
	})
	// A prefix follows those that contain it, and prefixes do not overlap otherwise. So only the last one kept can
	// contain the next.
	var kept []netip.Prefix
	for _, p := range sorted {
		if len(kept) == 0 || !kept[len(kept)-1].Contains(p.Addr()) {
			kept = append(kept, p)
		}
	}
	var text []string
	for _, p := range kept {
		if p.IsSingleIP() {
			text = append(text, p.Addr().String())
		} else {
			text = append(text, p.String())
		}
	}
	return "{ " + strings.Join(text, ", ") + " }"
}
