package vm

import (
	"net/http"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// viewRoutes registers the routes of VmViewService, and those of VmService that the wire contract does not have. They
// represent VMs by the messages of the protos, unlike the routes of the contract.
func (s *Service) viewRoutes(r *rest.Server) {
	api := server{s: s}
	protorest.Serve(r, &vmv1.VmService_ServiceDesc, &api, []protorest.Row{
		{Method: http.MethodPost, Path: "/api/v1/vms/{vm_id}/recover", RPC: "RecoverVm"},
	})
	protorest.Serve(r, &operatorv1.VmViewService_ServiceDesc, &viewServer{server: api}, []protorest.Row{
		{Method: http.MethodGet, Path: "/api/v1/vms/{vm_id}/details", RPC: "GetVmDetails"},
		{Method: http.MethodGet, Path: "/api/v1/vm-events", RPC: "WatchVms", Event: "change"},
		{Method: http.MethodGet, Path: "/api/v1/all-vms", RPC: "ListAllVms"},
		{Method: http.MethodGet, Path: "/api/v1/all-vm-events", RPC: "WatchAllVms", Event: "change"},
	})
}
