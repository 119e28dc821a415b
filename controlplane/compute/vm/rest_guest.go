package vm

import (
	"net/http"

	guestv1 "github.com/trivet-cloud/trivet/protos/guest/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

func (s *Service) guestRoutes(r *rest.Server) {
	const guest = "/api/v1/vms/{vm_id}/guest"
	protorest.Serve(r, &guestv1.GuestService_ServiceDesc, &guestServer{s: s}, []protorest.Row{
		{Method: http.MethodPost, Path: guest + "/password", RPC: "SetGuestPassword"},
		{Method: http.MethodPost, Path: guest + "/ssh-keys", RPC: "AddGuestSshKeys"},
		{Method: http.MethodPost, Path: guest + "/exec", RPC: "RunGuestCommand"},
	})
}
