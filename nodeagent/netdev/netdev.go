// Package netdev creates the network devices of VPCs on a host: for each VPC one network namespace with a bridge and a
// VXLAN device for each subnet, the gateways' addresses, and the forwarding tables for ports on other hosts.
//
// A [Host] is the entry point. [Host.Prepare] takes the wanted state of a VPC, compares it with the kernel, and writes
// only the differences. [Host.UpdateRemotes] writes a change of the ports on other hosts without reading the kernel's
// state. [Host.OpenTap] and [Host.AttachVeth] make the device of a port. [Host.Activate] sets the ports' devices up;
// the caller installs the packet filter between Prepare and Activate, so that no port ever sends unfiltered.
//
// # Namespace of a VPC
//
// The namespace is named Options.Prefix + VPC ID and is mounted below /run/netns, so `ip netns` shows it. It contains,
// for a subnet with VNI 100:
//
//   - br100, a bridge with [cloud.GatewayMAC] and the addresses of the subnet's gateway. All hosts have the same ones.
//   - vx100, a VXLAN device, which is a port of br100. Its UDP socket is in the host's own namespace.
//   - the tap and veth devices of the subnet's ports on this host, also ports of br100.
//   - for each port with a bandwidth limit an IFB device, named after a hash of the port's ID.
//   - routing table 100000100 with the routes of the subnet's route table, and a rule that selects this table for
//     packets from br100.
//
// For a NAT gateway with the VNI 200, the namespace also contains:
//
//   - vt200, the transit device, a VXLAN device that is not a port of a bridge. Packets to the gateway leave the other
//     hosts through vt200, and arrive from vt200 on the gateway's host.
//   - if the gateway is the VPC's default one and is on another host, routing table 100000200, and a rule that selects
//     this table for packets for which no other table has a route.
//
// For the floating IP of a service IP with the VNI 300, the namespace also contains:
//
//   - vt300, a transit device. Packets in both directions between the host with the floating IP and the backends on
//     other hosts use vt300.
//   - routing table 100000300 with routes to the backends on other hosts, or, on the other hosts, to the host with the
//     floating IP. A rule that precedes the main table selects this table for packets with the mark 300, which package
//     balancer sets.
//
// A packet to another subnet of the VPC is routed on the sender's host and crosses the underlay with the VNI of the
// receiver's subnet. So every host with the VPC has all subnets of the VPC.
//
// # Decisions
//
//   - Devices are named by VNI, because subnet IDs exceed the limit of 15 bytes. Names of namespaces may have 255
//     bytes.
//   - A VXLAN device is created in the VPC's namespace by a request from the host's namespace. Its socket is then in
//     the host's namespace, as it would be after creating the device there and moving it, but the step is atomic.
//   - Nothing is learned from the overlay and nothing is flooded to it: each remote port has a static FDB entry in the
//     bridge, one in the VXLAN device, and a permanent neighbour entry per address. The bridge answers ARP and
//     neighbour solicitations for remote ports from these entries (neigh_suppress). The VXLAN devices have no default
//     entry, so the broadcasts that the bridge itself sends end at the VXLAN device. RFC 7348 calls for multicast
//     instead, which many underlays do not forward and which would let one tenant's broadcasts reach all hosts.
//   - Ports on this host have static entries too. They are sticky: another port that sends with the same MAC address
//     does not take the entry over. Only ports without port security, or with a MAC address in their address pairs,
//     may have further MAC addresses, which the bridge learns.
//   - The gateway does not send ARP requests or neighbour solicitations in a subnet in which all addresses are known.
//     The kernel limits the number of dynamic neighbour entries of all namespaces together (gc_thresh3). A tenant that
//     scans its subnets would otherwise fill the limit with unresolved entries, and break address resolution on the
//     underlay. Without requests, an entry fails at once and can be reused. Permanent entries do not count.
//   - rp_filter is off: guests that route for others legitimately send with foreign source addresses, and the packet
//     filter checks the source addresses of all other ports.
//   - [Migrations] only determines for how long a VPC has LooseTCP. Package firewall, which deletes connections, writes
//     the sysctl.
//   - The kernel consults the tables of subnets after the main table. So packets to the VPC's subnets always follow the
//     connected routes, whatever a route table contains.
//   - A route to a NAT gateway on this host is a throw route: the kernel then continues with the next rule, which is
//     that of package edge. So this package needs to know neither the device nor the address of the edge namespace, and
//     the order of calls to the two packages does not matter.
//   - Packets to a NAT gateway on another host have a VNI of their own. With the VNI of a subnet they could not reach
//     the gateway's host: the gateway of a subnet has the same MAC address on all hosts, so the bridge of the sender's
//     host would receive them. No guest can send to a transit device, because the device is not a port of a bridge.
//     Packets from outside reach the guest's host with the VNI of the guest's subnet, like packets between subnets. So
//     connection tracking on both hosts sees both directions of each connection.
//   - For a route to a peering this package writes an unreachable route. A route of package peering, which has a lower
//     metric, precedes it while the device of the peering exists. Without the device, packets for a peered VPC must not
//     go to a NAT gateway.
//   - What a guest sends is limited by a token bucket on an IFB device, not by a policer. A policer drops all packets
//     above the limit instead of delaying them, so TCP connections stay far below the limit. Besides, kernels without
//     CONFIG_NET_ACT_POLICE have none.
//   - A device of a port is recognized by its alias, "trivet:" + port ID. Taps are not persistent: a tap disappears
//     with the last descriptor, so a VM that ended leaves nothing behind.
//   - Deleting a device waits for an RCU grace period of 20 to 30 ms. Prepare and Remove delete all devices of a call
//     as one group, with one grace period for all.
//   - The package keeps no state except locks, open handles and the times of Migrations. A restarted agent continues
//     with what the kernel has.
//
// # Limits
//
// The MAC address and addresses of a [cloud.RemotePort], and its address pairs of up to 16 addresses of the subnet, are
// reachable across hosts. Three kinds of addresses are reachable from ports on the same host only: those in larger
// pairs, those that several ports of the subnet have, such as the virtual address of VRRP, and further MAC addresses of
// ports without port security. Prefixes outside of the subnet are reachable through route tables. Broadcasts and
// multicasts reach the gateway and the ports on the same host.
//
// The package knows nothing about the packet filter, DHCP, and connections to networks outside of the VPC, and leaves
// devices alone that it did not create.
package netdev

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Options are the settings of a Host.
type Options struct {
	// VTEP is the host's address on the underlay. Required.
	VTEP netip.Addr
	// Device is the network device of the underlay. With it, overlay packets leave through this device only. Without
	// it, the host's routes select the device.
	Device string
	// MTU is the MTU of the underlay in bytes. Prepare returns an error for VPCs whose MTU is too large for MTU or for
	// the MTU of Device. If MTU is 0 and Device is empty, Prepare accepts every MTU.
	MTU int
	// UDPPort is the destination port of VXLAN packets. The default is 4789 (RFC 7348). It must be the same on all hosts.
	UDPPort uint16
	// Namespace is the path of the network namespace of the underlay, such as /run/netns/host1. The default is the
	// namespace of the process.
	Namespace string
	// Prefix starts the names of the VPCs' namespaces. The default is "trivet-". Hosts that share /run/netns, which only
	// tests have, need prefixes of which none is the beginning of another.
	Prefix string
}

const (
	defaultUDPPort = 4789
	defaultPrefix  = "trivet-"

	// requestTimeout limits the wait for the kernel's answer to one netlink request. The kernel handles requests to
	// change devices one at a time, so a request waits for other programs' requests too.
	requestTimeout = 30 * time.Second
	// releaseTimeout limits the wait for a namespace that was removed by hand to release its VNIs.
	releaseTimeout = 5 * time.Second
	releasePoll    = 20 * time.Millisecond
)

// Host creates the network devices of VPCs on one host. Its methods may be called concurrently. Calls for the same VPC
// wait for one another.
type Host struct {
	opts  Options
	root  *netlink.Handle // of the underlay's namespace
	locks vpcLocks
}

// Result describes what a call did.
type Result struct {
	// Changes are the writes to the kernel, in their order. Without differences between the wanted and the existing
	// state there are none.
	Changes []Change
	// Missing are the ports of the wanted state that have no device, because it was not made yet or disappeared.
	Missing []cloud.PortID
}

// New returns a Host that works on the underlay given by o.
func New(o Options) (*Host, error) {
	if o.UDPPort == 0 {
		o.UDPPort = defaultUDPPort
	}
	if o.Prefix == "" {
		o.Prefix = defaultPrefix
	}
	switch {
	case !o.VTEP.IsValid() || o.VTEP.IsUnspecified() || o.VTEP.Is4In6():
		return nil, errors.New("open network host: VTEP must be the host's address on the underlay")
	case !validPrefix.MatchString(o.Prefix):
		return nil, fmt.Errorf("open network host: prefix %q is not the start of a file name", o.Prefix)
	}
	ns, err := openUnderlay(o.Namespace)
	if err != nil {
		return nil, fmt.Errorf("open network host: %w", err)
	}
	defer ns.Close()
	root, err := openHandle(ns)
	if err != nil {
		return nil, fmt.Errorf("open network host: %w", err)
	}
	h := &Host{opts: o, root: root}
	if _, err := h.underlay(); err != nil {
		root.Close()
		return nil, fmt.Errorf("open network host: %w", err)
	}
	return h, nil
}

// Close releases the host's handles. It leaves all devices as they are.
func (h *Host) Close() { h.root.Close() }

// openUnderlay opens the network namespace at path, or that of the process if path is empty.
func openUnderlay(path string) (netns.NsHandle, error) {
	if path != "" {
		ns, err := netns.GetFromPath(path)
		if err != nil {
			return ns, fmt.Errorf("open namespace %s: %w", path, err)
		}
		return ns, nil
	}
	// All threads with another namespace are locked, so an unlocked goroutine is in the namespace of the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return netns.Get()
}

// openHandle returns a handle for the devices of a namespace, or, with netns.None, of the thread's own namespace.
func openHandle(ns netns.NsHandle) (*netlink.Handle, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	if err := handle.SetSocketTimeout(requestTimeout); err != nil {
		handle.Close()
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	return handle, nil
}

// underlay returns the settings of VXLAN devices, as far as they are the same for all VPCs. The device's index is
// looked up on each call, because a device that was recreated has another one.
func (h *Host) underlay() (underlay, error) {
	u := underlay{vtep: h.opts.VTEP, port: h.opts.UDPPort, mtu: h.opts.MTU}
	if h.opts.Device == "" {
		return u, nil
	}
	link, err := h.root.LinkByName(h.opts.Device)
	if err != nil {
		return u, fmt.Errorf("find underlay device %s: %w", h.opts.Device, err)
	}
	u.device, u.deviceName = link.Attrs().Index, h.opts.Device
	if has := link.Attrs().MTU; u.mtu == 0 || has < u.mtu {
		u.mtu = has
	}
	return u, nil
}

// Prepare creates and changes everything that the VPC needs on this host, except that it leaves the devices of ports
// down if they are down. It removes ports and subnets that are no longer in vpc. Call Activate after it, when the
// packet filter for vpc is installed.
//
// Prepare returns on the first error, and can be repeated. The Result then has the changes so far. A port whose device
// disappears meanwhile is no error but is reported as missing.
func (h *Host) Prepare(ctx context.Context, vpc cloud.HostVPC) (Result, error) {
	result, err := h.prepare(ctx, &vpc)
	if err != nil {
		return result, fmt.Errorf("prepare VPC %s: %w", vpc.ID, err)
	}
	return result, nil
}

func (h *Host) prepare(ctx context.Context, vpc *cloud.HostVPC) (Result, error) {
	u, err := h.underlay()
	if err != nil {
		return Result{}, err
	}
	want, err := render(vpc, u)
	if err != nil {
		return Result{}, err
	}
	unlock, err := h.lock(ctx, vpc.ID)
	if err != nil {
		return Result{}, err
	}
	defer unlock()
	var result Result
	created, err := h.createNamespace(vpc.ID)
	if err != nil {
		return result, err
	}
	if created != nil {
		result.Changes = append(result.Changes, created)
	}
	err = h.enter(ctx, vpc.ID, func(k *kernel) error {
		have, err := k.read(want)
		if err != nil {
			return err
		}
		changes, missing := plan(want, have)
		done, vanished, err := k.apply(changes, want)
		result.Changes = append(result.Changes, done...)
		result.Missing = ports(want, missing, vanished)
		return err
	})
	return result, err
}

// Activate sets the devices of the VPC's ports up. Devices that Prepare or OpenTap did not set up for a port of vpc are
// left alone.
func (h *Host) Activate(ctx context.Context, vpc cloud.HostVPC) (Result, error) {
	result, err := h.activate(ctx, &vpc)
	if err != nil {
		return result, fmt.Errorf("activate VPC %s: %w", vpc.ID, err)
	}
	return result, nil
}

func (h *Host) activate(ctx context.Context, vpc *cloud.HostVPC) (Result, error) {
	want := newState()
	for i := range vpc.Subnets {
		for j := range vpc.Subnets[i].Ports {
			want.addPort(vpc, &vpc.Subnets[i], &vpc.Subnets[i].Ports[j])
		}
	}
	unlock, err := h.lock(ctx, vpc.ID)
	if err != nil {
		return Result{}, err
	}
	defer unlock()
	var result Result
	err = h.enter(ctx, vpc.ID, func(k *kernel) error {
		have := newState()
		if err := k.readLinks(have); err != nil {
			return err
		}
		changes, missing := planActivation(want, have)
		done, vanished, err := k.apply(changes, want)
		result = Result{Changes: done, Missing: ports(want, missing, vanished)}
		return err
	})
	return result, err
}

// ports returns the IDs of the ports whose devices are listed.
func ports(want *state, lists ...[]string) []cloud.PortID {
	var ids []cloud.PortID
	for _, devices := range lists {
		for _, name := range devices {
			ids = append(ids, want.links[name].portID())
		}
	}
	return ids
}
