package network

import (
	"context"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func floatingToProto(f *cloud.FloatingIP) *networkv1.FloatingIp {
	return &networkv1.FloatingIp{
		Id: string(f.ID), Name: f.Name, OrgId: string(f.Org), ProjectId: string(f.Project), ExternalNetwork: f.External,
		Address: f.Address.String(), PortId: string(f.Port), ServiceIpId: string(f.ServiceIP), FixedAddress: addressText(f.Fixed),
		Description: f.Description, Status: networkv1.Status(f.Status), StatusReason: f.StatusReason,
		CreatedAt: int64(f.CreatedAt), UpdatedAt: int64(f.UpdatedAt), NodeId: string(f.Node),
	}
}

func (r *server) CreateFloatingIp(ctx context.Context, in *networkv1.CreateFloatingIpRequest) (*networkv1.FloatingIp, error) {
	t, err := admit(ctx, "CreateFloatingIp", in)
	if err != nil {
		return nil, err
	}
	q := FloatingRequest{
		Name: in.GetName(), Description: in.GetDescription(), External: in.GetExternalNetwork(),
		Port: cloud.PortID(in.GetPortId()), ServiceIP: cloud.ServiceIPID(in.GetServiceIpId()),
	}
	if q.Address, err = addressOf("address", in.GetAddress()); err != nil {
		return nil, err
	}
	out, err := r.s.CreateFloatingIP(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, floatingToProto)
}

func (r *server) GetFloatingIp(ctx context.Context, in *networkv1.GetFloatingIpRequest) (*networkv1.FloatingIp, error) {
	return getOne(ctx, "GetFloatingIp", in, r.s.GetFloatingIP, floatingToProto)
}

func (r *server) ListFloatingIps(ctx context.Context, in *networkv1.ListFloatingIpsRequest) (*networkv1.ListFloatingIpsResponse, error) {
	t, err := admit(ctx, "ListFloatingIps", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListFloatingIPs(ctx, t, pageOf(in), cloud.PortID(in.GetPortId()))
	if err != nil {
		return nil, err
	}
	return &networkv1.ListFloatingIpsResponse{FloatingIps: convertAll(all, floatingToProto), NextPageToken: next}, nil
}

func (r *server) UpdateFloatingIp(ctx context.Context, in *networkv1.UpdateFloatingIpRequest) (*networkv1.FloatingIp, error) {
	t, err := admit(ctx, "UpdateFloatingIp", in)
	if err != nil {
		return nil, err
	}
	q := FloatingUpdate{ID: cloud.FloatingIPID(in.GetId()), Name: in.Name, Description: in.Description}
	if in.PortId != nil {
		port := cloud.PortID(in.GetPortId())
		q.Port = &port
	}
	if in.ServiceIpId != nil {
		service := cloud.ServiceIPID(in.GetServiceIpId())
		q.ServiceIP = &service
	}
	out, err := r.s.UpdateFloatingIP(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, floatingToProto)
}

func (r *server) DeleteFloatingIp(
	ctx context.Context, in *networkv1.DeleteFloatingIpRequest,
) (*networkv1.DeleteFloatingIpResponse, error) {
	return deleteOne(ctx, "DeleteFloatingIp", in, r.s.DeleteFloatingIP, &networkv1.DeleteFloatingIpResponse{})
}
