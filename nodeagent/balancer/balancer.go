// Package balancer distributes the connections to service IPs over their backends. [Set] takes the wanted state of a
// VPC and the VPC's network namespace on this host, compares the wanted state with the kernel's, and writes only the
// differences.
//
// # Path of a packet
//
// No device has the address of a service IP. The namespace has a route of type local for the address, so the kernel
// answers ARP requests for the address with the gateway's MAC address. Guests therefore send packets for the service IP
// to the gateway, also if the address is in their own subnet. The namespace translates the destination to the address
// of a backend before the security groups are applied (package firewall), and then forwards the packet like any other.
// The source stays the client's address, and the rules of the backend's security groups apply to this address. The
// backend sends the answer directly to the client. The client's host translates the source of the answer back to the
// service IP, also if client and backend are in one subnet: br_netfilter passes bridged packets to connection tracking.
//
// # Floating IPs
//
// Each host with the VPC distributes connections to the floating IP of a service IP like connections to the service IP
// itself. So the connections of guests of the VPC do not leave the VPC. One host answers for the floating IP outside
// (package edge). It distributes the connections from outside, and its answers leave with the floating IP as their
// source. The source of the packets that backends get is the client's address: the rules of the backends' security
// groups apply to it, as to the clients of a floating IP of a port. Without further rules, the backend's host would
// therefore route the answers by the route table of the backend's subnet, which can lead elsewhere. Instead, packets
// between the two hosts have a VNI of their own. The backend's host recognizes the connection by this VNI, marks it,
// and sends its answers back with the same VNI (returningChain).
//
// The alternative is to translate the source to an address of the host with the floating IP. Backends would then not
// see their clients, and the rules of security groups would see another source for a backend on that host than for one
// on another host.
//
// # Decisions
//
//   - Each host distributes the connections of its own ports. There is no central load balancer to fail over.
//   - A connection keeps its backend. Without affinity, the backend of a new connection is chosen at random according
//     to the weights. With [cloud.AffinityClientIP], the backend is chosen by a hash of the client's address, which has
//     the same result on all hosts and for all ports of the service IP. The hash modulo the number of slots is the
//     client's slot, and each slot selects its backend by weighted rendezvous hashing. So when a backend fails, only
//     the clients of this backend change to others.
//   - Connections to a service IP that are not translated, because no backend is healthy or the service IP has no such
//     port, are refused with a TCP reset or ICMP. Pings are dropped.
//   - A backend that connects to its own service IP and is chosen itself would get a packet from its own address, which
//     the guest's kernel drops. So the namespace replaces the source of such a packet by the gateway's address.
//     br_netfilter bridges a packet whose translated destination is in the sender's subnet, so the bridge must send
//     this packet to the device that it came from. Package netdev permits this for ports with HostPort.Hairpin. Such a
//     port would also get back its own broadcasts and multicasts, and the guest could take them for those of another
//     guest with the same address. A table of family bridge drops them.
//   - When a backend fails its health check, it gets no new connections. Its TCP connections continue, because the
//     guest may only be overloaded. Its UDP entries in connection tracking are deleted, because a client that keeps its
//     source port would otherwise keep the backend (kubernetes issue 48370).
//   - The tracked connections to backends that were removed are deleted. With nf_conntrack_tcp_loose 0 such a
//     connection does not begin again: its next segment gets a TCP reset.
//   - Each of the two nftables tables is replaced as a whole in one transaction if it differs.
//   - The package keeps no state. It recognizes its routes by a routing protocol number that only it uses. Set adds
//     routes first and deletes them last, so that the next call finds a route if a call was interrupted.
//
// The package supports IPv4 only. It does not check the health of backends (package health), and does not know VMs or
// the control plane.
package balancer

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netfilter"
	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Tables in the namespace of a VPC.
var (
	table       = netfilter.Table{Family: "ip", Name: "trivet-service"}
	bridgeTable = netfilter.Table{Family: "bridge", Name: "trivet-service"}
)

const (
	// routeProtocol is the routing protocol number of the package's routes (rtnetlink(7), rtm_protocol). The file
	// /etc/iproute2/rt_protos does not assign this number.
	routeProtocol = 190
	// connectionMark is the bit of the mark of translated connections. Package firewall uses bits 24 and 25, and package
	// edge uses bit 26. Bits 0 to 23 have the VNI of a floating IP (returningChain).
	connectionMark = 1 << 27

	// timeout limits the time that one call takes, and requestTimeout the wait for the answer to one netlink request.
	timeout        = 30 * time.Second
	requestTimeout = 30 * time.Second
)

// Result describes what a call did.
type Result struct {
	// Changes are the writes to the kernel as commands that an operator would type, except deleted connections. There
	// are none if the kernel's state was the wanted one.
	Changes []string
	// Revoked is the number of tracked connections that were deleted.
	Revoked int
}

// Set makes the service IPs in the network namespace ns of the VPC equal to vpc.Services. When Set returns nil,
// connection tracking has no connection to a removed backend, and no UDP entry of an unhealthy backend. After an error,
// part of the changes may be in effect; the next Set completes them. Calls for the same namespace must not be
// concurrent.
func Set(ctx context.Context, ns netns.NsHandle, vpc *cloud.HostVPC) (Result, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var r Result
	if err := set(ctx, ns, vpc, &r); err != nil {
		return r, fmt.Errorf("distribute the connections to service IPs of VPC %s: %w", vpc.ID, err)
	}
	return r, nil
}

func set(ctx context.Context, ns netns.NsHandle, vpc *cloud.HostVPC, r *Result) error {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer handle.Close()
	if err := handle.SetSocketTimeout(requestTimeout); err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	have, err := listRoutes(handle)
	if err != nil || len(have) == 0 && len(vpc.Services) == 0 {
		return err
	}
	want := map[netip.Addr]bool{}
	for i := range vpc.Services {
		for _, a := range addressesOf(&vpc.Services[i]) {
			want[a] = true
		}
	}
	if err := addRoutes(handle, have, want, r); err != nil {
		return err
	}
	if err := setTable(ctx, ns, bridgeTable, bridgeChains(vpc), r); err != nil {
		return err
	}
	if err := setTable(ctx, ns, table, chains(vpc), r); err != nil {
		return err
	}
	if r.Revoked, err = netfilter.DeleteConnections(ctx, handle, obsolete(vpc)); err != nil {
		return err
	}
	return deleteRoutes(handle, have, want, r)
}

// setTable makes a table equal to chains. Without chains it deletes the table.
func setTable(ctx context.Context, ns netns.NsHandle, t netfilter.Table, chains []netfilter.Chain, r *Result) error {
	change, write := "replace", func() (bool, error) { return t.Set(ctx, ns, chains) }
	if len(chains) == 0 {
		change, write = "delete", func() (bool, error) { return t.Delete(ctx, ns) }
	}
	changed, err := write()
	if changed {
		r.Changes = append(r.Changes, fmt.Sprintf("nft %s table %s", change, t))
	}
	return err
}

// listRoutes returns the package's routes in the namespace by address.
func listRoutes(h *netlink.Handle) (map[netip.Addr]netlink.Route, error) {
	filter := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Protocol: routeProtocol}
	list, err := netspace.List("routes", func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_V4, filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
	})
	if err != nil {
		return nil, err
	}
	out := map[netip.Addr]netlink.Route{}
	for _, route := range list {
		if a, ok := netip.AddrFromSlice(route.Dst.IP); ok {
			out[a.Unmap()] = route
		}
	}
	return out, nil
}

// addRoutes adds a route of type local for each address in want that have does not contain.
func addRoutes(h *netlink.Handle, have map[netip.Addr]netlink.Route, want map[netip.Addr]bool, r *Result) error {
	for _, a := range slices.SortedFunc(maps.Keys(want), netip.Addr.Compare) {
		if _, exists := have[a]; exists {
			continue
		}
		lo, err := h.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("add a route for %s: %w", a, err)
		}
		route := netlink.Route{
			LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST,
			Protocol: routeProtocol, Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(32, 32)},
		}
		if err := h.RouteAdd(&route); err != nil {
			return fmt.Errorf("add a route for %s: %w", a, err)
		}
		r.Changes = append(r.Changes, fmt.Sprintf("ip route add local %s dev lo proto %d", a, routeProtocol))
	}
	return nil
}

// deleteRoutes deletes the routes for addresses that are not in want.
func deleteRoutes(h *netlink.Handle, have map[netip.Addr]netlink.Route, want map[netip.Addr]bool, r *Result) error {
	for _, a := range slices.SortedFunc(maps.Keys(have), netip.Addr.Compare) {
		if want[a] {
			continue
		}
		route := have[a]
		if err := h.RouteDel(&route); err != nil {
			return fmt.Errorf("delete the route for %s: %w", a, err)
		}
		r.Changes = append(r.Changes, fmt.Sprintf("ip route delete local %s dev lo proto %d", a, routeProtocol))
	}
	return nil
}
