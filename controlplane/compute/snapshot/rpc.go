package snapshot

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

// Register registers SnapshotService of storage.v1 for API callers.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	storagev1.RegisterSnapshotServiceServer(g, &server{s: s})
}

type server struct {
	storagev1.UnsafeSnapshotServiceServer
	s *Service
}

const service = "/storage.v1.SnapshotService/"

// request is implemented by every request of SnapshotService.
type request interface {
	GetOrgId() string
	GetProjectId() string
}

func admit(ctx context.Context, verb string, in request) (cloud.Tenant, error) {
	return auth.Admit(ctx, auth.Method(service+verb), in.GetOrgId(), in.GetProjectId())
}

func (r *server) CreateSnapshot(ctx context.Context, in *storagev1.CreateSnapshotRequest) (*storagev1.Snapshot, error) {
	t, err := admit(ctx, "CreateSnapshot", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Create(ctx, t, cloud.Snapshot{
		Name: in.GetName(), Volume: cloud.VolumeID(in.GetVolumeId()), Labels: in.GetLabels(),
	}, rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return convert.Snapshot(&out.Snapshots[0]), nil
}

func (r *server) CreateVmSnapshots(ctx context.Context, in *storagev1.CreateVmSnapshotsRequest) (*storagev1.CreateVmSnapshotsResponse, error) {
	t, err := admit(ctx, "CreateVmSnapshots", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.CreateOfVM(ctx, t, cloud.VMID(in.GetVmId()), cloud.Snapshot{Name: in.GetName(), Labels: in.GetLabels()}, rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	response := &storagev1.CreateVmSnapshotsResponse{}
	for i := range out.Snapshots {
		response.Snapshots = append(response.Snapshots, convert.Snapshot(&out.Snapshots[i]))
	}
	return response, nil
}

func (r *server) GetSnapshot(ctx context.Context, in *storagev1.GetSnapshotRequest) (*storagev1.Snapshot, error) {
	t, err := admit(ctx, "GetSnapshot", in)
	if err != nil {
		return nil, err
	}
	s, err := r.s.Get(ctx, t, cloud.SnapshotID(in.GetSnapshotId()))
	if err != nil {
		return nil, err
	}
	return convert.Snapshot(s), nil
}

func (r *server) ListSnapshots(ctx context.Context, in *storagev1.ListSnapshotsRequest) (*storagev1.ListSnapshotsResponse, error) {
	return r.list(ctx, in, Filter{})
}

// list implements ListSnapshots. The filter f is empty for gRPC calls, because only the REST API has filters.
func (r *server) list(ctx context.Context, in *storagev1.ListSnapshotsRequest, f Filter) (*storagev1.ListSnapshotsResponse, error) {
	t, err := admit(ctx, "ListSnapshots", in)
	if err != nil {
		return nil, err
	}
	f.Volume = cloud.VolumeID(in.GetVolumeId())
	all, next, err := r.s.List(ctx, t, in.GetPageSize(), in.GetPageToken(), f)
	if err != nil {
		return nil, err
	}
	out := &storagev1.ListSnapshotsResponse{NextPageToken: next}
	for _, s := range all {
		out.Snapshots = append(out.Snapshots, convert.Snapshot(s))
	}
	return out, nil
}

func (r *server) ListAllSnapshots(ctx context.Context, in *storagev1.ListAllSnapshotsRequest) (*storagev1.ListAllSnapshotsResponse, error) {
	t, err := auth.AdmitAll(ctx, service+"ListAllSnapshots", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAll(ctx, t, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &storagev1.ListAllSnapshotsResponse{NextPageToken: next}
	for _, s := range all {
		out.Snapshots = append(out.Snapshots, convert.Snapshot(s))
	}
	return out, nil
}

func (r *server) UpdateSnapshot(ctx context.Context, in *storagev1.UpdateSnapshotRequest) (*storagev1.Snapshot, error) {
	t, err := admit(ctx, "UpdateSnapshot", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Update(ctx, t, cloud.SnapshotID(in.GetSnapshotId()), in.GetName(), in.GetLabels(), rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return convert.Snapshot(&out.Snapshots[0]), nil
}

func (r *server) DeleteSnapshot(ctx context.Context, in *storagev1.DeleteSnapshotRequest) (*emptypb.Empty, error) {
	t, err := admit(ctx, "DeleteSnapshot", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Delete(ctx, t, cloud.SnapshotID(in.GetSnapshotId()), rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return &emptypb.Empty{}, nil
}

func (r *server) CreateVolumeFromSnapshot(ctx context.Context, in *storagev1.CreateVolumeFromSnapshotRequest) (*vmv1.Volume, error) {
	t, err := admit(ctx, "CreateVolumeFromSnapshot", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.CreateVolume(ctx, t, cloud.SnapshotID(in.GetSnapshotId()), cloud.Volume{
		Name: in.GetName(), SizeGiB: in.GetSizeGib(), Metadata: in.GetMetadata(), Labels: in.GetLabels(),
	}, rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return convert.Volume(&out.Volume), nil
}
