package network

import (
	"cmp"
	"context"
	"net/http"
	"strings"

	"github.com/gorilla/mux"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
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
	handleBody(r, http.MethodPost, groups+"/{security_group_id}/rules", "AddSecurityGroupRule", "rule", api.AddSecurityGroupRule)
	handle(r, http.MethodDelete, groups+"/{security_group_id}/rules/{rule_id}", "RemoveSecurityGroupRule", api.RemoveSecurityGroupRule)

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

// message is a request or response of the service: a pointer to the generated struct T.
type message[T any] interface {
	*T
	proto.Message
}

// handle registers a route that is served by an RPC. The parts of the path in braces are fields of the RPC's request.
func handle[I, O any, PI message[I], PO message[O]](
	r *rest.Server, method, path string, name auth.Method, call func(context.Context, PI) (PO, error),
) {
	handleBody(r, method, path, name, "", call)
}

// handleBody is like handle for a route whose body is one field of the RPC's request, in addition to org_id and
// project_id.
func handleBody[I, O any, PI message[I], PO message[O]](
	r *rest.Server, method, path string, name auth.Method, field string, call func(context.Context, PI) (PO, error),
) {
	r.Handle(method, path, service+name, func(w *rest.Response, q *http.Request) (any, error) {
		in := PI(new(I))
		if err := readRequest(q, name, field, in); err != nil {
			return nil, err
		}
		header := &headers{}
		out, err := call(grpc.NewContextWithServerTransportStream(q.Context(), header), in)
		if err != nil {
			return nil, err
		}
		if len(header.md.Get("idempotency-replayed")) > 0 {
			w.Header().Set("Idempotency-Replayed", "true")
		}
		switch {
		case method == http.MethodDelete && out.ProtoReflect().Descriptor().Fields().Len() == 0:
			return map[string]any{"id": cmp.Or(mux.Vars(q)["id"], mux.Vars(q)["name"]), "deleted": true}, nil
		case method == http.MethodPost && name != "AcceptPeering":
			w.Status = http.StatusCreated
		}
		return encodeMessage(out.ProtoReflect()), nil
	})
}

// readRequest fills the request of an RPC from the path, and from the body or the query of an HTTP request. If field is
// not empty, the body is that field of the request.
func readRequest(q *http.Request, name auth.Method, field string, in proto.Message) error {
	// Authenticate the caller before reading the body. The tenant may be in the body, so the RPC authorizes the caller.
	if _, err := auth.Admit(q.Context(), service+name, "", ""); err != nil && !auth.Undecided(err) {
		return err
	}
	m := in.ProtoReflect()
	if q.Method == http.MethodPost || q.Method == http.MethodPatch {
		var body map[string]any
		if _, err := rest.Decode(q, &body); err != nil {
			return err
		}
		if field != "" {
			body = nest(body, field)
		}
		if err := decodeMessage(m, "", body); err != nil {
			return err
		}
	} else {
		for key, values := range q.URL.Query() {
			if f := m.Descriptor().Fields().ByName(protoreflect.Name(key)); f != nil && len(values) > 0 {
				if err := decodeQuery(m, f, values[0]); err != nil {
					return err
				}
			}
		}
	}
	for key, value := range mux.Vars(q) {
		m.Set(m.Descriptor().Fields().ByName(protoreflect.Name(key)), protoreflect.ValueOfString(value))
	}
	return nil
}

// nest returns a body in which all fields but the tenant are those of the field with the given name.
func nest(body map[string]any, field string) map[string]any {
	out, inner := map[string]any{}, map[string]any{}
	for key, value := range body {
		if key == "org_id" || key == "project_id" {
			out[key] = value
		} else {
			inner[key] = value
		}
	}
	out[field] = inner
	return out
}

// headers collects the response headers that an RPC sets. It implements grpc.ServerTransportStream.
type headers struct{ md metadata.MD }

func (h *headers) Method() string { return "" }

func (h *headers) SetHeader(md metadata.MD) error {
	h.md = metadata.Join(h.md, md)
	return nil
}

func (h *headers) SendHeader(md metadata.MD) error { return h.SetHeader(md) }

func (h *headers) SetTrailer(metadata.MD) error { return nil }

// enumText returns the name of an enum value in JSON: the generated name in lower case without its prefix, such as
// active for STATUS_ACTIVE.
func enumText(e protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	v := e.Values().ByNumber(n)
	if v == nil {
		return ""
	}
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), enumPrefix(e)))
}

// enumPrefix returns the prefix of the names of an enum's values, which the name of its first value shows.
func enumPrefix(e protoreflect.EnumDescriptor) string {
	return strings.TrimSuffix(string(e.Values().Get(0).Name()), "UNSPECIFIED")
}
