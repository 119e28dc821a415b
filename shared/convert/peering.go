package convert

import (
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// PeeringFrom returns the peering in a message of the control plane. It returns an InvalidArgument fault if a host
// cannot use it.
func PeeringFrom(in *networkv1.Peering) (cloud.Peering, error) {
	p := cloud.Peering{
		ID: cloud.PeeringID(in.GetId()), Name: in.GetName(), Description: in.GetDescription(),
		Org: cloud.OrgID(in.GetOrgId()), Project: cloud.ProjectID(in.GetProjectId()), VPC: cloud.VPCID(in.GetVpcId()), PeerOrg: cloud.OrgID(in.GetPeerOrgId()),
		PeerProject: cloud.ProjectID(in.GetPeerProjectId()), PeerVPC: cloud.VPCID(in.GetPeerVpcId()),
		Status: cloud.NetworkStatus(in.GetStatus()), StatusReason: in.GetStatusReason(),
		CreatedAt: cloud.Time(in.GetCreatedAt()), UpdatedAt: cloud.Time(in.GetUpdatedAt()),
	}
	if err := checkIDs("id", in.GetId(), "vpc_id", in.GetVpcId(), "peer_vpc_id", in.GetPeerVpcId()); err != nil {
		return p, err
	}
	if p.VPC == p.PeerVPC {
		return p, fault.Invalid("peer_vpc_id", "must be another VPC than vpc_id")
	}
	return p, nil
}
