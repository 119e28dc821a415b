package storageclass

import (
	"net/http"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Routes registers the REST API of storage classes (docs/api.md). Each route has the fields and the authorization of
// one RPC.
func (s *Service) Routes(r *rest.Server) {
	api := &server{s: s}
	const all, one = "/api/v1/storage-classes", "/api/v1/storage-classes/{name}"
	protorest.Handle(r, protorest.Route{Method: http.MethodGet, Path: all, RPC: service + "ListStorageClasses"}, api.ListStorageClasses)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: all, RPC: service + "CreateStorageClass", Creates: true}, api.CreateStorageClass)
	protorest.Handle(r, protorest.Route{Method: http.MethodGet, Path: one, RPC: service + "GetStorageClass"}, api.GetStorageClass)
	protorest.Handle(r, protorest.Route{Method: http.MethodPatch, Path: one, RPC: service + "UpdateStorageClass"}, api.UpdateStorageClass)
	protorest.Handle(r, protorest.Route{Method: http.MethodDelete, Path: one, RPC: service + "DeleteStorageClass"}, api.DeleteStorageClass)
}
