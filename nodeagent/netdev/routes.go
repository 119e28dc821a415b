package netdev

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// tableBase plus a VNI is the number of the routing table of a subnet. The tables of the kernel are 253 to 255.
	tableBase = 100_000_000
	// rulePriority is the priority of the rules that select the tables of subnets. The rule of the main table, 32766,
	// precedes them, so the connected routes decide about the VPC's own addresses.
	rulePriority = 33000
	// metric6 is the metric that the kernel gives to IPv6 routes without one.
	metric6 = 1024
	// unreachableMetric is the metric of the unreachable routes for the destinations of peerings. Routes of package
	// peering have the lower PeeringMetric, and so precede these routes while the device of the peering exists.
	unreachableMetric = 2000
)

// Protocol and metric of the routes that package peering adds to the tables of subnets. Package netdev neither changes
// nor deletes routes with this protocol.
const (
	PeeringProtocol netlink.RouteProtocol = 201
	PeeringMetric   int                   = 1000
)

// Table returns the number of the routing table of the subnet with a VNI.
func Table(vni uint32) int { return tableBase + int(vni) }

// tableRoute identifies a route in the table of a subnet, or in the table for the default NAT gateway if this is on
// another host.
type tableRoute struct {
	bridge      string // of the subnet; for a gateway the name that a bridge with the gateway's VNI would have
	destination netip.Prefix
	metric      int
}

// nextHop is the effect of a route. Only routes of the kind RTN_UNICAST have an address and a device. RTN_THROW ends
// the lookup in the subnet's table. The lookup continues with the table of package edge, if the VPC is connected to an
// external network, and fails otherwise.
type nextHop struct {
	kind   int // RTN_UNICAST, RTN_BLACKHOLE, RTN_UNREACHABLE or RTN_THROW
	via    netip.Addr
	bridge string // or transit device
}

// tableRule makes packets that arrive from a bridge, or that have a mark, use a routing table.
type tableRule struct {
	bridge          string // empty for packets from any device
	ipv6            bool
	table, priority int
	mark            uint32 // within markMask; 0 for packets with any mark
}

func tableOf(bridge string) int {
	vni, _ := strconv.Atoi(bridge[len("br"):]) // the names of bridges end in digits
	return tableBase + vni
}

func bridgeOfTable(table int) string { return "br" + strconv.Itoa(table-tableBase) }

// isSubnetTable reports whether a routing table is that of a subnet or that for the default NAT gateway on another
// host.
func isSubnetTable(table int) bool { return table > tableBase && table <= tableBase+maxVNI }

// addRoutes renders the route table of a subnet. Addresses of the VPC that are in none of its subnets are unreachable,
// so that a default route does not lead their packets out of the VPC.
func (w *state) addRoutes(vpc *cloud.HostVPC, s *cloud.HostSubnet) {
	bridge := Bridge(s.VNI)
	add := func(destination netip.Prefix, hop nextHop) {
		r := tableRoute{bridge: bridge, destination: destination}
		if destination.Addr().Is6() {
			r.metric = metric6
		}
		w.tables[r] = hop
	}
	unreachable := nextHop{kind: unix.RTN_UNREACHABLE}
	for _, r := range s.Routes {
		local := vpc.CIDR
		if r.Destination.Addr().Is6() {
			local = vpc.CIDR6
		}
		if local.IsValid() {
			add(local.Masked(), unreachable)
		}
		w.rules[tableRule{bridge, r.Destination.Addr().Is6(), tableOf(bridge), rulePriority, 0}] = true
	}
	for _, r := range s.Routes {
		if r.Target == cloud.RouteBlackhole {
			add(r.Destination, nextHop{kind: unix.RTN_BLACKHOLE})
			continue
		}
		if r.Target == cloud.RouteNAT {
			add(r.Destination, hopToGateway(vpc, r.Gateway))
			continue
		}
		if r.Target == cloud.RoutePeering {
			w.tables[tableRoute{bridge, r.Destination, unreachableMetric}] = unreachable
			continue
		}
		if target := subnetOf(vpc, r.Via); target != nil {
			add(r.Destination, nextHop{kind: unix.RTN_UNICAST, via: r.Via, bridge: Bridge(target.VNI)})
		}
	}
}

// subnetOf returns the subnet of the VPC that contains an address, or nil.
func subnetOf(vpc *cloud.HostVPC, a netip.Addr) *cloud.HostSubnet {
	for i := range vpc.Subnets {
		if s := &vpc.Subnets[i]; s.CIDR.Contains(a) || s.CIDR6.Contains(a) {
			return s
		}
	}
	return nil
}

// checkRoutes returns an error for a route that the kernel would refuse or that contradicts another one.
func checkRoutes(vpc *cloud.HostVPC, s *cloud.HostSubnet) error {
	seen := map[netip.Prefix]bool{}
	for _, r := range s.Routes {
		switch {
		case !r.Destination.IsValid() || r.Destination != r.Destination.Masked():
			return fmt.Errorf("route for %s: the destination is not a masked prefix", r.Destination)
		case seen[r.Destination]:
			return fmt.Errorf("two routes for %s", r.Destination)
		case r.Target == cloud.RouteBlackhole:
		case r.Target == cloud.RouteNAT && r.Destination.Addr().Is6():
			return fmt.Errorf("route for %s: NAT gateways translate IPv4 only", r.Destination)
		case r.Target == cloud.RouteNAT && r.Gateway != "" && gatewayOf(vpc, r.Gateway) == nil:
			return fmt.Errorf("route for %s: the VPC has no NAT gateway %s", r.Destination, r.Gateway)
		case r.Target == cloud.RouteNAT, r.Target == cloud.RoutePeering:
		case r.Target != cloud.RoutePort:
			return fmt.Errorf("route for %s: target %d is not supported", r.Destination, r.Target)
		case r.Via.Is4() != r.Destination.Addr().Is4() || subnetOf(vpc, r.Via) == nil:
			return fmt.Errorf("route for %s: %s is not an address of a port of the VPC", r.Destination, r.Via)
		}
		seen[r.Destination] = true
	}
	return nil
}

// readTable reads a route in the table of a subnet.
func readTable(have *state, r *netlink.Route, names map[int]string) {
	key := tableRoute{bridge: bridgeOfTable(r.Table), metric: r.Priority}
	bits, _ := r.Dst.Mask.Size()
	destination, _ := netip.AddrFromSlice(r.Dst.IP)
	if r.Family == netlink.FAMILY_V4 {
		destination = destination.Unmap() // the netlink package returns 0.0.0.0 with 16 bytes
	}
	key.destination = netip.PrefixFrom(destination, bits)
	hop := nextHop{kind: r.Type}
	if r.Type == unix.RTN_UNICAST {
		via, _ := netip.AddrFromSlice(r.Gw)
		hop.via, hop.bridge = via, names[r.LinkIndex]
	}
	have.tables[key] = hop
}

// readRules reads the rules for tables of subnets and gateways, and those with their priorities.
func (k *kernel) readRules(have *state, _ map[int]string) error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := netspace.List("rules", func() ([]netlink.Rule, error) { return k.vpc.RuleList(family) })
		if err != nil {
			return err
		}
		for _, r := range list {
			if isSubnetTable(r.Table) || r.Priority == rulePriority || r.Priority == transitPriority ||
				r.Priority == servicePriority {
				have.rules[tableRule{r.IifName, family == netlink.FAMILY_V6, r.Table, r.Priority, r.Mark}] = true
			}
		}
	}
	return nil
}

// addRoutes adds and replaces routes in the tables of subnets, then adds the rules that select the tables.
func (p *planner) addRoutes() {
	for _, r := range slices.SortedFunc(maps.Keys(p.want.tables), compareTableRoutes) {
		if hop := p.want.tables[r]; p.have.tables[r] != hop {
			p.add(replaceRoute{r, hop})
		}
	}
	for _, r := range slices.SortedFunc(maps.Keys(p.want.rules), compareTableRules) {
		if !p.have.rules[r] {
			p.add(addRule{r})
		}
	}
}

// deleteRoutes deletes rules and routes in the tables of subnets that are no longer wanted.
func (p *planner) deleteRoutes() {
	for _, r := range slices.SortedFunc(maps.Keys(p.have.rules), compareTableRules) {
		if !p.want.rules[r] {
			p.add(deleteRule{r})
		}
	}
	for _, r := range slices.SortedFunc(maps.Keys(p.have.tables), compareTableRoutes) {
		if _, wanted := p.want.tables[r]; !wanted {
			p.add(deleteRoute{r})
		}
	}
}

func compareTableRoutes(a, b tableRoute) int {
	return cmp.Or(cmp.Compare(a.bridge, b.bridge), a.destination.Compare(b.destination), cmp.Compare(a.metric, b.metric))
}

func compareTableRules(a, b tableRule) int {
	if a.ipv6 != b.ipv6 {
		if b.ipv6 {
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(a.bridge, b.bridge), cmp.Compare(a.table, b.table), cmp.Compare(a.priority, b.priority),
		cmp.Compare(a.mark, b.mark))
}

type (
	replaceRoute struct {
		tableRoute
		nextHop
	}
	deleteRoute struct{ tableRoute }
	addRule     struct{ tableRule }
	deleteRule  struct{ tableRule }
)

func (c replaceRoute) target() string { return "" }
func (c replaceRoute) String() string {
	text := "ip route replace "
	switch c.kind {
	case unix.RTN_BLACKHOLE:
		text += fmt.Sprintf("blackhole %s", c.destination)
	case unix.RTN_UNREACHABLE:
		text += fmt.Sprintf("unreachable %s", c.destination)
	case unix.RTN_THROW:
		text += fmt.Sprintf("throw %s", c.destination)
	default:
		text += fmt.Sprintf("%s via %s dev %s", c.destination, c.via, c.nextHop.bridge)
		if transitName.MatchString(c.nextHop.bridge) {
			text += " onlink"
		}
	}
	if c.metric == unreachableMetric {
		text += fmt.Sprintf(" metric %d", c.metric)
	}
	return fmt.Sprintf("%s table %d", text, tableOf(c.tableRoute.bridge))
}
func (c replaceRoute) apply(k *kernel) error {
	route := c.tableRoute.netlink()
	route.Type = c.kind
	if c.kind == unix.RTN_UNICAST {
		index, err := k.index(c.nextHop.bridge)
		if err != nil {
			return err
		}
		route.LinkIndex, route.Gw = index, c.via.AsSlice()
		if transitName.MatchString(c.nextHop.bridge) {
			route.Flags = int(netlink.FLAG_ONLINK) // the device has no address
		}
	}
	return k.vpc.RouteReplace(route)
}

// netlink returns the route without its next hop.
func (r tableRoute) netlink() *netlink.Route {
	family := netlink.FAMILY_V4
	if r.destination.Addr().Is6() {
		family = netlink.FAMILY_V6
	}
	return &netlink.Route{
		Table: tableOf(r.bridge), Dst: netlinkPrefix(r.destination), Priority: r.metric, Family: family,
	}
}

func (c deleteRoute) target() string { return "" }
func (c deleteRoute) String() string {
	return fmt.Sprintf("ip route delete %s metric %d table %d", c.destination, c.metric, tableOf(c.bridge))
}
func (c deleteRoute) apply(k *kernel) error {
	return ignoreAbsent(k.vpc.RouteDel(c.tableRoute.netlink()))
}

// command returns the command with the given verb, add or delete.
func (r tableRule) command(verb string) string {
	family, device := "", ""
	if r.ipv6 {
		family = "-6 "
	}
	if r.bridge != "" {
		device = "iif " + r.bridge + " "
	}
	if r.mark != 0 {
		device += fmt.Sprintf("fwmark %d/%#x ", r.mark, markMask)
	}
	return fmt.Sprintf("ip %srule %s %slookup %d priority %d", family, verb, device, r.table, r.priority)
}

func (r tableRule) netlink() *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family, rule.IifName, rule.Table, rule.Priority = netlink.FAMILY_V4, r.bridge, r.table, r.priority
	if r.ipv6 {
		rule.Family = netlink.FAMILY_V6
	}
	if r.mark != 0 {
		mask := uint32(markMask)
		rule.Mark, rule.Mask = r.mark, &mask
	}
	return rule
}

func (c addRule) target() string        { return "" }
func (c addRule) String() string        { return c.command("add") }
func (c addRule) apply(k *kernel) error { return k.vpc.RuleAdd(c.tableRule.netlink()) }
func (c deleteRule) target() string     { return "" }
func (c deleteRule) String() string     { return c.command("delete") }
func (c deleteRule) apply(k *kernel) error {
	return ignoreAbsent(k.vpc.RuleDel(c.tableRule.netlink()))
}
