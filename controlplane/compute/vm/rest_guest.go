package vm

import (
	"net/http"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// guestRoutes registers the endpoints of GuestService.
func (s *Service) guestRoutes(r *rest.Server) {
	api := &guestServer{s: s}
	route := func(path string, method auth.Method) protorest.Route {
		return protorest.Route{
			Method: http.MethodPost, Path: "/api/v1/vms/{vm_id}/guest/" + path, RPC: guestService + method,
		}
	}
	protorest.Handle(r, route("password", "SetGuestPassword"), api.SetGuestPassword)
	protorest.Handle(r, route("ssh-keys", "AddGuestSshKeys"), api.AddGuestSshKeys)
	protorest.Handle(r, route("exec", "RunGuestCommand"), api.RunGuestCommand)
}
