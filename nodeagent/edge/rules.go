package edge

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// vpcDevice is the name of the veth device in the namespace of a VPC for the default NAT gateway and floating IPs.
	vpcDevice = cloud.EdgeDevicePrefix + "0"
	// vpcDevices matches vpcDevice and the devices of other gateways.
	vpcDevices = cloud.EdgeDevicePrefix + "*"
	// connectionMark is the bit of the mark of connections through the edge in the namespace of a VPC. Package firewall
	// uses bits 24 and 25, and package balancer uses bit 27.
	connectionMark = 1 << 26
)

// connection is the wanted state of a veth pair between a VPC and the edge namespace. The pair is for the VPC's default
// NAT gateway and floating IPs, or for one other gateway.
type connection struct {
	VPC
	gateway   *Gateway // nil for the default gateway and floating IPs
	inside    *space   // the VPC's namespace
	number    int
	near, far netip.Addr // of the veth pair in the edge namespace, and in the VPC's
}

func (c *connection) device() string { return fmt.Sprintf("v%d", c.number) }

// ownAddress returns the address outside that belongs to the VPC's NAT gateway alone. It is invalid if the connections
// get the host's address, or without a NAT gateway.
func (c *connection) ownAddress(all []external) netip.Addr {
	if c.NAT == nil || c.NAT.Address == externalOf(all, c.NAT.External).Address.Addr() {
		return netip.Addr{}
	}
	return c.NAT.Address
}

// source returns the address that connections through the NAT gateway get in the VPC's namespace, or an invalid one
// without a NAT gateway.
func (c *connection) source(all []external) netip.Addr {
	own := c.ownAddress(all)
	if c.NAT != nil && !own.IsValid() {
		return c.far
	}
	return own
}

// route is an address outside that leads to a VPC.
type route struct {
	address  netip.Addr
	external *external
	vpc      *connection
}

// routes returns the addresses outside that lead to VPCs: floating IPs, and addresses of NAT gateways of their own.
func routes(all []external, connected []*connection) []route {
	var list []route
	for _, c := range connected {
		if own := c.ownAddress(all); own.IsValid() {
			list = append(list, route{own, externalOf(all, c.NAT.External), c})
		}
		for _, f := range c.Floating {
			list = append(list, route{f.Address, externalOf(all, f.External), c})
		}
	}
	slices.SortFunc(list, func(a, b route) int { return a.address.Compare(b.address) })
	return list
}

// elements joins the sorted elements of an anonymous set or map. Their order does not depend on the input's.
func elements(list []string) string {
	slices.Sort(list)
	return "{ " + strings.Join(list, ", ") + " }"
}

// edgeChains renders the rules of the edge namespace.
func edgeChains(all []external, connected []*connection) []chain {
	var floating, hosts, marks, sources, arriving, leaving, translated []string
	for _, x := range all {
		hosts = append(hosts, x.Address.Addr().String())
		leaving = append(leaving, fmt.Sprintf("%d . %q", x.mark, x.device))
	}
	for _, r := range routes(all, connected) {
		floating = append(floating, r.address.String())
		marks = append(marks, fmt.Sprintf("%s : %d", r.address, r.external.mark))
		sources = append(sources, fmt.Sprintf("%q . %s", r.vpc.device(), r.address))
		arriving = append(arriving, fmt.Sprintf("%q . %s", r.external.device, r.address))
	}
	for _, c := range connected {
		if c.source(all) == c.far {
			x := externalOf(all, c.NAT.External)
			marks = append(marks, fmt.Sprintf("%s : %d", c.far, x.mark))
			sources = append(sources, fmt.Sprintf("%q . %s", c.device(), c.far))
			translated = append(translated, fmt.Sprintf("%s : %s", c.far, x.Address.Addr()))
		}
	}
	links := linkPrefix.String()
	untracked := chain{name: "untracked", kind: "filter", hook: "prerouting", priority: -300, policy: "accept"}
	untracked.rules = []string{fmt.Sprintf(`iifname "x*" ip saddr %s drop`, links)}
	if len(floating) > 0 {
		set := elements(floating)
		untracked.rules = append(untracked.rules,
			fmt.Sprintf("ip saddr %s ip daddr != %s notrack", set, elements(hosts)),
			fmt.Sprintf("ip daddr %s ip saddr != %s notrack", set, links))
	}
	network := chain{name: "network", kind: "filter", hook: "prerouting", priority: -150, policy: "accept"}
	forward := chain{name: "forward", kind: "filter", hook: "forward", priority: 0, policy: "drop"}
	if len(sources) > 0 {
		network.rules = []string{`iifname "v*" meta mark set ip saddr map ` + elements(marks)}
		forward.rules = append(forward.rules, fmt.Sprintf(`iifname "v*" iifname . ip saddr != %s drop`, elements(sources)))
	} else {
		forward.rules = append(forward.rules, `iifname "v*" drop`)
	}
	forward.rules = append(forward.rules, "ct state established,related accept")
	if len(floating) > 0 {
		forward.rules = append(forward.rules,
			fmt.Sprintf(`iifname . ip daddr %s oifname "v*" accept`, elements(arriving)),
			fmt.Sprintf(`iifname "v*" oifname "v*" ip daddr %s accept`, elements(floating)))
	}
	if len(leaving) > 0 {
		forward.rules = append(forward.rules,
			fmt.Sprintf(`iifname "v*" meta mark . oifname %s ct state new,untracked accept`, elements(leaving)))
	}
	input := chain{name: "input", kind: "filter", hook: "input", priority: 0, policy: "drop", rules: []string{
		`iifname "x*" icmp type echo-request accept`, `iifname "x*" ct state established,related accept`,
	}}
	source := chain{name: "source", kind: "nat", hook: "postrouting", priority: 100, policy: "accept"}
	if len(translated) > 0 {
		source.rules = []string{"snat to ip saddr map " + elements(translated)}
	}
	return []chain{untracked, network, forward, input, source}
}

// vpcChains renders the rules of the namespace of a VPC, from all its connections.
func vpcChains(all []external, list []*connection, denied []netip.Prefix) []chain {
	destination := chain{name: "destination", kind: "nat", hook: "prerouting", priority: -100, policy: "accept"}
	source := chain{name: "source", kind: "nat", hook: "postrouting", priority: 100, policy: "accept"}
	for _, c := range list {
		if len(c.Floating) > 0 {
			var inward, outward []string
			for _, f := range c.Floating {
				inward = append(inward, fmt.Sprintf("%s : %s", f.Address, f.Fixed))
				outward = append(outward, fmt.Sprintf("%s : %s", f.Fixed, f.Address))
			}
			destination.rules = []string{fmt.Sprintf("iifname %q dnat to ip daddr map %s", c.inner(), elements(inward))}
			source.rules = []string{fmt.Sprintf("oifname %q snat to ip saddr map %s", c.inner(), elements(outward))}
		}
		if a := c.source(all); a.IsValid() {
			source.rules = append(source.rules, fmt.Sprintf("oifname %q snat to %s", c.inner(), a))
		}
	}
	// Before the rules of package firewall, whose priority is 0.
	forward := chain{name: "forward", kind: "filter", hook: "forward", priority: -10, policy: "accept", rules: []string{
		fmt.Sprintf("iifname %q oifname %[1]q drop", vpcDevices),
		fmt.Sprintf("iifname %q ct state invalid drop", vpcDevices),
		fmt.Sprintf("oifname %q ct state invalid drop", vpcDevices),
		fmt.Sprintf("iifname %q ct direction original ct status & dnat == 0 drop", vpcDevices),
	}}
	if len(denied) > 0 && !mutant.On(mutant.EdgeDenied) {
		var prefixes []string
		for _, p := range reduce(denied) {
			prefixes = append(prefixes, p.String())
		}
		forward.rules = append(forward.rules,
			fmt.Sprintf("oifname %q ct direction original ip daddr %s drop", vpcDevices, elements(prefixes)))
	}
	for _, direction := range []string{"iifname", "oifname"} {
		forward.rules = append(forward.rules,
			fmt.Sprintf("%s %q ct mark set ct mark | %#x", direction, vpcDevices, connectionMark))
	}
	return []chain{destination, forward, source}
}

// reduce returns the prefixes without those that another one contains: the intervals of a set must not overlap.
func reduce(prefixes []netip.Prefix) []netip.Prefix {
	var kept []netip.Prefix
	sorted := slices.SortedFunc(slices.Values(prefixes), func(a, b netip.Prefix) int { return a.Bits() - b.Bits() })
	for _, p := range sorted {
		if !slices.ContainsFunc(kept, func(k netip.Prefix) bool { return k.Contains(p.Addr()) }) {
			kept = append(kept, p)
		}
	}
	return kept
}
