package network

import (
	"context"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func vpcToProto(v *cloud.VPC) *networkv1.Vpc {
	return &networkv1.Vpc{
		Id: string(v.ID), Name: v.Name, OrgId: string(v.Org), ProjectId: string(v.Project), CidrBlock: v.CIDR.String(),
		Description: v.Description, Status: networkv1.Status(v.Status), StatusReason: v.StatusReason,
		Ipv6CidrBlock: prefixText(v.CIDR6), Mtu: uint32(v.MTU), IsDefault: v.Default,
		ServiceCidrBlock: prefixText(v.ServiceCIDR),
		CreatedAt:        int64(v.CreatedAt), UpdatedAt: int64(v.UpdatedAt),
	}
}

func (r *server) CreateVpc(ctx context.Context, in *networkv1.CreateVpcRequest) (*networkv1.Vpc, error) {
	t, err := admit(ctx, "CreateVpc", in)
	if err != nil {
		return nil, err
	}
	q := VPCRequest{
		Name: in.GetName(), Description: in.GetDescription(), MTU: in.GetMtu(), External: in.GetExternalNetwork(),
	}
	if q.CIDR, err = cloud.ParseCIDR("cidr_block", in.GetCidrBlock()); err != nil {
		return nil, err
	}
	if q.CIDR6, err = prefixOf("ipv6_cidr_block", in.GetIpv6CidrBlock()); err != nil {
		return nil, err
	}
	if q.ServiceCIDR, err = prefixOf("service_cidr_block", in.GetServiceCidrBlock()); err != nil {
		return nil, err
	}
	switch in.GetEgress() {
	case networkv1.Egress_EGRESS_UNSPECIFIED, networkv1.Egress_EGRESS_NONE:
	case networkv1.Egress_EGRESS_NAT:
		q.NAT = true
	default:
		return nil, fault.Invalid("egress", "must be NONE or NAT").With("constraint", "enum")
	}
	out, err := r.s.CreateVPC(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, vpcToProto)
}

func (r *server) GetVpc(ctx context.Context, in *networkv1.GetVpcRequest) (*networkv1.Vpc, error) {
	return getOne(ctx, "GetVpc", in, r.s.GetVPC, vpcToProto)
}

func (r *server) ListVpcs(ctx context.Context, in *networkv1.ListVpcsRequest) (*networkv1.ListVpcsResponse, error) {
	t, err := admit(ctx, "ListVpcs", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListVPCs(ctx, t, pageOf(in))
	if err != nil {
		return nil, err
	}
	return &networkv1.ListVpcsResponse{Vpcs: convertAll(all, vpcToProto), NextPageToken: next}, nil
}

func (r *server) UpdateVpc(ctx context.Context, in *networkv1.UpdateVpcRequest) (*networkv1.Vpc, error) {
	t, err := admit(ctx, "UpdateVpc", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.UpdateVPC(
		ctx, t, VPCUpdate{ID: cloud.VPCID(in.GetId()), Name: in.Name, Description: in.Description}, rpc.BodyHash(in),
	)
	return answer(ctx, out, err, vpcToProto)
}

func (r *server) DeleteVpc(
	ctx context.Context, in *networkv1.DeleteVpcRequest,
) (*networkv1.DeleteVpcResponse, error) {
	return deleteOne(ctx, "DeleteVpc", in, r.s.DeleteVPC, &networkv1.DeleteVpcResponse{})
}
