// Package edge connects the VPCs of a host to external networks: NAT gateways, which let guests open connections to the
// outside, and floating IPs, which are addresses of an external network that lead to one port or service IP each.
// [Edge.Set] takes the wanted state of the whole host, compares it with the kernel's, and writes only the differences.
//
// # Path of a packet
//
// One network namespace for each host, Options.Prefix + "edge", is between the VPCs and the external networks:
//
//   - For each external network it has a macvlan device on the host's interface, named x and a hash of the
//     network's name, with the host's address in the network.
//   - For each VPC with a default NAT gateway or a floating IP it has one end of a veth pair, named v and a number. The
//     other end is named edge0 and is in the VPC's namespace. The number determines the two addresses of the pair, a
//     /31 of 169.254.0.0/16. Each NAT gateway that is not the default has a veth pair of its own, whose end in the
//     VPC's namespace is named edge- and a hash of the gateway's ID. So does each floating IP of a service IP.
//
// A packet from a guest with a floating IP gets this address as its source in the VPC's namespace. A packet from
// another guest gets the VPC's end of the veth pair as its source there, and the host's address of the external network
// in the edge namespace. The edge namespace routes a packet to a floating IP to the VPC, in whose namespace the packet
// gets the port's address as its destination, before the security groups are applied. So the rules of security groups
// see the original address outside and the port's address. A packet to the floating IP of a service IP reaches the
// VPC's namespace in the same way, where package balancer selects the backend. The packets in the other direction have
// the mark of the floating IP, which selects its routing table.
//
// # Decisions
//
//   - The addresses of guests are translated in the VPC's own namespace. Each namespace has its own connection
//     tracking, and no address of a guest reaches the edge namespace. VPCs with the same prefix therefore need neither
//     conntrack zones nor marks to be told apart.
//   - The package keeps no state. The number of a veth pair is a hash of the VPC's ID and the name of the device in the
//     VPC's namespace, or the next free number. An existing pair keeps its number, which is read back from the device's
//     name. The alias of the device in the edge namespace is the path of the VPC's namespace, followed by the name of
//     the device there unless this is edge0.
//   - Traffic of floating IPs is not tracked in the edge namespace, but in the VPC's only. A flood to a floating IP
//     takes no conntrack entries from other VPCs.
//   - A macvlan device leaves the interface and its addresses in the host's namespace as they are. Linux lets a macvlan
//     device exchange no packets with the interface that it is on, so guests do not reach the host's own addresses on
//     the interface. The MAC address of the device is derived from the interface's, so that neighbours need not learn
//     a new one after the device was made again. An interface that cannot have macvlan devices (the loopback device, a
//     bridge port) is refused: configure the bridge instead of its port. The network's switches must accept several
//     MAC addresses on the host's port.
//   - Floating IPs are answered by proxy ARP, with one entry each. Set sends a gratuitous ARP when it adds an entry, so
//     that neighbours learn at once that an address has moved to this host. [Edge.Withdraw] deletes the entries of
//     addresses that another host can take over, and does not wait for a running Set.
//   - Packets to floating IPs of the same host, also of the same VPC, pass through the edge namespace like those from
//     outside.
//   - The edge namespace forwards from a VPC only packets whose source the VPC may use outside. It has no rules for the
//     addresses of hosts and control plane members: package firewall drops packets to these addresses in the VPC's
//     namespace. The edge namespace itself answers only pings from outside to the host's address.
//   - The VPC's namespace has a routing table with the default route to the edge namespace. A rule selects this table
//     after the tables of subnets (package netdev), so the route table of a subnet precedes it. Without a default NAT
//     gateway on this host, the rule applies only to ports with floating IPs, because the default NAT gateway may be on
//     another host.
//   - Routing selects the NAT gateway: the rules translate a packet according to the device through which it leaves the
//     VPC's namespace. Each gateway that is not the default has a routing table for packets that arrive from other
//     hosts. Each subnet with a route has a further table if the VPC has such a gateway on this host.
//   - After the rules have changed, each Set compares the tracked connections with the wanted state, and deletes those
//     that the wanted state translates differently. With nf_conntrack_tcp_loose 0 a deleted TCP connection does not
//     begin again.
//   - The kernel does not translate a tracked connection again when its route changes. Packets that would leave with
//     the source address of another gateway are dropped. The next Set deletes the tracked connection of such packets.
//     Without this deletion, a guest that keeps sending UDP packets from one port would keep the wrong translation for
//     ever.
//   - The rules of a namespace are one nftables table, which is replaced as a whole in one transaction if it differs.
//     Address lists are anonymous maps in the rules: the kernel cannot change them, so a hash of each rule in its
//     comment suffices to recognize a change.
//
// # Limits
//
// The package supports IPv4 only. Connections through NAT gateways are tracked in the edge namespace, and all VPCs
// share its limit, net.netfilter.nf_conntrack_max. Such a connection ends when the gateway moves to another host, and
// when the VM moves to a host where it has another outside address. Connections through floating IPs continue if the
// VPC's namespace accepts them (netdev.Migrations). When a route changes to another NAT gateway of the VPC, the TCP
// connections that use the route end. UDP flows that use the route continue with the new source address after the next
// Set.
//
// The edge namespace resolves neighbours in the external networks by ARP. The kernel limits the total number of
// neighbour entries in all namespaces (net.ipv4.neigh.default.gc_thresh3, 1024 by default). If an external network has
// more addresses than this limit, a guest that sends to many unused addresses can use up the neighbour entries of the
// host.
//
// The package does not make VPCs' namespaces, and does not know VMs or the control plane.
package edge

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Options are the settings of an Edge.
type Options struct {
	// Prefix starts the name of the edge namespace. The default is "trivet-". It must be that of netdev.Options.
	Prefix string
	// Namespace is the path of the network namespace with the interfaces of External. The default is the namespace of
	// the process.
	Namespace string
	// External are the external networks that the host is connected to, by name.
	External map[string]External
	// Timeout limits the time that one call takes. The default is 60 s.
	Timeout time.Duration
}

// External is the host's connection to an external network.
type External struct {
	// Interface is the host's network device at the external network. Required. It must be up.
	Interface string
	// Address is the host's own IPv4 address in the external network, with the length of the network's prefix. Required.
	// No other device may have the address.
	Address netip.Prefix
	// Gateway is the router of the external network. Without it, only addresses of the network are reachable.
	Gateway netip.Addr
}

// State is the wanted state of a host.
type State struct {
	// VPCs are the VPCs of the host, also those without connection to an external network.
	VPCs []VPC
}

// VPC is the wanted state of a VPC on the host. It is connected if it has a NAT gateway on the host or a floating IP.
type VPC struct {
	ID cloud.VPCID
	// Namespace is the path of the VPC's network namespace, which must exist.
	Namespace string
	// CIDR is the IPv4 prefix of the VPC. Packets to it never leave the VPC.
	CIDR netip.Prefix
	// NAT is the default NAT gateway, or nil if there is none on this host.
	NAT *cloud.HostNAT
	// Gateways are the other NAT gateways on this host, and Subnets the routes of subnets to NAT gateways.
	Gateways []Gateway
	Subnets  []SubnetRoutes
	// Floating are the floating IPs of the VPC's ports on this host.
	Floating []cloud.HostFloating
	// Withhold is true if the host must not answer for the addresses of NAT gateways and of floating IPs of service IPs,
	// because another host may do so. It does not apply to Floating.
	Withhold bool
}

// VPCOf returns the wanted state of a VPC whose namespace has the given path, without Gateways and Subnets.
func VPCOf(vpc *cloud.HostVPC, namespace string) VPC {
	return VPC{ID: vpc.ID, Namespace: namespace, CIDR: vpc.CIDR, NAT: vpc.NAT, Floating: vpc.Floating}
}

// Result describes what a call did.
type Result struct {
	// Changes are the writes to the kernel as commands that an operator would type. There are none if the kernel's state
	// was the wanted one.
	Changes []string
	// Revoked is the number of tracked connections that were deleted.
	Revoked int
	// Announced are the addresses for which gratuitous ARP was sent.
	Announced []netip.Addr
}

const (
	defaultPrefix  = "trivet-"
	defaultTimeout = time.Minute
	namespaceName  = "edge" // after the prefix
)

// Edge connects the VPCs of one host. Its methods may be called concurrently; they wait for one another.
type Edge struct {
	options   Options
	externals []external // sorted by name
	host      *netlink.Handle
	mu        chan struct{} // has one element while no call is in progress
	close     sync.Once
	movable   movableAddresses
	// unannounced has the keys of items whose addresses could not be announced by gratuitous ARP. Only the call that
	// holds mu may use the map.
	unannounced map[string]bool
}

var validPrefix = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)

// New returns an Edge. It fails if an option is invalid. It changes nothing on the host.
func New(o Options) (*Edge, error) {
	if o.Prefix == "" {
		o.Prefix = defaultPrefix
	}
	if o.Timeout == 0 {
		o.Timeout = defaultTimeout
	}
	if !validPrefix.MatchString(o.Prefix) {
		return nil, fmt.Errorf("open edge: prefix %q is not the start of a file name", o.Prefix)
	}
	externals, err := checkExternals(o.External)
	if err != nil {
		return nil, fmt.Errorf("open edge: %w", err)
	}
	e := &Edge{options: o, externals: externals, mu: make(chan struct{}, 1), unannounced: map[string]bool{}}
	e.mu <- struct{}{}
	err = nsthread.Do(func() error {
		ns := netns.None()
		if o.Namespace != "" {
			if ns, err = netns.GetFromPath(o.Namespace); err != nil {
				return fmt.Errorf("open namespace %s: %w", o.Namespace, err)
			}
			defer ns.Close()
		}
		if e.host, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE); err != nil {
			return err
		}
		return e.host.SetSocketTimeout(requestTimeout)
	})
	if err != nil {
		return nil, fmt.Errorf("open edge: %w", err)
	}
	return e, nil
}

// Connected reports whether the host is connected to an external network.
func (e *Edge) Connected(external string) bool { return externalOf(e.externals, external) != nil }

// Close releases the handles of the Edge. It leaves all devices and rules as they are.
func (e *Edge) Close() { e.close.Do(e.host.Close) }

// Set makes the kernel's state equal to s. VPCs that are not in s are disconnected. A VPC whose namespace does not
// exist or whose wanted state is invalid as a whole is disconnected too. Every other VPC is connected without those
// gateways and floating IPs that are invalid or whose address belongs to a VPC with a lower ID. Set applies the rest,
// and then returns a [VPCError] for each VPC, gateway and floating IP that it left out. When Set returns nil, the
// kernel tracks no connection whose translation differs from s. After an error, part of the changes may be in effect;
// the next Set completes them.
func (e *Edge) Set(ctx context.Context, s State) (Result, error) {
	var r Result
	err := e.exclusive(ctx, func(ctx context.Context) error { return e.set(ctx, s, &r) })
	if err != nil {
		return r, fmt.Errorf("connect VPCs to external networks: %w", err)
	}
	return r, nil
}

// Remove disconnects all VPCs and removes the edge namespace with everything in it. An Edge that was not set up is no
// error.
func (e *Edge) Remove(ctx context.Context) error {
	if err := e.exclusive(ctx, e.remove); err != nil {
		return fmt.Errorf("disconnect VPCs from external networks: %w", err)
	}
	return nil
}

// exclusive calls f while no other call of a method is in progress, with the time limit of the options.
func (e *Edge) exclusive(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, e.options.Timeout)
	defer cancel()
	select {
	case <-e.mu:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { e.mu <- struct{}{} }()
	return f(ctx)
}

func (e *Edge) set(ctx context.Context, s State, r *Result) error {
	vpcs, invalid := e.check(s)
	if err := e.createNamespace(r); err != nil {
		return err
	}
	var spaces []*space
	defer func() {
		for _, s := range spaces {
			s.Close()
		}
	}()
	open := func(path string) (*space, error) {
		one, err := openSpace(ctx, path, r)
		if err == nil {
			spaces = append(spaces, one)
		}
		return one, err
	}
	edge, err := open(e.path())
	if err != nil {
		return err
	}
	var connected []*connection
	for _, v := range vpcs {
		inside, err := open(v.Namespace)
		if err != nil {
			invalid = append(invalid, &VPCError{v.ID, err})
			continue
		}
		list := connect(v, inside)
		if len(list) == 0 {
			if err := inside.disconnect(r); err != nil {
				invalid = append(invalid, &VPCError{v.ID, err})
			}
			continue
		}
		connected = append(connected, list...)
	}
	a := &application{
		options: &e.options, externals: e.externals, host: e.host, edge: edge, connected: connected, movable: &e.movable,
		unannounced: e.unannounced,
	}
	return errors.Join(append(invalid, a.apply(r))...)
}
