package node

import (
	"context"
	"net/http"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Routes registers the REST API of hosts (docs/api.md). Each route has the fields and the authorization of one RPC.
func (s *Service) Routes(r *rest.Server) {
	const all, one = "/api/v1/nodes", "/api/v1/nodes/{node_id}"
	protorest.Serve(r, &vmv1.NodeService_ServiceDesc, &server{s: s}, []protorest.Row{
		{Method: http.MethodGet, Path: all, RPC: "ListNodes"},
		{Method: http.MethodGet, Path: one, RPC: "GetNode"},
		{Method: http.MethodPost, Path: one + "/cordon", RPC: "CordonNode"},
		{Method: http.MethodPost, Path: one + "/uncordon", RPC: "UncordonNode"},
		{Method: http.MethodPost, Path: one + "/drain", RPC: "DrainNode"},
	})
	r.ResolveNames("nodes", s.named)
}

// named implements rest.Resolver for hosts.
func (s *Service) named(ctx context.Context, _ cloud.Tenant, name string) (string, error) {
	if _, err := auth.Admit(ctx, service+"GetNode", "", ""); err != nil {
		return "", err
	}
	id, err := s.Named(ctx, name)
	return string(id), err
}
