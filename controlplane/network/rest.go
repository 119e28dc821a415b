package network

import (
	"context"
	"net/http"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Routes registers the REST API of the network service (docs/api.md). Each route has the fields and the authorization
// of one RPC.
func (s *Service) Routes(r *rest.Server) {
	protorest.Serve(r, &networkv1.NetworkService_ServiceDesc, &server{s: s}, rows())
	for _, one := range []struct {
		collection, kind string
		get              auth.Method
	}{
		{"vpcs", kindVPC, "GetVpc"},
		{"subnets", kindSubnet, "GetSubnet"},
		{"ports", kindPort, "GetPort"},
		{"security-groups", kindGroup, "GetSecurityGroup"},
		{"route-tables", kindTable, "GetRouteTable"},
		{"nat-gateways", kindNAT, "GetNatGateway"},
		{"floating-ips", kindFloating, "GetFloatingIp"},
		{"service-ips", kindService, "GetServiceIp"},
		{"peerings", kindPeering, "GetPeering"},
	} {
		r.ResolveNames(one.collection, auth.Named(service+one.get, func(ctx context.Context, t cloud.Tenant, name string) (string, error) {
			return s.named(ctx, t, one.kind, name)
		}))
	}
}

// rows returns the table of the routes, with the RPCs that serve them.
func rows() []protorest.Row {
	const rules = "/api/v1/security-groups/{security_group_id}/rules"
	out := []protorest.Row{
		{Method: http.MethodPost, Path: rules, RPC: "AddSecurityGroupRule", Body: "rule", Creates: true},
		{Method: http.MethodDelete, Path: rules + "/{rule_id}", RPC: "RemoveSecurityGroupRule"},
		{Method: http.MethodPost, Path: "/api/v1/peerings/{id}/accept", RPC: "AcceptPeering"},
		{Method: http.MethodGet, Path: "/api/v1/explain", RPC: "ExplainPath"},
		{Method: http.MethodGet, Path: "/api/v1/all-vpcs", RPC: "ListAllVpcs"},
		{Method: http.MethodGet, Path: "/api/v1/all-subnets", RPC: "ListAllSubnets"},
		{Method: http.MethodGet, Path: "/api/v1/all-ports", RPC: "ListAllPorts"},
		{Method: http.MethodGet, Path: "/api/v1/all-security-groups", RPC: "ListAllSecurityGroups"},
		{Method: http.MethodGet, Path: "/api/v1/all-route-tables", RPC: "ListAllRouteTables"},
		{Method: http.MethodGet, Path: "/api/v1/all-nat-gateways", RPC: "ListAllNatGateways"},
		{Method: http.MethodGet, Path: "/api/v1/all-floating-ips", RPC: "ListAllFloatingIps"},
		{Method: http.MethodGet, Path: "/api/v1/all-service-ips", RPC: "ListAllServiceIps"},
		{Method: http.MethodGet, Path: "/api/v1/all-peerings", RPC: "ListAllPeerings"},
	}
	for _, kind := range []struct{ path, key, one, many string }{
		{"vpcs", "id", "Vpc", "Vpcs"},
		{"subnets", "id", "Subnet", "Subnets"},
		{"ports", "id", "Port", "Ports"},
		{"security-groups", "id", "SecurityGroup", "SecurityGroups"},
		{"route-tables", "id", "RouteTable", "RouteTables"},
		{"nat-gateways", "id", "NatGateway", "NatGateways"},
		{"floating-ips", "id", "FloatingIp", "FloatingIps"},
		{"service-ips", "id", "ServiceIp", "ServiceIps"},
		{"peerings", "id", "Peering", "Peerings"},
		{"external-networks", "name", "ExternalNetwork", "ExternalNetworks"},
	} {
		all := "/api/v1/" + kind.path
		one := all + "/{" + kind.key + "}"
		out = append(out,
			protorest.Row{Method: http.MethodGet, Path: all, RPC: "List" + kind.many},
			protorest.Row{Method: http.MethodPost, Path: all, RPC: "Create" + kind.one, Creates: true},
			protorest.Row{Method: http.MethodGet, Path: one, RPC: "Get" + kind.one},
			protorest.Row{Method: http.MethodPatch, Path: one, RPC: "Update" + kind.one},
			protorest.Row{Method: http.MethodDelete, Path: one, RPC: "Delete" + kind.one, Ignored: ignored[kind.one]},
		)
	}
	return out
}

// ignored lists, for resources whose deletion has parameters in the wire contract that Trivet does not need, these
// parameters.
var ignored = map[string][]string{"Subnet": {"vpc_id"}}
