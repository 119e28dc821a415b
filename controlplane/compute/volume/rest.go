package volume

import (
	"context"
	"net/http"
	"strings"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Routes registers the REST API of volumes (docs/api.md). Each route has the fields and the authorization of one RPC.
func (s *Service) Routes(r *rest.Server) {
	api := &server{s: s}
	const all, one = "/api/v1/volumes", "/api/v1/volumes/{volume_id}"
	list := protorest.Row{Method: http.MethodGet, Path: all, RPC: "ListVolumes"}
	r.Handle(list.Method, list.Path, service+"ListVolumes", api.getVolumes, protorest.Description(&vmv1.VolumeService_ServiceDesc, list),
		rest.QueryOf("name", nil, "Only volumes with this name."),
		rest.QueryOf("status", nil, "Only volumes with this status, such as in_use."),
		rest.QueryOf("storage_class", nil, "Only volumes of this storage class."),
		rest.QueryOf("attached_to_vm", nil, "Only volumes that are attached to this VM."))
	protorest.Serve(r, &vmv1.VolumeService_ServiceDesc, api, []protorest.Row{
		{Method: http.MethodPost, Path: all, RPC: "CreateVolume", Creates: true},
		{Method: http.MethodPost, Path: all + "/register", RPC: "RegisterExternalVolume", Creates: true},
		{Method: http.MethodGet, Path: one, RPC: "GetVolume"},
		{Method: http.MethodDelete, Path: one, RPC: "DeleteVolume"},
		{Method: http.MethodPost, Path: one + "/resize", RPC: "ResizeVolume"},
	})
	protorest.Serve(r, &storagev1.VolumeService_ServiceDesc, &storageServer{s: s}, []protorest.Row{
		{Method: http.MethodGet, Path: "/api/v1/all-volumes", RPC: "ListAllVolumes"},
		{Method: http.MethodPatch, Path: one, RPC: "UpdateVolume"},
		{Method: http.MethodPost, Path: one + "/flatten", RPC: "FlattenVolume"},
	})
	r.ResolveNames("volumes", auth.Named(service+"GetVolume", s.named))
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
