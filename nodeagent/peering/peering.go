// Package peering connects the network namespaces of two VPCs on a host, so that packets pass between the VPCs
// according to their route tables. [Links.Set] takes the wanted state of one VPC, compares it with the kernel's, and
// writes only the differences.
//
// # Path of a packet
//
// Every host with ports of one of the two VPCs has the namespaces of both, and a veth pair between them, whose two
// devices have the same name ([cloud.PeeringID.Device]). A packet from a port of VPC A on host 1 to a port of VPC B on
// host 2 takes this path:
//
//	host 1: port ── namespace of A ── veth pair ── namespace of B ── VXLAN of B ──► host 2: namespace of B ── port
//
// The reply goes from the namespace of B on host 2 over the veth pair there to the namespace of A on host 2, and over
// the VXLAN of A to host 1. So the namespace of B on host 1 and the namespace of A on host 2 see only one direction of
// a connection.
//
// # Decisions
//
//   - Both ends of a connection track it, and apply security groups, in the namespace of the port. In the other two
//     namespaces, which see one direction, packets are not tracked: connection tracking would treat the second segment
//     of a TCP connection as invalid. So packets from a peering are tracked only if their destination is a port on this
//     host.
//   - A packet from a peering must have a source in the peer's prefix and a destination in a subnet of the VPC, and the
//     route table of this subnet must route the reply to the same peering (the source-address check of RFC 3704,
//     section 2.2). So packets with a forged source are dropped, the removal of a route on either side ends both
//     directions at once, and the peering carries no packets to which only one side has a route.
//   - A packet from a peering can leave only through the bridges of subnets, and a packet to a peering can come only
//     from them. So peerings are not transitive, and do not lead to the peer's external networks. The namespace itself
//     drops packets from a peering to its own addresses: its DNS and metadata servers and its gateways are not
//     reachable.
//   - The devices have no addresses and do not resolve addresses. Both have the MAC address deviceMAC and are NOARP, so
//     the other device accepts a frame that is sent to the device's own MAC address. The routes have a next hop, so
//     that the kernel does not make a neighbour entry for each destination.
//   - Package netdev sets an unreachable route with a higher metric for each route to a peering. Without the device,
//     packets are therefore dropped, and do not leave through the VPC's NAT gateway.
//   - Set makes the pair if the namespaces of both VPCs exist, but sets up only the device in the namespace of its own
//     VPC, after it has installed the rules there. [Result.Connected] has the peers for which Set has made a new
//     device: Set must be called again for them.
//   - Set keeps nothing in memory. It recognizes devices by their names, routes by their protocol
//     ([netdev.PeeringProtocol]), and rules by a hash in their comments.
//   - The MTU of the devices is the smaller of the MTUs of the two VPCs. So the namespace of the sender's VPC reports
//     packets that are too large. The peer's namespace could not, because it has no route to the sender.
//
// # Limits
//
// The namespace of the peer's VPC on the sender's host has no route to the sender, and so cannot send ICMP errors to
// it: traceroute does not show it. Addresses in address pairs with more than 16 addresses cannot be reached over a
// peering, as they cannot from other hosts (package netdev).
//
// The package does not make namespaces, and does not know VMs or the control plane.
package peering

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Links connects the VPCs of one host. Its methods may be called concurrently for different VPCs.
type Links struct {
	path func(cloud.VPCID) string
	// making has one element while no call makes a pair. It prevents that calls of Set for both VPCs of a peering make
	// the pair at the same time.
	making chan struct{}
}

// Result describes what a call of Set did.
type Result struct {
	// Changes are the writes to the kernel as commands that an operator would type. There are none if the kernel's state
	// was the wanted one.
	Changes []string
	// Connected are the peers for which Set has made a new device. The caller must call Set for them too.
	Connected []cloud.VPCID
}

// timeout is the deadline of one call for its programs and waits. In addition, each netlink request has requestTimeout.
const timeout = 30 * time.Second

// New returns Links. path returns the path of a VPC's network namespace. New fails if the program nft is missing, and
// changes nothing on the host.
func New(path func(cloud.VPCID) string) (*Links, error) {
	if _, err := exec.LookPath("nft"); err != nil {
		return nil, fmt.Errorf("open peerings: %w", err)
	}
	l := &Links{path: path, making: make(chan struct{}, 1)}
	l.making <- struct{}{}
	return l, nil
}

// Set makes the peerings of a VPC, whose namespace must exist, equal to vpc.Peerings and to the routes to them. A peer
// without a namespace is no error: Set for the peer connects the two. After an error, part of the changes may be in
// effect; the next Set completes them.
func (l *Links) Set(ctx context.Context, vpc *cloud.HostVPC) (Result, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var r Result
	if err := l.set(ctx, vpc, &r); err != nil {
		return r, fmt.Errorf("connect VPC %s with its peers: %w", vpc.ID, err)
	}
	return r, nil
}

// Remove deletes the devices of a VPC's peerings. A VPC without a namespace is no error.
func (l *Links) Remove(ctx context.Context, id cloud.VPCID) error {
	_, err := l.Set(ctx, &cloud.HostVPC{ID: id})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// set installs the rules before it sets devices up, and removes them after it has deleted the last device.
func (l *Links) set(ctx context.Context, vpc *cloud.HostVPC, r *Result) error {
	s, err := openSpace(ctx, l.path(vpc.ID), r)
	if err != nil {
		return err
	}
	defer s.Close()
	if len(vpc.Peerings) > 0 {
		changed, err := table.Set(ctx, s.NS, chains(vpc))
		if err != nil {
			return err
		}
		if changed {
			s.changed("nft replace table %s", table)
		}
	}
	links, err := s.links()
	if err != nil {
		return err
	}
	if err := s.deleteObsolete(vpc, links); err != nil {
		return err
	}
	for i := range vpc.Peerings {
		if err := l.connect(s, vpc, &vpc.Peerings[i], links); err != nil {
			return fmt.Errorf("peering %s: %w", vpc.Peerings[i].ID, err)
		}
	}
	if err := s.setRoutes(vpc); err != nil {
		return err
	}
	if len(vpc.Peerings) > 0 {
		return nil
	}
	changed, err := table.Delete(ctx, s.NS)
	if changed {
		s.changed("nft delete table %s", table)
	}
	return err
}
