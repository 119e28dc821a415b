package peering

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Next hops on the devices of peerings. No device has these addresses.
var (
	hop4 = netip.MustParseAddr("169.254.0.1")
	hop6 = netip.MustParseAddr("fe80::1")
)

// route is a route to a peering in the table of a subnet.
type route struct {
	table       int
	destination netip.Prefix
	device      string
	via         netip.Addr
	metric      int
}

func (r route) String() string {
	return fmt.Sprintf("%s via %s dev %s onlink metric %d table %d proto %d",
		r.destination, r.via, r.device, r.metric, r.table, netdev.PeeringProtocol)
}

// netlink returns the route as a request. The index is that of the device.
func (r route) netlink(index int) *netlink.Route {
	family := netlink.FAMILY_V4
	if r.destination.Addr().Is6() {
		family = netlink.FAMILY_V6
	}
	destination := &net.IPNet{
		IP: r.destination.Addr().AsSlice(), Mask: net.CIDRMask(r.destination.Bits(), r.destination.Addr().BitLen()),
	}
	return &netlink.Route{
		Family: family, Table: r.table, Dst: destination, Gw: r.via.AsSlice(), LinkIndex: index, Priority: r.metric,
		Protocol: netdev.PeeringProtocol, Flags: int(netlink.FLAG_ONLINK), Type: unix.RTN_UNICAST,
	}
}

// wantedRoutes returns the routes of vpc to peerings. A route whose destination has no address of the peer is left out.
func wantedRoutes(vpc *cloud.HostVPC) map[route]bool {
	out := map[route]bool{}
	for i := range vpc.Subnets {
		s := &vpc.Subnets[i]
		for _, r := range s.Routes {
			at := slices.IndexFunc(vpc.Peerings, func(p cloud.HostPeering) bool { return p.ID == r.Peering })
			if r.Target != cloud.RoutePeering || at < 0 {
				continue
			}
			ipv6 := r.Destination.Addr().Is6()
			if peer := prefixOf(&vpc.Peerings[at], ipv6); !peer.IsValid() || !peer.Overlaps(r.Destination) {
				continue
			}
			via := hop4
			if ipv6 {
				via = hop6
			}
			out[route{netdev.Table(s.VNI), r.Destination, r.Peering.Device(), via, netdev.PeeringMetric}] = true
		}
	}
	return out
}

// setRoutes makes the package's routes in the namespace equal to those of vpc. Routes to peerings whose device does not
// exist are left out.
func (s *space) setRoutes(vpc *cloud.HostVPC) error {
	links, err := s.links()
	if err != nil {
		return err
	}
	indexes, names := map[string]int{}, map[int]string{}
	for name, l := range links {
		indexes[name], names[l.Attrs().Index] = l.Attrs().Index, name
	}
	want := wantedRoutes(vpc)
	have, err := s.readRoutes(names)
	if err != nil {
		return err
	}
	compare := func(a, b route) int { return strings.Compare(a.String(), b.String()) }
	for _, r := range slices.SortedFunc(maps.Keys(have), compare) {
		if want[r] {
			continue
		}
		if err := s.RouteDel(r.netlink(indexes[r.device])); err != nil && !netspace.Absent(err) {
			return fmt.Errorf("delete route %s: %w", r, err)
		}
		s.changed("ip route delete %s", r)
	}
	for _, r := range slices.SortedFunc(maps.Keys(want), compare) {
		index, exists := indexes[r.device]
		if have[r] || !exists {
			continue
		}
		if err := s.RouteReplace(r.netlink(index)); err != nil {
			return fmt.Errorf("add route %s: %w", r, err)
		}
		s.changed("ip route replace %s", r)
	}
	return nil
}

// readRoutes reads the package's routes.
func (s *space) readRoutes(names map[int]string) (map[route]bool, error) {
	out := map[route]bool{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := netspace.List("routes", func() ([]netlink.Route, error) {
			return s.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		})
		if err != nil {
			return nil, err
		}
		for _, r := range list {
			if r.Protocol != netdev.PeeringProtocol || r.Dst == nil {
				continue
			}
			bits, _ := r.Dst.Mask.Size()
			address, _ := netip.AddrFromSlice(r.Dst.IP)
			via, _ := netip.AddrFromSlice(r.Gw)
			if family == netlink.FAMILY_V4 {
				address, via = address.Unmap(), via.Unmap()
			}
			out[route{r.Table, netip.PrefixFrom(address, bits), names[r.LinkIndex], via, r.Priority}] = true
		}
	}
	return out, nil
}
