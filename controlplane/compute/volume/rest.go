package volume

import (
	"context"
	"net/http"
	"strings"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Routes registers the REST API of volumes (docs/api.md). Each route has the fields and the authorization of one RPC.
func (s *Service) Routes(r *rest.Server) {
	api, storage := &server{s: s}, &storageServer{s: s}
	const all, one = "/api/v1/volumes", "/api/v1/volumes/{volume_id}"
	r.Handle(http.MethodGet, all, service+"ListVolumes", api.getVolumes)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: all, RPC: service + "CreateVolume", Creates: true}, api.CreateVolume)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: all + "/register", RPC: service + "RegisterExternalVolume", Creates: true}, api.RegisterExternalVolume)
	protorest.Handle(r, protorest.Route{Method: http.MethodGet, Path: one, RPC: service + "GetVolume"}, api.GetVolume)
	protorest.Handle(r, protorest.Route{Method: http.MethodPatch, Path: one, RPC: storageService + "UpdateVolume"}, storage.UpdateVolume)
	protorest.Handle(r, protorest.Route{Method: http.MethodDelete, Path: one, RPC: service + "DeleteVolume"}, api.DeleteVolume)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: one + "/resize", RPC: service + "ResizeVolume"}, api.ResizeVolume)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: one + "/flatten", RPC: storageService + "FlattenVolume"}, storage.FlattenVolume)
}

// getVolumes lists volumes. In addition to the fields of ListVolumes, the query may have a filter.
func (r *server) getVolumes(_ *rest.Response, q *http.Request) (any, error) {
	query := q.URL.Query()
	filter := Filter{
		Name: query.Get("name"), Status: strings.ToUpper(query.Get("status")), Class: query.Get("storage_class"), VM: query.Get("attached_to_vm"),
	}
	return protorest.Read(q, func(ctx context.Context, in *vmv1.ListVolumesRequest) (*vmv1.ListVolumesResponse, error) {
		return r.list(ctx, in, filter)
	})
}
