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
