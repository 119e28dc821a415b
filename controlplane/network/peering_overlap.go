package network

import (
	"net/netip"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// checkPeers returns an InvalidArgument fault if vpc has an ACTIVE peering with a VPC whose prefixes overlap those of
// peer. With two such peers, the source address of a packet would not tell from which of them the packet comes, and a
// rule of a security group that permits ports of one peer would also permit those of the other.
func checkPeers(r store.Reader, vpc, peer *cloud.VPC) error {
	connected, _, err := peeringsOf.List(r, 0, string(vpc.ID))
	if err != nil {
		return err
	}
	for _, u := range connected {
		p, err := peerings.Get(r, string(vpc.Project), u.Path[1])
		if err != nil {
			return err
		}
		if p == nil || p.Status != cloud.NetworkActive {
			continue
		}
		other, err := otherVPC(r, p, vpc.ID)
		if err != nil {
			return err
		}
		if other != nil && (overlap(other.CIDR, peer.CIDR) || overlap(other.CIDR6, peer.CIDR6)) {
			return fault.Invalid("peer_vpc_id", "%s connects %s with a VPC whose prefixes overlap those of the peer",
				label(kindPeering, p.Name, string(p.ID)), vpcLabel(vpc)).With("constraint", "no_overlap")
		}
	}
	return nil
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

// checkAcceptance returns an error if one of the two VPCs has got, since the proposal, an ACTIVE peering with a VPC
// whose prefixes overlap those of the other.
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
	if err := checkPeers(r, peer, vpc); err != nil {
		return err
	}
	if err := checkPeers(r, vpc, peer); fault.Is(err, fault.InvalidArgument) {
		// The message of checkPeers would name a peering of the other project.
		return fault.New(fault.FailedPrecondition, "the VPC of project %s has another peering by now, with prefixes that "+
			"overlap those of your VPC", p.Project).WithReason("PEERS_OVERLAP")
	} else if err != nil {
		return err
	}
	return nil
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
