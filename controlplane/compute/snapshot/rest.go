package snapshot

import (
	"context"
	"net/http"
	"strings"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"

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
	r.Handle(http.MethodGet, all, service+"ListSnapshots", api.getSnapshots)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: all, RPC: service + "CreateSnapshot", Creates: true}, api.CreateSnapshot)
	protorest.Handle(r, protorest.Route{Method: http.MethodGet, Path: one, RPC: service + "GetSnapshot"}, api.GetSnapshot)
	protorest.Handle(r, protorest.Route{Method: http.MethodDelete, Path: one, RPC: service + "DeleteSnapshot"}, api.DeleteSnapshot)
	protorest.Handle(r, protorest.Route{
		Method: http.MethodPost, Path: one + "/volumes", RPC: service + "CreateVolumeFromSnapshot", Creates: true,
	}, api.CreateVolumeFromSnapshot)
	protorest.Handle(r, protorest.Route{Method: http.MethodGet, Path: ofVolume, RPC: service + "ListSnapshots"}, api.ListSnapshots)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: ofVolume, RPC: service + "CreateSnapshot", Creates: true}, api.CreateSnapshot)
	protorest.Handle(r, protorest.Route{Method: http.MethodPost, Path: ofVM, RPC: service + "CreateVmSnapshots", Creates: true}, api.CreateVmSnapshots)
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
