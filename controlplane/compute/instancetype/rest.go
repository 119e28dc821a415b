package instancetype

import (
	"net/http"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Routes registers the REST API of instance types (docs/api.md). Each route has the fields and the authorization of one
// RPC.
func (s *Service) Routes(r *rest.Server) {
	const all, one = "/api/v1/instance-types", "/api/v1/instance-types/{name}"
	protorest.Serve(r, &operatorv1.InstanceTypeService_ServiceDesc, &server{s: s}, []protorest.Row{
		{Method: http.MethodGet, Path: all, RPC: "ListInstanceTypes"},
		{Method: http.MethodPost, Path: all, RPC: "CreateInstanceType", Creates: true},
		{Method: http.MethodGet, Path: one, RPC: "GetInstanceType"},
		{Method: http.MethodPatch, Path: one, RPC: "UpdateInstanceType"},
		{Method: http.MethodDelete, Path: one, RPC: "DeleteInstanceType"},
	})
}
