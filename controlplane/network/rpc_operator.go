package network

import (
	"context"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
)

func (r *server) ListAllVpcs(ctx context.Context, in *networkv1.ListAllVpcsRequest) (*networkv1.ListAllVpcsResponse, error) {
	t, err := auth.AdmitAll(ctx, service+"ListAllVpcs", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllVPCs(ctx, t, page{Size: in.GetPageSize(), Token: in.GetPageToken()})
	if err != nil {
		return nil, err
	}
	return &networkv1.ListAllVpcsResponse{Vpcs: convertAll(all, vpcToProto), NextPageToken: next}, nil
}

func (r *server) ListAllSubnets(ctx context.Context, in *networkv1.ListAllSubnetsRequest) (*networkv1.ListAllSubnetsResponse, error) {
	t, err := auth.AdmitAll(ctx, service+"ListAllSubnets", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllSubnets(ctx, t, page{Size: in.GetPageSize(), Token: in.GetPageToken()})
	if err != nil {
		return nil, err
	}
	out := &networkv1.ListAllSubnetsResponse{NextPageToken: next}
	for i := range all {
		out.Subnets = append(out.Subnets, subnetToProto(&all[i]))
	}
	return out, nil
}

func (r *server) ListAllPorts(ctx context.Context, in *networkv1.ListAllPortsRequest) (*networkv1.ListAllPortsResponse, error) {
	t, err := auth.AdmitAll(ctx, service+"ListAllPorts", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllPorts(ctx, t, page{Size: in.GetPageSize(), Token: in.GetPageToken()})
	if err != nil {
		return nil, err
	}
	return &networkv1.ListAllPortsResponse{Ports: convertAll(all, portToProto), NextPageToken: next}, nil
}

func (r *server) ListAllSecurityGroups(
	ctx context.Context, in *networkv1.ListAllSecurityGroupsRequest,
) (*networkv1.ListAllSecurityGroupsResponse, error) {
	t, err := auth.AdmitAll(ctx, service+"ListAllSecurityGroups", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllSecurityGroups(ctx, t, page{Size: in.GetPageSize(), Token: in.GetPageToken()})
	if err != nil {
		return nil, err
	}
	return &networkv1.ListAllSecurityGroupsResponse{SecurityGroups: convertAll(all, groupToProto), NextPageToken: next}, nil
}

func (r *server) ListAllRouteTables(
	ctx context.Context, in *networkv1.ListAllRouteTablesRequest,
) (*networkv1.ListAllRouteTablesResponse, error) {
	t, err := auth.AdmitAll(ctx, service+"ListAllRouteTables", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllRouteTables(ctx, t, page{Size: in.GetPageSize(), Token: in.GetPageToken()})
	if err != nil {
		return nil, err
	}
	return &networkv1.ListAllRouteTablesResponse{RouteTables: convertAll(all, tableToProto), NextPageToken: next}, nil
}

func (r *server) ListAllNatGateways(
	ctx context.Context, in *networkv1.ListAllNatGatewaysRequest,
) (*networkv1.ListAllNatGatewaysResponse, error) {
	t, err := auth.AdmitAll(ctx, service+"ListAllNatGateways", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllNATGateways(ctx, t, page{Size: in.GetPageSize(), Token: in.GetPageToken()})
	if err != nil {
		return nil, err
	}
	return &networkv1.ListAllNatGatewaysResponse{NatGateways: convertAll(all, natToProto), NextPageToken: next}, nil
}

func (r *server) ListAllFloatingIps(
	ctx context.Context, in *networkv1.ListAllFloatingIpsRequest,
) (*networkv1.ListAllFloatingIpsResponse, error) {
	t, err := auth.AdmitAll(ctx, service+"ListAllFloatingIps", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllFloatingIPs(ctx, t, page{Size: in.GetPageSize(), Token: in.GetPageToken()})
	if err != nil {
		return nil, err
	}
	return &networkv1.ListAllFloatingIpsResponse{FloatingIps: convertAll(all, floatingToProto), NextPageToken: next}, nil
}

func (r *server) ListAllServiceIps(
	ctx context.Context, in *networkv1.ListAllServiceIpsRequest,
) (*networkv1.ListAllServiceIpsResponse, error) {
	t, err := auth.AdmitAll(ctx, service+"ListAllServiceIps", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllServiceIPs(ctx, t, page{Size: in.GetPageSize(), Token: in.GetPageToken()})
	if err != nil {
		return nil, err
	}
	return &networkv1.ListAllServiceIpsResponse{ServiceIps: convertAll(all, serviceToProto), NextPageToken: next}, nil
}

func (r *server) ListAllPeerings(
	ctx context.Context, in *networkv1.ListAllPeeringsRequest,
) (*networkv1.ListAllPeeringsResponse, error) {
	t, err := auth.AdmitAll(ctx, service+"ListAllPeerings", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllPeerings(ctx, t, page{Size: in.GetPageSize(), Token: in.GetPageToken()})
	if err != nil {
		return nil, err
	}
	return &networkv1.ListAllPeeringsResponse{Peerings: convertAll(all, peeringToProto), NextPageToken: next}, nil
}
