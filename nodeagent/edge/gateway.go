package edge

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Gateway is a NAT gateway on this host that is not the default of its VPC, or a floating IP of a service IP. It has a
// veth pair of its own.
type Gateway struct {
	ID cloud.NATGatewayID
	cloud.HostNAT
	// Transit is the device in the VPC's namespace from which packets of other hosts to the gateway arrive. Required.
	// The device need not exist.
	Transit string
	// Mark is 0 for a NAT gateway. For a floating IP, it is the packet mark, of up to 24 bits, that package balancer
	// sets on packets that must leave through the floating IP. If Mark is not 0, connections from outside to the
	// address may pass.
	Mark uint32
}

// SubnetRoutes are the routes of a subnet to NAT gateways. SubnetRoutes have no effect if all Routes lead to the VPC's
// default gateway.
type SubnetRoutes struct {
	VNI uint32
	// Bridge is the device from which the packets of the subnet's guests arrive in the VPC's namespace.
	Bridge string
	Routes []Route
}

// Route is a route to a NAT gateway. Gateway is empty for the default gateway of the VPC, on this host or another one.
// Packets to a gateway that is not in VPC.Gateways are dropped.
type Route struct {
	Destination netip.Prefix
	Gateway     cloud.NATGatewayID
}

const (
	// servicePriority is the priority of the rules for packets with Gateway.Mark. They precede the rules of package netdev
	// for the tables of subnets, because answers leave through the floating IP to which their connection was opened.
	servicePriority = 32950
	// markMask selects the bits of a packet's mark that have Gateway.Mark.
	markMask = 1<<24 - 1
	// subnetPriority is the priority of the rules for SubnetRoutes, and transitPriority that of the rules for packets from
	// transit devices. Both precede vpcPriority and follow the rules of package netdev for the tables of subnets.
	subnetPriority  = 33500
	transitPriority = 33600
	// subnetTables plus a VNI is the routing table of SubnetRoutes. vpcTable plus the number of a veth pair is that of a
	// Gateway.
	subnetTables = 120_000_000
)

// insideName matches the names of the package's devices in VPCs' namespaces.
var insideName = regexp.MustCompile(`^edge(0|-[0-9a-f]{8})$`)

// isInside reports whether a device in a VPC's namespace has a name that the package uses.
func isInside(name string) bool { return insideName.MatchString(name) }

// inner returns the name of the connection's device in the VPC's namespace.
func (c *connection) inner() string {
	if c.gateway == nil {
		return vpcDevice
	}
	return "edge-" + hash(string(c.gateway.ID))
}

// alias returns the alias of the connection's device in the edge namespace. deleteObsolete reads the path of the VPC's
// namespace from it.
func (c *connection) alias() string {
	if c.gateway == nil {
		return aliasPrefix + c.Namespace
	}
	return aliasPrefix + c.Namespace + aliasDevice + c.inner()
}

// table returns the routing table of the connection in the VPC's namespace.
func (c *connection) table() int {
	if c.gateway == nil {
		return vpcTable
	}
	return vpcTable + c.number
}

// connect returns the connections of a VPC: one for its default NAT gateway and floating IPs, and one for each of its
// other gateways.
func connect(v VPC, inside *space) (list []*connection) {
	if v.NAT != nil || len(v.Floating) > 0 {
		list = append(list, &connection{VPC: v, inside: inside})
	}
	for i := range v.Gateways {
		g := &v.Gateways[i]
		of := VPC{ID: v.ID, Namespace: v.Namespace, CIDR: v.CIDR, NAT: &g.HostNAT, Subnets: v.Subnets, Withhold: v.Withhold}
		list = append(list, &connection{VPC: of, inside: inside, gateway: g})
	}
	return list
}

// byVPC groups connections by VPC. The connections of one VPC must be adjacent in all.
func byVPC(all []*connection) (out [][]*connection) {
	for _, c := range all {
		if last := len(out) - 1; last >= 0 && out[last][0].Namespace == c.Namespace {
			out[last] = append(out[last], c)
		} else {
			out = append(out, []*connection{c})
		}
	}
	return out
}

// addRoutes adds the address, the routes and the rules of the connection in the VPC's namespace.
func (n *network) addRoutes(c *connection) {
	device, table := c.inner(), c.table()
	n.address(device, netip.PrefixFrom(c.far, 31))
	link := netip.PrefixFrom(c.near, 31)
	n.route(device, netlink.Route{Table: table, Dst: ipNet(link), Scope: unix.RT_SCOPE_LINK, Type: unix.RTN_UNICAST})
	n.route(device, netlink.Route{Table: table, Gw: c.near.AsSlice(), Type: unix.RTN_UNICAST})
	if c.CIDR.IsValid() {
		n.route("", netlink.Route{Table: table, Dst: ipNet(c.CIDR.Masked()), Type: unix.RTN_UNREACHABLE})
	}
	switch {
	case c.gateway != nil:
		n.rule(routingRule{priority: transitPriority, device: c.gateway.Transit, table: table})
		if c.gateway.Mark != 0 {
			n.rule(routingRule{priority: servicePriority, mark: int(c.gateway.Mark), mask: markMask, table: table})
			// Packets that refuse a connection (TCP reset, ICMP) have no mark. They are selected by their source
			// address.
			n.rule(routingRule{priority: servicePriority, source: c.gateway.Address, table: table})
		}
	case c.NAT != nil:
		n.rule(routingRule{priority: vpcPriority, table: table})
	default:
		for _, f := range c.Floating {
			n.rule(routingRule{priority: floatingPriority, source: f.Fixed, table: table})
		}
	}
}

// addSubnetRoutes adds the routes of subnets to the gateways in list, which has the connections of one VPC. A route to
// the default gateway becomes a throw route: the kernel then continues with the next rule. A route to a gateway without
// a device becomes an unreachable route: without this route, the packets would leave with the source address of another
// gateway.
func (n *network) addSubnetRoutes(list []*connection) {
	if len(list) == 0 {
		return
	}
	gateways := map[cloud.NATGatewayID]*connection{}
	for _, c := range list {
		if c.gateway != nil {
			gateways[c.gateway.ID] = c
		}
	}
	for _, s := range list[0].Subnets {
		if !slices.ContainsFunc(s.Routes, func(r Route) bool { return r.Gateway != "" }) {
			continue
		}
		table := subnetTables + int(s.VNI)
		for _, r := range s.Routes {
			c := gateways[r.Gateway]
			one := netlink.Route{Table: table, Dst: ipNet(r.Destination), Type: unix.RTN_UNREACHABLE}
			switch {
			case r.Gateway == "":
				one.Type = unix.RTN_THROW
				n.route("", one)
			case c == nil || n.indexes[c.inner()] == 0:
				n.route("", one)
			default:
				one.Type, one.Gw = unix.RTN_UNICAST, c.near.AsSlice()
				n.route(c.inner(), one)
			}
		}
		n.rule(routingRule{priority: subnetPriority, device: s.Bridge, table: table})
	}
}

// ownTable reports whether a routing table in VPCs' namespaces is one of the package.
func ownTable(table int) bool {
	return table >= vpcTable && table < vpcTable+linkCount || table > subnetTables && table < subnetTables+1<<24
}

// checkGateways returns an error for a gateway without a transit device, for a floating IP without an address, and if
// the devices of two gateways would have the same name. A rule without a transit device would apply to the packets of
// all devices.
func (v *VPC) checkGateways() error {
	devices := map[string]cloud.NATGatewayID{}
	for i := range v.Gateways {
		c := &connection{gateway: &v.Gateways[i]}
		if c.gateway.Transit == "" {
			return fmt.Errorf("NAT gateway %s has no transit device", c.gateway.ID)
		}
		if c.gateway.Mark > markMask || c.gateway.Mark != 0 && !c.gateway.Address.IsValid() {
			return fmt.Errorf("floating IP %s has the mark %#x and the address %s: want up to 24 bits and an IPv4 address",
				c.gateway.ID, c.gateway.Mark, c.gateway.Address)
		}
		if other, used := devices[c.inner()]; used {
			return fmt.Errorf("NAT gateways %s and %s have the same hash", other, c.gateway.ID)
		}
		devices[c.inner()] = c.gateway.ID
	}
	return nil
}
