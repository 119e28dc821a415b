package network

import (
	"context"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// listAllRequest is implemented by the requests of lists over all projects.
type listAllRequest interface {
	GetOrgId() string
	GetProjectId() string
	GetPageSize() int32
	GetPageToken() string
}

// admitAll authorizes a list over all projects. It returns the tenant to which the request limits the list.
func admitAll(ctx context.Context, method auth.Method, in listAllRequest) (cloud.Tenant, page, error) {
	if _, err := auth.Admit(ctx, service+method, "", ""); err != nil {
		return cloud.Tenant{}, page{}, err
	}
	t, err := cloud.ParseTenant(in.GetOrgId(), in.GetProjectId())
	return t, page{Size: in.GetPageSize(), Token: in.GetPageToken()}, err
}

func (r *server) ListAllVpcs(ctx context.Context, in *networkv1.ListAllVpcsRequest) (*networkv1.ListAllVpcsResponse, error) {
	t, p, err := admitAll(ctx, "ListAllVpcs", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllVPCs(ctx, t, p)
	if err != nil {
		return nil, err
	}
	return &networkv1.ListAllVpcsResponse{Vpcs: convertAll(all, vpcToProto), NextPageToken: next}, nil
}

func (r *server) ListAllSubnets(ctx context.Context, in *networkv1.ListAllSubnetsRequest) (*networkv1.ListAllSubnetsResponse, error) {
	t, p, err := admitAll(ctx, "ListAllSubnets", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllSubnets(ctx, t, p)
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
	t, p, err := admitAll(ctx, "ListAllPorts", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAllPorts(ctx, t, p)
	if err != nil {
		return nil, err
	}
	return &networkv1.ListAllPortsResponse{Ports: convertAll(all, portToProto), NextPageToken: next}, nil
}
