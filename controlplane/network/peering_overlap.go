package network

import (
	"fmt"
	"net/netip"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// checkPeers returns an InvalidArgument fault if vpc has an ACTIVE peering with a VPC whose prefixes overlap those of
// peer. With two such peers, the source address of a packet would not tell from which of them the packet comes, and a
// rule of a security group that permits ports of one peer would also permit those of the other.
func checkPeers(r store.Reader, vpc, peer *cloud.VPC) error {
	p, err := overlappingPeering(r, vpc, peer)
	if err != nil || p == nil {
		return err
	}
	return fault.Invalid("peer_vpc_id", "%s", overlapText(p, vpc)).With("constraint", "no_overlap")
}

// overlapText returns the part of an error that names the peering of vpc whose peer overlaps another one.
func overlapText(p *cloud.Peering, vpc *cloud.VPC) string {
	return fmt.Sprintf("%s connects %s with a VPC whose prefixes overlap those of the peer",
		label(kindPeering, p.Name, string(p.ID)), vpcLabel(vpc))
}

// overlappingPeering returns an ACTIVE peering of vpc with a VPC whose prefixes overlap those of peer, or nil if there
// is none.
func overlappingPeering(r store.Reader, vpc, peer *cloud.VPC) (*cloud.Peering, error) {
	connected, _, err := peeringsOf.List(r, 0, string(vpc.ID))
	if err != nil {
		return nil, err
	}
	for _, u := range connected {
		p, err := peerings.Get(r, string(vpc.Project), u.Path[1])
		if err != nil {
			return nil, err
		}
		if p == nil || p.Status != cloud.NetworkActive {
			continue
		}
		other, err := otherVPC(r, p, vpc.ID)
		if err != nil {
			return nil, err
		}
		if other != nil && (overlap(other.CIDR, peer.CIDR) || overlap(other.CIDR6, peer.CIDR6)) {
			return p, nil
		}
	}
	return nil, nil
}

// overlap reports whether two prefixes overlap. An invalid prefix, that of a VPC without IPv6, overlaps none.
func overlap(a, b netip.Prefix) bool { return a.IsValid() && b.IsValid() && a.Overlaps(b) }

// otherVPC returns the VPC of a peering that is not the VPC with the given ID. It returns nil if that VPC does not
// exist.
func otherVPC(r store.Reader, p *cloud.Peering, id cloud.VPCID) (*cloud.VPC, error) {
	if p.VPC == id {
		return vpcs.Get(r, string(p.PeerProject), string(p.PeerVPC))
	}
	return vpcs.Get(r, string(p.Project), string(p.VPC))
}

// checkAcceptance returns a FailedPrecondition fault if one of the two VPCs has got, since the proposal, an ACTIVE
// peering with a VPC whose prefixes overlap those of the other.
func checkAcceptance(r store.Reader, p *cloud.Peering) error {
	vpc, err := otherVPC(r, p, p.PeerVPC)
	if err != nil {
		return err
	}
	peer, err := otherVPC(r, p, p.VPC)
	if err != nil {
		return err
	}
	if vpc == nil || peer == nil {
		return notFound(kindPeering, string(p.ID))
	}
	own, err := overlappingPeering(r, peer, vpc)
	if err != nil {
		return err
	}
	if own != nil {
		return peersOverlap("%s", overlapText(own, peer))
	}
	other, err := overlappingPeering(r, vpc, peer)
	if err != nil || other == nil {
		return err
	}
	// The text does not name the peering, which the accepting project may not be allowed to see.
	return peersOverlap("the VPC of project %s has another peering by now, with prefixes that overlap those of your VPC",
		p.Project)
}

// peersOverlap returns the fault of an acceptance after which a VPC would have two peers that overlap.
func peersOverlap(format string, args ...any) error {
	return fault.New(fault.FailedPrecondition, format, args...).WithReason("PEERS_OVERLAP")
}

// activePeerings returns the labels of the ACTIVE peerings of a VPC, and the IDs of those that were not accepted yet.
func activePeerings(r store.Reader, vpc *cloud.VPC) (active []string, proposed []cloud.PeeringID, err error) {
	connected, _, err := peeringsOf.List(r, 0, string(vpc.ID))
	if err != nil {
		return nil, nil, err
	}
	for _, u := range connected {
		p, err := peerings.Get(r, string(vpc.Project), u.Path[1])
		switch {
		case err != nil:
			return nil, nil, err
		case p == nil:
		case p.Status != cloud.NetworkActive:
			proposed = append(proposed, p.ID)
		case len(active) <= maxNamedUsers:
			active = append(active, label(kindPeering, p.Name, string(p.ID)))
		}
	}
	return active, proposed, nil
}
