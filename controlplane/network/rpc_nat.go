package network

import (
	"context"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func natToProto(n *cloud.NATGateway) *networkv1.NatGateway {
	return &networkv1.NatGateway{
		Id: string(n.ID), Name: n.Name, OrgId: string(n.Org), ProjectId: string(n.Project), VpcId: string(n.VPC), ExternalNetwork: n.External,
		Address: addressText(n.Address), IsDefault: n.Default, Description: n.Description, Status: networkv1.Status(n.Status),
		StatusReason: n.StatusReason, CreatedAt: int64(n.CreatedAt), UpdatedAt: int64(n.UpdatedAt), NodeId: string(n.Node),
	}
}

func (r *server) CreateNatGateway(ctx context.Context, in *networkv1.CreateNatGatewayRequest) (*networkv1.NatGateway, error) {
	t, err := admit(ctx, "CreateNatGateway", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.CreateNATGateway(ctx, t, NATRequest{
		Name: in.GetName(), Description: in.GetDescription(), VPC: cloud.VPCID(in.GetVpcId()), External: in.GetExternalNetwork(),
		OwnAddress: in.GetOwnAddress(), Default: in.GetIsDefault(),
	}, rpc.BodyHash(in))
	return answer(ctx, out, err, natToProto)
}

func (r *server) GetNatGateway(ctx context.Context, in *networkv1.GetNatGatewayRequest) (*networkv1.NatGateway, error) {
	return getOne(ctx, "GetNatGateway", in, r.s.GetNATGateway, natToProto)
}

func (r *server) ListNatGateways(ctx context.Context, in *networkv1.ListNatGatewaysRequest) (*networkv1.ListNatGatewaysResponse, error) {
	t, err := admit(ctx, "ListNatGateways", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListNATGateways(ctx, t, pageOf(in), cloud.VPCID(in.GetVpcId()))
	if err != nil {
		return nil, err
	}
	return &networkv1.ListNatGatewaysResponse{NatGateways: convertAll(all, natToProto), NextPageToken: next}, nil
}

func (r *server) UpdateNatGateway(ctx context.Context, in *networkv1.UpdateNatGatewayRequest) (*networkv1.NatGateway, error) {
	t, err := admit(ctx, "UpdateNatGateway", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.UpdateNATGateway(ctx, t, NATUpdate{
		ID: cloud.NATGatewayID(in.GetId()), Name: in.Name, Description: in.Description, Default: in.IsDefault,
	}, rpc.BodyHash(in))
	return answer(ctx, out, err, natToProto)
}

func (r *server) DeleteNatGateway(
	ctx context.Context, in *networkv1.DeleteNatGatewayRequest,
) (*networkv1.DeleteNatGatewayResponse, error) {
	return deleteOne(ctx, "DeleteNatGateway", in, r.s.DeleteNATGateway, &networkv1.DeleteNatGatewayResponse{})
}
