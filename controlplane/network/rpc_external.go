package network

import (
	"context"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// admitCloud authorizes a call about the cloud, which has no tenant.
func admitCloud(ctx context.Context, method auth.Method) error {
	_, err := auth.Admit(ctx, service+method, "", "")
	return err
}

func externalToProto(n *ExternalInfo) *networkv1.ExternalNetwork {
	out := &networkv1.ExternalNetwork{
		Name: n.Name, CidrBlock: n.CIDR.String(), GatewayIp: addressText(n.Gateway), Vlan: uint32(n.VLAN),
		Description:      n.Description,
		AvailableIpCount: n.Available, CreatedAt: int64(n.CreatedAt), UpdatedAt: int64(n.UpdatedAt),
	}
	for _, p := range n.Pools {
		out.Pools = append(out.Pools, &networkv1.AddressRange{First: p.First.String(), Last: p.Last.String()})
	}
	return out
}

// externalFor returns an external network as the caller may see it. Only operators see more than name and prefix.
func externalFor(ctx context.Context, n *ExternalInfo) *networkv1.ExternalNetwork {
	if auth.CallerOf(ctx).IsCloudAdmin() {
		return externalToProto(n)
	}
	return &networkv1.ExternalNetwork{Name: n.Name, CidrBlock: n.CIDR.String()}
}

func poolsFrom(in []*networkv1.AddressRange) (out []cloud.AddressRange, err error) {
	for _, p := range in {
		var pool cloud.AddressRange
		if pool.First, err = cloud.ParseAddr("pools.first", p.GetFirst()); err != nil {
			return nil, err
		}
		if pool.Last, err = cloud.ParseAddr("pools.last", p.GetLast()); err != nil {
			return nil, err
		}
		out = append(out, pool)
	}
	return out, nil
}

func (r *server) CreateExternalNetwork(
	ctx context.Context, in *networkv1.CreateExternalNetworkRequest,
) (*networkv1.ExternalNetwork, error) {
	if err := admitCloud(ctx, "CreateExternalNetwork"); err != nil {
		return nil, err
	}
	if in.GetVlan() > cloud.MaxVLAN {
		return nil, fault.Invalid("vlan", "must be 0 to %d, got %d", cloud.MaxVLAN, in.GetVlan()).With("constraint", "range")
	}
	n := cloud.ExternalNetwork{Name: in.GetName(), VLAN: uint16(in.GetVlan()), Description: in.GetDescription()}
	var err error
	if n.CIDR, err = cloud.ParseCIDR("cidr_block", in.GetCidrBlock()); err != nil {
		return nil, err
	}
	if n.Gateway, err = addressOf("gateway_ip", in.GetGatewayIp()); err != nil {
		return nil, err
	}
	if n.Pools, err = poolsFrom(in.GetPools()); err != nil {
		return nil, err
	}
	out, err := r.s.CreateExternalNetwork(ctx, n, rpc.BodyHash(in))
	return answer(ctx, out, err, externalToProto)
}

func (r *server) GetExternalNetwork(
	ctx context.Context, in *networkv1.GetExternalNetworkRequest,
) (*networkv1.ExternalNetwork, error) {
	if err := admitCloud(ctx, "GetExternalNetwork"); err != nil {
		return nil, err
	}
	n, err := r.s.GetExternalNetwork(ctx, in.GetName())
	if err != nil {
		return nil, err
	}
	return externalFor(ctx, &n), nil
}

func (r *server) ListExternalNetworks(
	ctx context.Context, in *networkv1.ListExternalNetworksRequest,
) (*networkv1.ListExternalNetworksResponse, error) {
	if err := admitCloud(ctx, "ListExternalNetworks"); err != nil {
		return nil, err
	}
	all, next, err := r.s.ListExternalNetworks(ctx, pageOf(in))
	if err != nil {
		return nil, err
	}
	out := &networkv1.ListExternalNetworksResponse{NextPageToken: next}
	for i := range all {
		out.ExternalNetworks = append(out.ExternalNetworks, externalFor(ctx, &all[i]))
	}
	return out, nil
}

func (r *server) UpdateExternalNetwork(
	ctx context.Context, in *networkv1.UpdateExternalNetworkRequest,
) (*networkv1.ExternalNetwork, error) {
	if err := admitCloud(ctx, "UpdateExternalNetwork"); err != nil {
		return nil, err
	}
	q := ExternalUpdate{Name: in.GetName(), Description: in.Description}
	if in.Pools != nil {
		pools, err := poolsFrom(in.GetPools().GetRanges())
		if err != nil {
			return nil, err
		}
		q.Pools = replacement(pools)
	}
	if in.GatewayIp != nil {
		gateway, err := addressOf("gateway_ip", in.GetGatewayIp())
		if err != nil {
			return nil, err
		}
		q.Gateway = &gateway
	}
	out, err := r.s.UpdateExternalNetwork(ctx, q, rpc.BodyHash(in))
	return answer(ctx, out, err, externalToProto)
}

func (r *server) DeleteExternalNetwork(
	ctx context.Context, in *networkv1.DeleteExternalNetworkRequest,
) (*networkv1.DeleteExternalNetworkResponse, error) {
	if err := admitCloud(ctx, "DeleteExternalNetwork"); err != nil {
		return nil, err
	}
	out, err := r.s.DeleteExternalNetwork(ctx, in.GetName(), rpc.BodyHash(in))
	return answer(ctx, out, err, func(*struct{}) *networkv1.DeleteExternalNetworkResponse {
		return &networkv1.DeleteExternalNetworkResponse{}
	})
}
