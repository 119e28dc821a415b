package network

import (
	"context"
	"maps"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func portToProto(p *cloud.Port) *networkv1.Port {
	out := &networkv1.Port{
		Id: string(p.ID), Name: p.Name, OrgId: string(p.Org), ProjectId: string(p.Project), VpcId: string(p.VPC),
		SubnetId:   string(p.Subnet),
		MacAddress: p.MAC.String(), IpAddress: p.IP.String(), Ipv6Address: addressText(p.IP6), PortSecurity: p.Secured,
		DeviceType: string(p.Device.Kind), DeviceId: p.Device.ID, NodeId: string(p.Node), BandwidthMbps: p.Mbps,
		Description: p.Description,
		Status:      networkv1.Status(p.Status), StatusReason: p.StatusReason, CreatedAt: int64(p.CreatedAt),
		UpdatedAt: int64(p.UpdatedAt),
		Labels:    p.Labels,
	}
	for _, id := range p.Groups {
		out.SecurityGroups = append(out.SecurityGroups, string(id))
	}
	for _, a := range p.Pairs {
		pair := &networkv1.AddressPair{Cidr: a.CIDR.String()}
		if a.MAC != (cloud.MAC{}) {
			pair.MacAddress = a.MAC.String()
		}
		out.AllowedAddressPairs = append(out.AllowedAddressPairs, pair)
	}
	return out
}

// groupIDs converts the list of security groups of a request. It is nil if the request has no list.
func groupIDs(in *networkv1.GroupIds) *[]cloud.SecurityGroupID {
	if in == nil {
		return nil
	}
	out := []cloud.SecurityGroupID{}
	for _, id := range in.GetIds() {
		out = append(out, cloud.SecurityGroupID(id))
	}
	return &out
}

func pairsFrom(in []*networkv1.AddressPair) (out []cloud.AddressPair, err error) {
	for _, p := range in {
		var pair cloud.AddressPair
		if pair.CIDR, err = cloud.ParseCIDR("allowed_address_pairs.cidr", p.GetCidr()); err != nil {
			return nil, err
		}
		if p.GetMacAddress() != "" {
			if pair.MAC, err = cloud.ParseMAC("allowed_address_pairs.mac_address", p.GetMacAddress()); err != nil {
				return nil, err
			}
		}
		out = append(out, pair)
	}
	return out, nil
}

func (r *server) CreatePort(ctx context.Context, in *networkv1.CreatePortRequest) (*networkv1.Port, error) {
	t, err := admit(ctx, "CreatePort", in)
	if err != nil {
		return nil, err
	}
	q := PortRequest{
		Name: in.GetName(), Description: in.GetDescription(), Subnet: cloud.SubnetID(in.GetSubnetId()),
		Groups:  groupIDs(in.SecurityGroups),
		Secured: in.PortSecurity == nil || in.GetPortSecurity(), Mbps: in.GetBandwidthMbps(),
		Labels: in.GetLabels(),
	}
	if in.GetMacAddress() != "" {
		if q.MAC, err = cloud.ParseMAC("mac_address", in.GetMacAddress()); err != nil {
			return nil, err
		}
	}
	if q.IP, err = addressOf("ip_address", in.GetIpAddress()); err != nil {
		return nil, err
	}
	if q.IP6, err = addressOf("ipv6_address", in.GetIpv6Address()); err != nil {
		return nil, err
	}
	if q.Pairs, err = pairsFrom(in.GetAllowedAddressPairs()); err != nil {
		return nil, err
	}
	out, err := r.s.CreatePort(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, portToProto)
}

func (r *server) GetPort(ctx context.Context, in *networkv1.GetPortRequest) (*networkv1.Port, error) {
	return getOne(ctx, "GetPort", in, r.s.GetPort, portToProto)
}

func (r *server) ListPorts(ctx context.Context, in *networkv1.ListPortsRequest) (*networkv1.ListPortsResponse, error) {
	t, err := admit(ctx, "ListPorts", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListPorts(ctx, t, pageOf(in), PortFilter{
		VPC: cloud.VPCID(in.GetVpcId()), Subnet: cloud.SubnetID(in.GetSubnetId()), Device: in.GetDeviceId(),
		Group: cloud.SecurityGroupID(in.GetSecurityGroupId()),
	})
	if err != nil {
		return nil, err
	}
	return &networkv1.ListPortsResponse{Ports: convertAll(all, portToProto), NextPageToken: next}, nil
}

func (r *server) UpdatePort(ctx context.Context, in *networkv1.UpdatePortRequest) (*networkv1.Port, error) {
	t, err := admit(ctx, "UpdatePort", in)
	if err != nil {
		return nil, err
	}
	q := PortUpdate{
		ID: cloud.PortID(in.GetId()), Name: in.Name, Description: in.Description, Groups: groupIDs(in.SecurityGroups),
		Secured: in.PortSecurity, Mbps: in.BandwidthMbps,
	}
	if in.AllowedAddressPairs != nil {
		pairs, err := pairsFrom(in.GetAllowedAddressPairs().GetPairs())
		if err != nil {
			return nil, err
		}
		q.Pairs = replacement(pairs)
	}
	if in.Labels != nil {
		// As in replacement, the map is never nil: a nil map would leave the labels unchanged.
		labels := map[string]string{}
		maps.Copy(labels, in.GetLabels().GetLabels())
		q.Labels = &labels
	}
	out, err := r.s.UpdatePort(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, portToProto)
}

func (r *server) DeletePort(
	ctx context.Context, in *networkv1.DeletePortRequest,
) (*networkv1.DeletePortResponse, error) {
	return deleteOne(ctx, "DeletePort", in, r.s.DeletePort, &networkv1.DeletePortResponse{})
}
