package network

import (
	"context"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func tableToProto(t *cloud.RouteTable) *networkv1.RouteTable {
	out := &networkv1.RouteTable{
		Id: string(t.ID), Name: t.Name, OrgId: string(t.Org), ProjectId: string(t.Project), VpcId: string(t.VPC),
		Description: t.Description,
		Status:      networkv1.Status(t.Status), StatusReason: t.StatusReason, CreatedAt: int64(t.CreatedAt),
		UpdatedAt: int64(t.UpdatedAt),
	}
	for _, id := range t.Subnets {
		out.SubnetIds = append(out.SubnetIds, string(id))
	}
	for _, r := range t.Routes {
		out.Routes = append(out.Routes, &networkv1.Route{Destination: r.Destination.String(), TargetType: networkv1.RouteTarget(r.Target), TargetId: r.ID})
	}
	return out
}

func routesFrom(in []*networkv1.Route) (out []cloud.Route, err error) {
	for _, r := range in {
		destination, err := cloud.ParseCIDR("routes.destination", r.GetDestination())
		if err != nil {
			return nil, err
		}
		if _, known := networkv1.RouteTarget_name[int32(r.GetTargetType())]; !known {
			return nil, fault.Invalid("routes.target_type", "%d is not a target type", r.GetTargetType()).With("constraint", "enum")
		}
		if r.GetTargetId() != "" {
			if err := cloud.CheckUUID("routes.target_id", r.GetTargetId()); err != nil {
				return nil, err
			}
		}
		out = append(out, cloud.Route{Destination: destination, Target: cloud.RouteTarget(r.GetTargetType()), ID: r.GetTargetId()})
	}
	return out, nil
}

func subnetIDsFrom(in []string) (out []cloud.SubnetID, err error) {
	seen := map[string]bool{}
	for _, id := range in {
		if err := cloud.CheckUUID("subnet_ids", id); err != nil {
			return nil, err
		}
		if seen[id] {
			return nil, fault.Invalid("subnet_ids", "has %s twice", id).With("constraint", "unique")
		}
		seen[id] = true
		out = append(out, cloud.SubnetID(id))
	}
	return out, nil
}

func (r *server) CreateRouteTable(
	ctx context.Context, in *networkv1.CreateRouteTableRequest,
) (*networkv1.RouteTable, error) {
	t, err := admit(ctx, "CreateRouteTable", in)
	if err != nil {
		return nil, err
	}
	q := RouteTableRequest{Name: in.GetName(), Description: in.GetDescription(), VPC: cloud.VPCID(in.GetVpcId())}
	if q.Subnets, err = subnetIDsFrom(in.GetSubnetIds()); err != nil {
		return nil, err
	}
	if q.Routes, err = routesFrom(in.GetRoutes()); err != nil {
		return nil, err
	}
	out, err := r.s.CreateRouteTable(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, tableToProto)
}

func (r *server) GetRouteTable(ctx context.Context, in *networkv1.GetRouteTableRequest) (*networkv1.RouteTable, error) {
	return getOne(ctx, "GetRouteTable", in, r.s.GetRouteTable, tableToProto)
}

func (r *server) ListRouteTables(
	ctx context.Context, in *networkv1.ListRouteTablesRequest,
) (*networkv1.ListRouteTablesResponse, error) {
	t, err := admit(ctx, "ListRouteTables", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListRouteTables(ctx, t, pageOf(in), cloud.VPCID(in.GetVpcId()))
	if err != nil {
		return nil, err
	}
	return &networkv1.ListRouteTablesResponse{RouteTables: convertAll(all, tableToProto), NextPageToken: next}, nil
}

func (r *server) UpdateRouteTable(
	ctx context.Context, in *networkv1.UpdateRouteTableRequest,
) (*networkv1.RouteTable, error) {
	t, err := admit(ctx, "UpdateRouteTable", in)
	if err != nil {
		return nil, err
	}
	q := RouteTableUpdate{ID: cloud.RouteTableID(in.GetId()), Name: in.Name, Description: in.Description}
	if in.SubnetIds != nil {
		all, err := subnetIDsFrom(in.GetSubnetIds().GetIds())
		if err != nil {
			return nil, err
		}
		q.Subnets = replacement(all)
	}
	if in.Routes != nil {
		all, err := routesFrom(in.GetRoutes().GetRoutes())
		if err != nil {
			return nil, err
		}
		q.Routes = replacement(all)
	}
	out, err := r.s.UpdateRouteTable(ctx, t, q, rpc.BodyHash(in))
	return answer(ctx, out, err, tableToProto)
}

func (r *server) DeleteRouteTable(
	ctx context.Context, in *networkv1.DeleteRouteTableRequest,
) (*networkv1.DeleteRouteTableResponse, error) {
	return deleteOne(ctx, "DeleteRouteTable", in, r.s.DeleteRouteTable, &networkv1.DeleteRouteTableResponse{})
}
