package node

import (
	"net/http"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Routes registers the REST API of hosts (docs/api.md). Each route has the fields and the authorization of one RPC.
func (s *Service) Routes(r *rest.Server) {
	api := &server{s: s}
	const all, one = "/api/v1/nodes", "/api/v1/nodes/{node_id}"
	protorest.Handle(r, protorest.Route{Method: http.MethodGet, Path: all, RPC: service + "ListNodes"}, api.ListNodes)
	protorest.Handle(r, protorest.Route{Method: http.MethodGet, Path: one, RPC: service + "GetNode"}, api.GetNode)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: one + "/cordon", RPC: service + "CordonNode"}, api.CordonNode)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: one + "/uncordon", RPC: service + "UncordonNode"}, api.UncordonNode)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: one + "/drain", RPC: service + "DrainNode"}, api.DrainNode)
}
