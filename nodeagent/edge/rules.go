package edge

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/trivet-cloud/trivet/nodeagent/netfilter"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// vpcDevice is the name of the veth device in the namespace of a VPC for the default NAT gateway and floating IPs.
	vpcDevice = cloud.EdgeDevicePrefix + "0"
	// vpcDevices matches vpcDevice and the devices of other gateways.
	vpcDevices = cloud.EdgeDevicePrefix + "*"
	// connectionMark is the bit of the mark of connections through the edge in the namespace of a VPC. Package firewall
	// uses bits 24 and 25, and package balancer uses bit 27.
	connectionMark = 1 << 26
	// reroutedMark is the bit of the connection mark (ct mark) that marks rerouted connections: their packets now leave
	// through another device than when the connection began, so the translated source address is wrong. revoke deletes
	// these connections.
	reroutedMark = 1 << 28
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
	// movable is true for the address of a NAT gateway or of the floating IP of a service IP: another host can take it
	// over. The addresses of ports move only with the ports.
	movable bool
}

// routes returns the addresses outside that lead to VPCs: floating IPs, and addresses of NAT gateways of their own.
func routes(all []external, connected []*connection) []route {
	var list []route
	for _, c := range connected {
		if own := c.ownAddress(all); own.IsValid() {
			list = append(list, route{own, externalOf(all, c.NAT.External), c, true})
		}
		for _, f := range c.Floating {
			list = append(list, route{f.Address, externalOf(all, f.External), c, false})
		}
	}
	slices.SortFunc(list, func(a, b route) int { return a.address.Compare(b.address) })
	return list
}

// edgeChains renders the rules of the edge namespace.
func edgeChains(all []external, connected []*connection) []netfilter.Chain {
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
	untracked := netfilter.Chain{Name: "untracked", Kind: "filter", Hook: "prerouting", Priority: -300, Policy: "accept"}
	untracked.Rules = []string{fmt.Sprintf(`iifname "x*" ip saddr %s drop`, links)}
	if len(floating) > 0 {
		set := netfilter.Elements(floating)
		untracked.Rules = append(untracked.Rules,
			fmt.Sprintf("ip saddr %s ip daddr != %s notrack", set, netfilter.Elements(hosts)),
			fmt.Sprintf("ip daddr %s ip saddr != %s notrack", set, links))
	}
	network := netfilter.Chain{Name: "network", Kind: "filter", Hook: "prerouting", Priority: -150, Policy: "accept"}
	forward := netfilter.Chain{Name: "forward", Kind: "filter", Hook: "forward", Priority: 0, Policy: "drop"}
	if len(sources) > 0 {
		network.Rules = []string{`iifname "v*" meta mark set ip saddr map ` + netfilter.Elements(marks)}
		forward.Rules = append(forward.Rules, fmt.Sprintf(`iifname "v*" iifname . ip saddr != %s drop`, netfilter.Elements(sources)))
	} else {
		forward.Rules = append(forward.Rules, `iifname "v*" drop`)
	}
	forward.Rules = append(forward.Rules, "ct state established,related accept")
	if len(floating) > 0 {
		forward.Rules = append(forward.Rules,
			fmt.Sprintf(`iifname . ip daddr %s oifname "v*" accept`, netfilter.Elements(arriving)),
			fmt.Sprintf(`iifname "v*" oifname "v*" ip daddr %s accept`, netfilter.Elements(floating)))
	}
	if len(leaving) > 0 {
		forward.Rules = append(forward.Rules,
			fmt.Sprintf(`iifname "v*" meta mark . oifname %s ct state new,untracked accept`, netfilter.Elements(leaving)))
	}
	input := netfilter.Chain{Name: "input", Kind: "filter", Hook: "input", Priority: 0, Policy: "drop", Rules: []string{
		`iifname "x*" icmp type echo-request accept`, `iifname "x*" ct state established,related accept`,
	}}
	source := netfilter.Chain{Name: "source", Kind: "nat", Hook: "postrouting", Priority: 100, Policy: "accept"}
	if len(translated) > 0 {
		source.Rules = []string{"snat to ip saddr map " + netfilter.Elements(translated)}
	}
	return []netfilter.Chain{untracked, network, forward, input, source}
}

// vpcChains renders the rules of the namespace of a VPC, from all its connections.
func vpcChains(all []external, list []*connection) []netfilter.Chain {
	destination := netfilter.Chain{Name: "destination", Kind: "nat", Hook: "prerouting", Priority: -100, Policy: "accept"}
	source := netfilter.Chain{Name: "source", Kind: "nat", Hook: "postrouting", Priority: 100, Policy: "accept"}
	for _, c := range list {
		if len(c.Floating) > 0 {
			var inward, outward []string
			for _, f := range c.Floating {
				inward = append(inward, fmt.Sprintf("%s : %s", f.Address, f.Fixed))
				outward = append(outward, fmt.Sprintf("%s : %s", f.Fixed, f.Address))
			}
			destination.Rules = []string{fmt.Sprintf("iifname %q dnat to ip daddr map %s", c.inner(), netfilter.Elements(inward))}
			source.Rules = []string{fmt.Sprintf("oifname %q snat to ip saddr map %s", c.inner(), netfilter.Elements(outward))}
		}
		if a := c.source(all); a.IsValid() {
			source.Rules = append(source.Rules, fmt.Sprintf("oifname %q snat to %s", c.inner(), a))
		}
	}
	// Before the rules of package firewall, whose priority is 0.
	forward := netfilter.Chain{Name: "forward", Kind: "filter", Hook: "forward", Priority: -10, Policy: "accept", Rules: []string{
		rerouted(all, list),
		fmt.Sprintf("iifname %q oifname %[1]q drop", vpcDevices),
		fmt.Sprintf("iifname %q ct state invalid drop", vpcDevices),
		fmt.Sprintf("oifname %q ct state invalid drop", vpcDevices),
		fmt.Sprintf("iifname %q ct direction original ct status & dnat == 0 drop", vpcDevices),
	}}
	for _, direction := range []string{"iifname", "oifname"} {
		forward.Rules = append(forward.Rules,
			fmt.Sprintf("%s %q ct mark set ct mark | %#x", direction, vpcDevices, connectionMark))
	}
	return []netfilter.Chain{destination, forward, source}
}

// rerouted renders the rule that drops a guest's packet, and marks its connection with reroutedMark, if the
// connection's source address was translated for another device than the one through which the packet leaves. Such
// connections exist because the kernel does not change the translation of a tracked connection when the route changes.
func rerouted(all []external, list []*connection) string {
	rule := fmt.Sprintf("ct direction original ct status & (snat | dnat) == snat ct mark & %#x != 0 ", connectionMark)
	var sources []string
	for _, c := range list {
		for _, f := range c.Floating {
			sources = append(sources, fmt.Sprintf("%q . %s", c.inner(), f.Address))
		}
		if a := c.source(all); a.IsValid() {
			sources = append(sources, fmt.Sprintf("%q . %s", c.inner(), a))
		}
	}
	if len(sources) > 0 {
		rule += fmt.Sprintf("oifname . ct reply ip daddr != %s ", netfilter.Elements(sources))
	}
	return rule + fmt.Sprintf("ct mark set ct mark | %#x drop", reroutedMark)
}
