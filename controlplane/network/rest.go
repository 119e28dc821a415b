package network

import (
	"context"
	"net/http"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Routes registers the REST API of the network service (docs/api.md). Each route has the fields and the authorization
// of one RPC. A request is the RPC's request as JSON: the body of creates and updates, the query of reads and deletes.
func (s *Service) Routes(r *rest.Server) {
	api := &server{s: s}
	handle(r, http.MethodGet, "/api/v1/vpcs", "ListVpcs", api.ListVpcs)
	handle(r, http.MethodPost, "/api/v1/vpcs", "CreateVpc", api.CreateVpc)
	handle(r, http.MethodGet, "/api/v1/vpcs/{id}", "GetVpc", api.GetVpc)
	handle(r, http.MethodPatch, "/api/v1/vpcs/{id}", "UpdateVpc", api.UpdateVpc)
	handle(r, http.MethodDelete, "/api/v1/vpcs/{id}", "DeleteVpc", api.DeleteVpc)

	handle(r, http.MethodGet, "/api/v1/subnets", "ListSubnets", api.ListSubnets)
	handle(r, http.MethodPost, "/api/v1/subnets", "CreateSubnet", api.CreateSubnet)
	handle(r, http.MethodGet, "/api/v1/subnets/{id}", "GetSubnet", api.GetSubnet)
	handle(r, http.MethodPatch, "/api/v1/subnets/{id}", "UpdateSubnet", api.UpdateSubnet)
	handle(r, http.MethodDelete, "/api/v1/subnets/{id}", "DeleteSubnet", api.DeleteSubnet)

	handle(r, http.MethodGet, "/api/v1/ports", "ListPorts", api.ListPorts)
	handle(r, http.MethodPost, "/api/v1/ports", "CreatePort", api.CreatePort)
	handle(r, http.MethodGet, "/api/v1/ports/{id}", "GetPort", api.GetPort)
	handle(r, http.MethodPatch, "/api/v1/ports/{id}", "UpdatePort", api.UpdatePort)
	handle(r, http.MethodDelete, "/api/v1/ports/{id}", "DeletePort", api.DeletePort)

	const groups = "/api/v1/security-groups"
	handle(r, http.MethodGet, groups, "ListSecurityGroups", api.ListSecurityGroups)
	handle(r, http.MethodPost, groups, "CreateSecurityGroup", api.CreateSecurityGroup)
	handle(r, http.MethodGet, groups+"/{id}", "GetSecurityGroup", api.GetSecurityGroup)
	handle(r, http.MethodPatch, groups+"/{id}", "UpdateSecurityGroup", api.UpdateSecurityGroup)
	handle(r, http.MethodDelete, groups+"/{id}", "DeleteSecurityGroup", api.DeleteSecurityGroup)
	const rules = groups + "/{security_group_id}/rules"
	handleBody(r, http.MethodPost, rules, "AddSecurityGroupRule", "rule", api.AddSecurityGroupRule)
	handle(r, http.MethodDelete, rules+"/{rule_id}", "RemoveSecurityGroupRule", api.RemoveSecurityGroupRule)

	handle(r, http.MethodGet, "/api/v1/route-tables", "ListRouteTables", api.ListRouteTables)
	handle(r, http.MethodPost, "/api/v1/route-tables", "CreateRouteTable", api.CreateRouteTable)
	handle(r, http.MethodGet, "/api/v1/route-tables/{id}", "GetRouteTable", api.GetRouteTable)
	handle(r, http.MethodPatch, "/api/v1/route-tables/{id}", "UpdateRouteTable", api.UpdateRouteTable)
	handle(r, http.MethodDelete, "/api/v1/route-tables/{id}", "DeleteRouteTable", api.DeleteRouteTable)

	handle(r, http.MethodGet, "/api/v1/nat-gateways", "ListNatGateways", api.ListNatGateways)
	handle(r, http.MethodPost, "/api/v1/nat-gateways", "CreateNatGateway", api.CreateNatGateway)
	handle(r, http.MethodGet, "/api/v1/nat-gateways/{id}", "GetNatGateway", api.GetNatGateway)
	handle(r, http.MethodPatch, "/api/v1/nat-gateways/{id}", "UpdateNatGateway", api.UpdateNatGateway)
	handle(r, http.MethodDelete, "/api/v1/nat-gateways/{id}", "DeleteNatGateway", api.DeleteNatGateway)

	handle(r, http.MethodGet, "/api/v1/floating-ips", "ListFloatingIps", api.ListFloatingIps)
	handle(r, http.MethodPost, "/api/v1/floating-ips", "CreateFloatingIp", api.CreateFloatingIp)
	handle(r, http.MethodGet, "/api/v1/floating-ips/{id}", "GetFloatingIp", api.GetFloatingIp)
	handle(r, http.MethodPatch, "/api/v1/floating-ips/{id}", "UpdateFloatingIp", api.UpdateFloatingIp)
	handle(r, http.MethodDelete, "/api/v1/floating-ips/{id}", "DeleteFloatingIp", api.DeleteFloatingIp)

	handle(r, http.MethodGet, "/api/v1/service-ips", "ListServiceIps", api.ListServiceIps)
	handle(r, http.MethodPost, "/api/v1/service-ips", "CreateServiceIp", api.CreateServiceIp)
	handle(r, http.MethodGet, "/api/v1/service-ips/{id}", "GetServiceIp", api.GetServiceIp)
	handle(r, http.MethodPatch, "/api/v1/service-ips/{id}", "UpdateServiceIp", api.UpdateServiceIp)
	handle(r, http.MethodDelete, "/api/v1/service-ips/{id}", "DeleteServiceIp", api.DeleteServiceIp)

	handle(r, http.MethodGet, "/api/v1/peerings", "ListPeerings", api.ListPeerings)
	handle(r, http.MethodPost, "/api/v1/peerings", "CreatePeering", api.CreatePeering)
	handle(r, http.MethodPost, "/api/v1/peerings/{id}/accept", "AcceptPeering", api.AcceptPeering)
	handle(r, http.MethodGet, "/api/v1/peerings/{id}", "GetPeering", api.GetPeering)
	handle(r, http.MethodPatch, "/api/v1/peerings/{id}", "UpdatePeering", api.UpdatePeering)
	handle(r, http.MethodDelete, "/api/v1/peerings/{id}", "DeletePeering", api.DeletePeering)

	handle(r, http.MethodGet, "/api/v1/external-networks", "ListExternalNetworks", api.ListExternalNetworks)
	handle(r, http.MethodPost, "/api/v1/external-networks", "CreateExternalNetwork", api.CreateExternalNetwork)
	handle(r, http.MethodGet, "/api/v1/external-networks/{name}", "GetExternalNetwork", api.GetExternalNetwork)
	handle(r, http.MethodPatch, "/api/v1/external-networks/{name}", "UpdateExternalNetwork", api.UpdateExternalNetwork)
	handle(r, http.MethodDelete, "/api/v1/external-networks/{name}", "DeleteExternalNetwork", api.DeleteExternalNetwork)

	handle(r, http.MethodGet, "/api/v1/explain", "ExplainPath", api.ExplainPath)
}

// handle registers a route that is served by an RPC. The parts of the path in braces are fields of the RPC's request.
func handle[I, O any, PI protorest.Message[I], PO protorest.Message[O]](
	r *rest.Server, method, path string, name auth.Method, call func(context.Context, PI) (PO, error),
) {
	handleBody(r, method, path, name, "", call)
}

// handleBody is like handle for a route whose body is one field of the RPC's request, in addition to org_id and
// project_id.
func handleBody[I, O any, PI protorest.Message[I], PO protorest.Message[O]](
	r *rest.Server, method, path string, name auth.Method, field string, call func(context.Context, PI) (PO, error),
) {
	protorest.Handle(r, protorest.Route{
		Method: method, Path: path, RPC: service + name, Body: field,
		Creates: method == http.MethodPost && name != "AcceptPeering",
	}, call)
}
