package network

import (
	"context"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func subnetToProto(n *SubnetInfo) *networkv1.Subnet {
	return &networkv1.Subnet{
		Id: string(n.ID), Name: n.Name, OrgId: string(n.Org), ProjectId: string(n.Project), VpcId: string(n.VPC),
		CidrBlock: n.CIDR.String(), GatewayIp: n.Gateway.String(), Description: n.Description,
		Status: networkv1.Status(n.Status), StatusReason: n.StatusReason, Ipv6CidrBlock: prefixText(n.CIDR6),
		DhcpEnabled: n.DHCP, DnsServers: addressTexts(n.DNS), AvailableIpCount: n.Available,
		CreatedAt: int64(n.CreatedAt), UpdatedAt: int64(n.UpdatedAt),
	}
}

func (r *server) CreateSubnet(ctx context.Context, in *networkv1.CreateSubnetRequest) (*networkv1.Subnet, error) {
	t, err := admit(ctx, "CreateSubnet", in)
	if err != nil {
		return nil, err
	}
	q := SubnetRequest{
		Name: in.GetName(), Description: in.GetDescription(), VPC: cloud.VPCID(in.GetVpcId()),
		DHCP: in.DhcpEnabled == nil || in.GetDhcpEnabled(),
	}
	if q.CIDR, err = cloud.ParseCIDR("cidr_block", in.GetCidrBlock()); err != nil {
		return nil, err
	}
	if q.CIDR6, err = prefixOf("ipv6_cidr_block", in.GetIpv6CidrBlock()); err != nil {
		return nil, err
	}
	if q.Gateway, err = addressOf("gateway_ip", in.GetGatewayIp()); err != nil {
		return nil, err
	}
	if q.DNS, err = addressesOf("dns_servers", in.GetDnsServers()); err != nil {
		return nil, err
	}
	out, err := r.s.CreateSubnet(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, subnetToProto)
}

func (r *server) GetSubnet(ctx context.Context, in *networkv1.GetSubnetRequest) (*networkv1.Subnet, error) {
	t, err := admit(ctx, "GetSubnet", in)
	if err != nil {
		return nil, err
	}
	n, err := r.s.GetSubnet(ctx, t, cloud.SubnetID(in.GetId()))
	if err != nil {
		return nil, err
	}
	return subnetToProto(&n), nil
}

func (r *server) ListSubnets(
	ctx context.Context, in *networkv1.ListSubnetsRequest,
) (*networkv1.ListSubnetsResponse, error) {
	t, err := admit(ctx, "ListSubnets", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListSubnets(ctx, t, pageOf(in), SubnetFilter{VPC: cloud.VPCID(in.GetVpcId())})
	if err != nil {
		return nil, err
	}
	out := &networkv1.ListSubnetsResponse{NextPageToken: next}
	for i := range all {
		out.Subnets = append(out.Subnets, subnetToProto(&all[i]))
	}
	return out, nil
}

func (r *server) UpdateSubnet(ctx context.Context, in *networkv1.UpdateSubnetRequest) (*networkv1.Subnet, error) {
	t, err := admit(ctx, "UpdateSubnet", in)
	if err != nil {
		return nil, err
	}
	q := SubnetUpdate{ID: cloud.SubnetID(in.GetId()), Name: in.Name, Description: in.Description, DHCP: in.DhcpEnabled}
	if in.DnsServers != nil {
		servers, err := addressesOf("dns_servers", in.GetDnsServers().GetAddresses())
		if err != nil {
			return nil, err
		}
		q.DNS = replacement(servers)
	}
	out, err := r.s.UpdateSubnet(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, subnetToProto)
}

func (r *server) DeleteSubnet(
	ctx context.Context, in *networkv1.DeleteSubnetRequest,
) (*networkv1.DeleteSubnetResponse, error) {
	return deleteOne(ctx, "DeleteSubnet", in, r.s.DeleteSubnet, &networkv1.DeleteSubnetResponse{})
}
