package vm

import (
	"net/http"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// guestRoutes registers the endpoints of GuestService.
func (s *Service) guestRoutes(r *rest.Server) {
	api := &guestServer{s: s}
	const one = "/api/v1/vms/{vm_id}/guest"
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: one + "/password", RPC: guestService + "SetGuestPassword"}, api.SetGuestPassword)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: one + "/ssh-keys", RPC: guestService + "AddGuestSshKeys"}, api.AddGuestSshKeys)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: one + "/exec", RPC: guestService + "RunGuestCommand"}, api.RunGuestCommand)
}
