package storageclass

import (
	"net/http"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Routes registers the REST API of storage classes (docs/api.md). Each route has the fields and the authorization of
// one RPC.
func (s *Service) Routes(r *rest.Server) {
	const all, one = "/api/v1/storage-classes", "/api/v1/storage-classes/{name}"
	protorest.Serve(r, &storagev1.StorageClassService_ServiceDesc, &server{s: s}, []protorest.Row{
		{Method: http.MethodGet, Path: all, RPC: "ListStorageClasses"},
		{Method: http.MethodPost, Path: all, RPC: "CreateStorageClass", Creates: true},
		{Method: http.MethodGet, Path: one, RPC: "GetStorageClass"},
		{Method: http.MethodPatch, Path: one, RPC: "UpdateStorageClass"},
		{Method: http.MethodDelete, Path: one, RPC: "DeleteStorageClass"},
	})
}
