package network

import (
	"context"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func peeringToProto(p *cloud.Peering) *networkv1.Peering {
	return &networkv1.Peering{
		Id: string(p.ID), Name: p.Name, OrgId: string(p.Org), ProjectId: string(p.Project), VpcId: string(p.VPC),
		PeerOrgId: string(p.PeerOrg), PeerProjectId: string(p.PeerProject), PeerVpcId: string(p.PeerVPC),
		Description: p.Description,
		Status:      networkv1.Status(p.Status), StatusReason: p.StatusReason, CreatedAt: int64(p.CreatedAt),
		UpdatedAt: int64(p.UpdatedAt),
	}
}

func (r *server) CreatePeering(ctx context.Context, in *networkv1.CreatePeeringRequest) (*networkv1.Peering, error) {
	t, err := admit(ctx, "CreatePeering", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.CreatePeering(ctx, t, PeeringRequest{
		Name: in.GetName(), Description: in.GetDescription(), VPC: cloud.VPCID(in.GetVpcId()),
		PeerVPC: cloud.VPCID(in.GetPeerVpcId()),
		Peer:    cloud.Tenant{Org: cloud.OrgID(in.GetPeerOrgId()), Project: cloud.ProjectID(in.GetPeerProjectId())},
	}, rpc.BodyHash(in))
	return answer(ctx, out, err, peeringToProto)
}

func (r *server) AcceptPeering(ctx context.Context, in *networkv1.AcceptPeeringRequest) (*networkv1.Peering, error) {
	t, err := admit(ctx, "AcceptPeering", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.AcceptPeering(ctx, t, cloud.PeeringID(in.GetId()), rpc.BodyHash(in))
	return answer(ctx, out, err, peeringToProto)
}

func (r *server) GetPeering(ctx context.Context, in *networkv1.GetPeeringRequest) (*networkv1.Peering, error) {
	return getOne(ctx, "GetPeering", in, r.s.GetPeering, peeringToProto)
}

func (r *server) ListPeerings(
	ctx context.Context, in *networkv1.ListPeeringsRequest,
) (*networkv1.ListPeeringsResponse, error) {
	t, err := admit(ctx, "ListPeerings", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListPeerings(ctx, t, pageOf(in), cloud.VPCID(in.GetVpcId()))
	if err != nil {
		return nil, err
	}
	return &networkv1.ListPeeringsResponse{Peerings: convertAll(all, peeringToProto), NextPageToken: next}, nil
}

func (r *server) UpdatePeering(ctx context.Context, in *networkv1.UpdatePeeringRequest) (*networkv1.Peering, error) {
	t, err := admit(ctx, "UpdatePeering", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.UpdatePeering(ctx, t, PeeringUpdate{
		ID: cloud.PeeringID(in.GetId()), Name: in.Name, Description: in.Description,
	}, rpc.BodyHash(in))
	return answer(ctx, out, err, peeringToProto)
}

func (r *server) DeletePeering(
	ctx context.Context, in *networkv1.DeletePeeringRequest,
) (*networkv1.DeletePeeringResponse, error) {
	return deleteOne(ctx, "DeletePeering", in, r.s.DeletePeering, &networkv1.DeletePeeringResponse{})
}
