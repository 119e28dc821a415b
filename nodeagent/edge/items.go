package edge

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netfilter"
	"github.com/trivet-cloud/trivet/nodeagent/netspace"
)

const (
	// edgePriority is the first priority of rules in the edge namespace, after the main table. The main table has only
	// the routes to VPCs, which therefore precede those to external networks.
	edgePriority    = 33000
	maxEdgePriority = 33999
	// vpcPriority is the priority of the rule for vpcTable in VPCs' namespaces. The rule follows the other rules of
	// this package and the rules of package netdev for subnets. It precedes the rule of package netdev for a default
	// NAT gateway on another host.
	vpcPriority = 34000
	// floatingPriority is the priority of the rules that replace the rule with vpcPriority in a VPC without a default
	// NAT gateway. There is one such rule for each port with a floating IP, and it selects packets by their source. The
	// two priorities must differ: the kernel treats a rule without a source as equal to a rule that differs only by its
	// source. It refuses to add the second one, and may delete the wrong one.
	floatingPriority = 33900
	// vpcTable is the routing table of vpcDevice in VPCs' namespaces. Package netdev uses those from 100,000,001 to
	// 116,777,215.
	vpcTable = 90_000_000
)

// items are addresses, routes, rules or proxy entries. The keys describe them as ip(8) does, except for the verb. The
// values write them.
type items map[string]item

type item struct{ add, remove func() error }

// reconcile adds the items that are in want only, then removes those that are in have only. It returns the keys of
// added items, also after an error. An error of one item does not prevent the others. If the kernel refuses to add an
// item because it exists (EEXIST), reconcile adds the item after the removals: the kernel treats a rule without a
// source as equal to one that differs only by its source.
func (s *space) reconcile(have, want items) (added []string, failed error) {
	add := func(key string) error {
		err := want[key].add()
		if err == nil {
			added = append(added, key)
			s.changed("ip %s", strings.Replace(key, " ", " add ", 1))
		}
		return err
	}
	var postponed []string
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if _, exists := have[key]; exists {
			continue
		}
		switch err := add(key); {
		case errors.Is(err, unix.EEXIST):
			postponed = append(postponed, key)
		case err != nil:
			failed = errors.Join(failed, fmt.Errorf("add %s: %w", key, err))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(have)) {
		if _, wanted := want[key]; wanted {
			continue
		}
		if err := have[key].remove(); err != nil && !netspace.Absent(err) {
			failed = errors.Join(failed, fmt.Errorf("delete %s: %w", key, err))
			continue
		}
		s.changed("ip %s", strings.Replace(key, " ", " delete ", 1))
	}
	for _, key := range postponed {
		if err := add(key); err != nil {
			failed = errors.Join(failed, fmt.Errorf("add %s: %w", key, err))
		}
	}
	return added, failed
}

// network adds items of one namespace to a set. Items of devices that do not exist are left out: the error of the
// device is reported already.
type network struct {
	*space
	items
	indexes map[string]int
	names   map[int]string
}

func (s *space) network() (*network, error) {
	n := &network{space: s, items: items{}, indexes: map[string]int{}, names: map[int]string{}}
	links, err := s.links()
	if err != nil {
		return nil, err
	}
	for name, l := range links {
		n.indexes[name], n.names[l.Attrs().Index] = l.Attrs().Index, name
	}
	return n, nil
}

// empty returns a network of the same namespace without items.
func (n *network) empty() *network {
	return &network{space: n.space, items: items{}, indexes: n.indexes, names: n.names}
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func prefixOf(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	a, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(a.Unmap(), bits)
}

// address adds an address. The kernel makes no route for it.
func (n *network) address(device string, p netip.Prefix) {
	index, exists := n.indexes[device]
	if !exists {
		return
	}
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	a := &netlink.Addr{IPNet: ipNet(p), Flags: unix.IFA_F_NOPREFIXROUTE}
	n.items[fmt.Sprintf("address %s dev %s noprefixroute", p, device)] = item{
		func() error { return n.AddrReplace(link, a) }, func() error { return n.AddrDel(link, a) },
	}
}

// readAddresses reads the addresses of devices for which ours returns true.
func (n *network) readAddresses(ours func(string) bool) error {
	list, err := netspace.List("addresses", func() ([]netlink.Addr, error) { return n.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return err
	}
	for _, a := range list {
		if name := n.names[a.LinkIndex]; ours(name) {
			n.address(name, prefixOf(a.IPNet))
		}
	}
	return nil
}

// route adds a route. The fields Table, Dst, Gw, Src, Scope and Type of r are significant.
func (n *network) route(device string, r netlink.Route) {
	index, exists := n.indexes[device]
	if !exists && device != "" {
		return
	}
	r = netlink.Route{Table: r.Table, Dst: ipNet(prefixOf(r.Dst)), Gw: r.Gw, Src: r.Src, Scope: r.Scope, Type: r.Type,
		LinkIndex: index, Protocol: unix.RTPROT_STATIC, Family: netlink.FAMILY_V4}
	if r.Gw != nil {
		r.Flags = int(netlink.FLAG_ONLINK) // the route may be added before that of the next hop
	}
	key := "route "
	switch r.Type {
	case unix.RTN_UNREACHABLE:
		key += "unreachable "
	case unix.RTN_THROW:
		key += "throw "
	}
	key += prefixOf(r.Dst).String()
	if r.Gw != nil {
		key += " via " + netfilter.Address(r.Gw).String()
	}
	if device != "" {
		key += " dev " + device
	}
	if r.Src != nil {
		key += " src " + netfilter.Address(r.Src).String()
	}
	key += fmt.Sprintf(" table %d", r.Table)
	n.items[key] = item{func() error { return n.RouteReplace(&r) }, func() error { return n.RouteDel(&r) }}
}

// readRoutes reads the routes of tables for which ours returns true, except those that the kernel made.
func (n *network) readRoutes(ours func(table int) bool) error {
	list, err := netspace.List("routes", func() ([]netlink.Route, error) {
		all := &netlink.Route{Table: unix.RT_TABLE_UNSPEC}
		return n.RouteListFiltered(netlink.FAMILY_V4, all, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return err
	}
	for _, r := range list {
		if ours(r.Table) && r.Protocol != unix.RTPROT_KERNEL {
			n.route(n.names[r.LinkIndex], r)
		}
	}
	return nil
}

// routingRule selects a routing table. Source, device, mark and mask are optional.
type routingRule struct {
	priority int
	source   netip.Addr
	device   string // from which packets arrive
	mark     int
	mask     int // selects the bits of a packet's mark that are compared; 0 selects all
	table    int
}

// rule adds a routing rule.
func (n *network) rule(rule routingRule) {
	r := netlink.NewRule()
	r.Family, r.Priority, r.Table = netlink.FAMILY_V4, rule.priority, rule.table
	key := fmt.Sprintf("rule priority %d", rule.priority)
	if rule.source.IsValid() {
		r.Src = ipNet(netip.PrefixFrom(rule.source, rule.source.BitLen()))
		key += " from " + rule.source.String()
	}
	if rule.device != "" {
		r.IifName = rule.device
		key += " iif " + rule.device
	}
	if rule.mark != 0 {
		r.Mark = uint32(rule.mark)
		key += fmt.Sprintf(" fwmark %d", rule.mark)
		if rule.mask != 0 {
			mask := uint32(rule.mask)
			r.Mask = &mask
			key += fmt.Sprintf("/%#x", rule.mask)
		}
	}
	key += fmt.Sprintf(" lookup %d", rule.table)
	n.items[key] = item{func() error { return n.RuleAdd(r) }, func() error { return n.RuleDel(r) }}
}

// readRules reads the rules with priorities in a range.
func (n *network) readRules(first, last int) error {
	list, err := netspace.List("rules", func() ([]netlink.Rule, error) { return n.RuleList(netlink.FAMILY_V4) })
	if err != nil {
		return err
	}
	for _, r := range list {
		if r.Priority < first || r.Priority > last {
			continue
		}
		source := netip.Addr{}
		if r.Src != nil {
			source = netfilter.Address(r.Src.IP)
		}
		mask := 0
		if r.Mask != nil && *r.Mask != math.MaxUint32 {
			mask = int(*r.Mask)
		}
		n.rule(routingRule{
			priority: r.Priority, source: source, device: r.IifName, mark: int(r.Mark), mask: mask, table: r.Table,
		})
	}
	return nil
}

// proxy adds an entry that answers ARP requests for an address.
func (n *network) proxy(device string, a netip.Addr) {
	index, exists := n.indexes[device]
	if !exists {
		return
	}
	entry := &netlink.Neigh{LinkIndex: index, Family: netlink.FAMILY_V4, Flags: netlink.NTF_PROXY, IP: a.AsSlice()}
	n.items[fmt.Sprintf("neighbour proxy %s dev %s", a, device)] = item{
		func() error { return n.NeighSet(entry) }, func() error { return n.NeighDel(entry) },
	}
}

func (n *network) readProxies() error {
	list, err := netspace.List("proxy entries", func() ([]netlink.Neigh, error) { return n.NeighProxyList(0, netlink.FAMILY_V4) })
	if err != nil {
		return err
	}
	for _, e := range list {
		n.proxy(n.names[e.LinkIndex], netfilter.Address(e.IP))
	}
	return nil
}
