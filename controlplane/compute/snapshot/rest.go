package snapshot

import (
	"context"
	"net/http"
	"strings"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Routes registers the REST API of snapshots (docs/api.md). Each route has the fields and the authorization of one RPC.
func (s *Service) Routes(r *rest.Server) {
	api := &server{s: s}
	const (
		all      = "/api/v1/snapshots"
		one      = "/api/v1/snapshots/{snapshot_id}"
		ofVolume = "/api/v1/volumes/{volume_id}/snapshots"
		ofVM     = "/api/v1/vms/{vm_id}/snapshots"
	)
	r.ResolveNames("snapshots", auth.Named(service+"GetSnapshot", s.named))
	list := protorest.Row{Method: http.MethodGet, Path: all, RPC: "ListSnapshots"}
	r.Handle(list.Method, list.Path, service+"ListSnapshots", api.getSnapshots, protorest.Description(&storagev1.SnapshotService_ServiceDesc, list),
		rest.QueryOf("name", nil, "Only snapshots with this name."),
		rest.QueryOf("status", nil, "Only snapshots with this status, such as available."))
	protorest.Serve(r, &storagev1.SnapshotService_ServiceDesc, api, []protorest.Row{
		{Method: http.MethodGet, Path: "/api/v1/all-snapshots", RPC: "ListAllSnapshots"},
		{Method: http.MethodPost, Path: all, RPC: "CreateSnapshot", Creates: true},
		{Method: http.MethodGet, Path: one, RPC: "GetSnapshot"},
		{Method: http.MethodPatch, Path: one, RPC: "UpdateSnapshot"},
		{Method: http.MethodDelete, Path: one, RPC: "DeleteSnapshot"},
		{Method: http.MethodGet, Path: one + "/export", RPC: "ExportSnapshot", Media: "application/octet-stream"},
		{Method: http.MethodPost, Path: one + "/volumes", RPC: "CreateVolumeFromSnapshot", Creates: true},
		{Method: http.MethodGet, Path: ofVolume, RPC: "ListSnapshots"},
		{Method: http.MethodPost, Path: ofVolume, RPC: "CreateSnapshot", Creates: true},
		{Method: http.MethodPost, Path: ofVM, RPC: "CreateVmSnapshots", Creates: true},
	})
}

// getSnapshots implements ListSnapshots. The query can have the fields of ListSnapshotsRequest, and also the fields
// name and status of a Filter.
func (r *server) getSnapshots(_ *rest.Response, q *http.Request) (any, error) {
	query := q.URL.Query()
	filter := Filter{Name: query.Get("name"), Status: strings.ToUpper(query.Get("status"))}
	return protorest.Read(q, func(ctx context.Context, in *storagev1.ListSnapshotsRequest) (*storagev1.ListSnapshotsResponse, error) {
		return r.list(ctx, in, filter)
	})
}
