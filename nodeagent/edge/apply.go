package edge

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// application is one call of Set.
type application struct {
	options   *Options
	externals []external
	host      *netlink.Handle
	edge      *space
	connected []*connection
	movable   *movableAddresses
	// unannounced is Edge.unannounced.
	unannounced map[string]bool
}

// apply makes the kernel's state equal to the wanted one. The rules of the edge namespace precede its devices, and an
// address outside is answered last. An error of one VPC or external network does not prevent the others.
func (a *application) apply(r *Result) error {
	if err := a.edge.setSettings(edgeSettings); err != nil {
		return err
	}
	links, err := a.edge.links()
	if err != nil {
		return err
	}
	if err := numbers(a.connected, links); err != nil {
		return err
	}
	if err := a.edge.setTable(edgeChains(a.externals, a.connected)); err != nil {
		return err
	}
	failed := a.setDevices(links, r)
	for _, list := range byVPC(a.connected) {
		if err := a.setVPC(list); err != nil {
			failed = append(failed, &VPCError{list[0].ID, err})
		}
	}
	return errors.Join(append(failed, a.setEdge(r), a.revoke(r))...)
}

// setDevices makes the devices of external networks and VPCs, and deletes others.
func (a *application) setDevices(links map[string]netlink.Link, r *Result) (failed []error) {
	wanted := map[string]bool{}
	for i := range a.externals {
		wanted[a.externals[i].device] = true
	}
	for _, c := range a.connected {
		wanted[c.device()] = true
	}
	paths, err := a.edge.deleteObsolete(links, wanted)
	if err != nil {
		failed = append(failed, err)
	}
	for _, path := range paths {
		if err := disconnectPath(a.edge.ctx, path, a.connected, r); err != nil {
			failed = append(failed, err)
		}
	}
	if lo := links["lo"]; lo != nil {
		failed = append(failed, a.edge.setUp(lo))
	}
	for i := range a.externals {
		x := &a.externals[i]
		err := a.setExternal(x, links)
		if err == nil {
			err = a.edge.setSettings(externalSettings(x.device))
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("external network %s: %w", x.name, err))
		}
	}
	for _, c := range a.connected {
		if err := a.setLink(c, links); err != nil {
			failed = append(failed, &VPCError{c.ID, err})
		}
	}
	return failed
}

// setVPC makes the rules and routes in the namespace of a VPC, from all its connections.
func (a *application) setVPC(list []*connection) error {
	inside := list[0].inside
	if err := inside.setTable(vpcChains(a.externals, list)); err != nil {
		return err
	}
	for _, c := range list {
		if err := inside.setSettings(vpcSettings(c.inner())); err != nil {
			return err
		}
	}
	return inside.setRoutes(list)
}

// setRoutes makes the addresses, routes and rules of the package in the namespace of a VPC with the given connections.
func (s *space) setRoutes(list []*connection) error {
	have, err := s.network()
	if err != nil {
		return err
	}
	want := have.empty()
	for _, c := range list {
		want.addRoutes(c)
	}
	want.addSubnetRoutes(list)
	err = errors.Join(
		have.readAddresses(isInside), have.readRoutes(ownTable), have.readRules(servicePriority, servicePriority),
		have.readRules(subnetPriority, vpcPriority))
	if err == nil {
		_, err = s.reconcile(have.items, want.items)
	}
	return err
}

// setEdge makes the addresses, routes and rules of the edge namespace, announces new addresses of the host, and then
// answers for the addresses of VPCs.
func (a *application) setEdge(r *Result) error {
	have, err := a.edge.network()
	if err != nil {
		return err
	}
	want := have.empty()
	for _, x := range a.externals {
		want.address(x.device, x.Address)
		src := x.Address.Addr().AsSlice()
		want.route(x.device, netlink.Route{Table: x.table, Dst: ipNet(x.Address.Masked()), Src: src,
			Scope: unix.RT_SCOPE_LINK, Type: unix.RTN_UNICAST})
		if x.Gateway.IsValid() {
			want.route(x.device, netlink.Route{Table: x.table, Gw: x.Gateway.AsSlice(), Src: src, Type: unix.RTN_UNICAST})
		}
		want.rule(routingRule{priority: edgePriority, mark: x.mark, table: x.table})
		want.rule(routingRule{priority: edgePriority + 1, source: x.Address.Addr(), table: x.table})
	}
	for _, c := range a.connected {
		link := netip.PrefixFrom(c.near, 31)
		want.address(c.device(), link)
		want.route(c.device(), netlink.Route{Table: unix.RT_TABLE_MAIN, Dst: ipNet(link), Scope: unix.RT_SCOPE_LINK,
			Type: unix.RTN_UNICAST})
	}
	for _, o := range routes(a.externals, a.connected) {
		want.route(o.vpc.device(), netlink.Route{Table: unix.RT_TABLE_MAIN, Gw: o.vpc.far.AsSlice(),
			Dst: ipNet(netip.PrefixFrom(o.address, 32)), Type: unix.RTN_UNICAST})
	}
	err = errors.Join(
		have.readAddresses(func(name string) bool { return linkName.MatchString(name) || externalName.MatchString(name) }),
		have.readRoutes(func(table int) bool { return table != unix.RT_TABLE_LOCAL }),
		have.readRules(edgePriority, maxEdgePriority))
	if err != nil {
		return err
	}
	added, err := a.edge.reconcile(have.items, want.items)
	return errors.Join(err, a.announce(added, want, r), a.answer(have, r))
}

// disconnect removes what the package has in the namespace of a VPC, and the VPC's connections to the outside. It reads
// the rules only if there is a trace of the package.
func (s *space) disconnect(r *Result) error {
	have, err := s.network()
	if err != nil {
		return err
	}
	if err := have.readRules(subnetPriority, vpcPriority); err != nil {
		return err
	}
	links, err := s.links()
	if err != nil {
		return err
	}
	maps.DeleteFunc(links, func(name string, _ netlink.Link) bool { return !isInside(name) })
	if len(links) == 0 && len(have.items) == 0 {
		return nil
	}
	for _, l := range links {
		if err := s.deleteLink(l); err != nil {
			return err
		}
	}
	if err := s.deleteTable(); err != nil {
		return err
	}
	passing := func(f *netlink.ConntrackFlow) bool { return f.Mark&connectionMark != 0 }
	if err := s.deleteConnections(passing, r); err != nil {
		return err
	}
	// The rules are deleted last, so that the next call finds a rule if this one is interrupted.
	return s.setRoutes(nil)
}

// disconnectPath disconnects the VPC with a namespace, unless it is connected by another device.
func disconnectPath(ctx context.Context, path string, connected []*connection, r *Result) error {
	for _, c := range connected {
		if c.Namespace == path {
			return nil
		}
	}
	s, err := openSpace(ctx, path, r)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.disconnect(r)
}

// remove disconnects all VPCs and deletes the edge namespace.
func (e *Edge) remove(ctx context.Context) error {
	mounted, err := nsthread.Exists(e.path())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !mounted {
		return os.Remove(e.path())
	}
	var r Result
	s, err := openSpace(ctx, e.path(), &r)
	if err != nil {
		return err
	}
	defer s.Close()
	links, err := s.links()
	if err != nil {
		return err
	}
	paths, err := s.deleteObsolete(links, nil)
	for _, path := range paths {
		err = errors.Join(err, disconnectPath(ctx, path, nil, &r))
	}
	if err != nil {
		return err
	}
	return netns.DeleteNamed(e.name())
}

// edgeSettings are the settings of the edge namespace. ip_forward is first, because writing it resets others.
var edgeSettings = []netspace.Setting{
	{Path: "net/ipv4/ip_forward", Value: "1"},
	{Path: "net/ipv4/conf/all/rp_filter", Value: "0"},
	{Path: "net/ipv4/conf/default/rp_filter", Value: "0"},
	{Path: "net/ipv4/conf/all/send_redirects", Value: "0"}, // packets between floating IPs of one VPC leave where they came from
	{Path: "net/ipv4/conf/default/send_redirects", Value: "0"},
	{Path: "net/ipv4/conf/all/accept_redirects", Value: "0"},
	{Path: "net/ipv4/conf/default/accept_redirects", Value: "0"},
	// With promote_secondaries, the kernel keeps the host's new address in an external network when the former address,
	// which is the primary one, is deleted.
	{Path: "net/ipv4/conf/all/promote_secondaries", Value: "1"},
	{Path: "net/ipv4/conf/all/accept_source_route", Value: "0"},
	{Path: "net/ipv4/conf/default/accept_source_route", Value: "0"},
	{Path: "net/ipv4/conf/all/arp_ignore", Value: "1"},   // the addresses of veth pairs are not answered outside
	{Path: "net/ipv4/conf/all/arp_announce", Value: "2"}, // requests outside have the host's address
	{Path: "net/ipv4/icmp_errors_use_inbound_ifaddr", Value: "1"},
	{Path: "net/ipv6/conf/all/disable_ipv6", Value: "1"},
	{Path: "net/ipv6/conf/default/disable_ipv6", Value: "1"},
	{Path: "net/netfilter/nf_conntrack_tcp_loose", Value: "0"},
}

// externalSettings are the settings of the device of an external network.
func externalSettings(device string) []netspace.Setting {
	return []netspace.Setting{{Path: "net/ipv4/neigh/" + device + "/proxy_delay", Value: "0"}} // ARP requests are answered at once
}

// vpcSettings are the settings of a device of the package in VPCs' namespaces.
func vpcSettings(device string) []netspace.Setting {
	return []netspace.Setting{
		{Path: "net/ipv4/conf/" + device + "/rp_filter", Value: "0"},
		{Path: "net/ipv4/conf/" + device + "/accept_redirects", Value: "0"},
		{Path: "net/ipv6/conf/" + device + "/disable_ipv6", Value: "1"},
	}
}
