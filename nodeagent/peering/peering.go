// Package peering connects the network namespaces of two VPCs on a host, so that packets pass between the VPCs as their
// route tables say. [Links.Set] takes the wanted state of one VPC, compares it with the kernel's, and writes only the
// differences.
//
// # Path of a packet
//
// Every host with ports of one of the two VPCs has the namespaces of both, and a veth pair between them, whose two
// devices have the same name ([cloud.PeeringID.Device]). A packet from a port of VPC A on host 1 to a port of VPC B on
// host 2 takes this path:
//
//	host 1: port ── namespace of A ── veth pair ── namespace of B ── VXLAN of B ──► host 2: namespace of B ── port
//
// The answer goes from the namespace of B on host 2 over the veth pair there to the namespace of A on host 2, and over
// the VXLAN of A to host 1. So the two namespaces on the way see one direction of a connection only.
//
// # Decisions
//
//   - Both ends of a connection track it, and apply security groups, in the namespace of the port. In the other two
//     namespaces, which see one direction, packets are not tracked: connection tracking would take the second segment
//     of a TCP connection for an invalid one. The rule is that packets from a peering are tracked only if their
//     destination is a port on this host.
//   - A packet from a peering must come from the peer's prefix, its destination must be in a subnet of the VPC, and the
//     route table of this subnet must route the answer to the same peering (the source-address check of RFC 3704,
//     section 2.2). So a forged source does not pass, a route that is withdrawn on either side ends both directions at
//     once, and the peering carries nothing that only one side has agreed to.
//   - A packet from a peering can leave through the bridges of subnets only, and a packet to a peering can come from
//     them only. So peerings are not transitive, and do not lead to the peer's external networks. The namespace itself
//     answers nothing over a peering: no DNS, no metadata, no ping of gateways.
//   - The devices neither resolve addresses nor have any. Both have the MAC address deviceMAC and are NOARP, so a frame
//     to the device's own address reaches the other device. A next hop in the routes keeps the kernel from making a
//     neighbour entry for each destination.
//   - Package netdev has an unreachable route with a higher metric for each route to a peering. Without the device,
//     packets are therefore dropped, and do not take the VPC's way to the internet.
//   - Set for one VPC makes the pair if the namespaces of both exist, but sets up only its own device, and does so
//     after it has installed its rules. [Result.Connected] names the VPCs for which Set must be called again, because
//     it has made a new device for them.
//   - Set keeps nothing in memory. It recognizes devices by their names, routes by their protocol
//     ([netdev.PeeringProtocol]), and rules by a hash in their comments.
//   - The MTU of the devices is that of the VPC with the smaller one. So the namespace of the sender, which knows a
//     route to the sender, reports packets that are too large.
//
// # Limits
//
// Routers on the way are not visible: the namespace of the other VPC has no route to the sender for ICMP errors of its
// own. Addresses in address pairs with more than 16 addresses cannot be reached over a peering, as they cannot from
// other hosts (package netdev).
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
	// making has one element while no pair is being made: the two VPCs of a peering may be set at the same time.
	making chan struct{}
}

// Result describes what a call of Set did.
type Result struct {
	// Changes are the writes to the kernel as commands that an operator would type. There are none if the kernel's state
	// was the wanted one.
	Changes []string
	// Connected are the VPCs whose devices Set has made. The caller must call Set for them too.
	Connected []cloud.VPCID
}

// timeout limits the time that one call takes.
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
	defer s.close()
	if len(vpc.Peerings) > 0 {
		changed, err := table.Set(ctx, s.ns, chains(vpc))
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
	changed, err := table.Delete(ctx, s.ns)
	if changed {
		s.changed("nft delete table %s", table)
	}
	return err
}
