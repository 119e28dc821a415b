package volume

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

// Register registers both services for volumes, VolumeService of vmcontroller.v1 and of storage.v1, for API callers.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	vmv1.RegisterVolumeServiceServer(g, &server{s: s})
	storagev1.RegisterVolumeServiceServer(g, &storageServer{s: s})
}

type server struct {
	vmv1.UnsafeVolumeServiceServer
	s *Service
}

const (
	service        = "/vmcontroller.v1.VolumeService/"
	storageService = "/storage.v1.VolumeService/"
)

// request is implemented by every request about volumes.
type request interface {
	GetOrgId() string
	GetProjectId() string
}

func admit(ctx context.Context, method auth.Method, in request) (cloud.Tenant, error) {
	return auth.Admit(ctx, method, in.GetOrgId(), in.GetProjectId())
}

// respond converts the result of a change to its response.
func respond(ctx context.Context, out Result, err error) (*vmv1.Volume, error) {
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return convert.Volume(&out.Volume), nil
}

func (r *server) CreateVolume(ctx context.Context, in *vmv1.CreateVolumeRequest) (*vmv1.Volume, error) {
	t, err := admit(ctx, service+"CreateVolume", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Create(ctx, t, convert.VolumeFrom(in), cloud.ImageID(in.GetImageId()), rpc.BodyHash(in))
	return respond(ctx, out, err)
}

func (r *server) GetVolume(ctx context.Context, in *vmv1.GetVolumeRequest) (*vmv1.Volume, error) {
	t, err := admit(ctx, service+"GetVolume", in)
	if err != nil {
		return nil, err
	}
	v, err := r.s.Get(ctx, t, cloud.VolumeID(in.GetVolumeId()))
	if err != nil {
		return nil, err
	}
	return convert.Volume(v), nil
}

func (r *server) ListVolumes(ctx context.Context, in *vmv1.ListVolumesRequest) (*vmv1.ListVolumesResponse, error) {
	return r.list(ctx, in, Filter{})
}

// list implements ListVolumes with a filter, which only the REST API has.
func (r *server) list(ctx context.Context, in *vmv1.ListVolumesRequest, f Filter) (*vmv1.ListVolumesResponse, error) {
	t, err := admit(ctx, service+"ListVolumes", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.List(ctx, t, in.GetPageSize(), in.GetPageToken(), f)
	if err != nil {
		return nil, err
	}
	out := &vmv1.ListVolumesResponse{NextPageToken: next}
	for _, v := range all {
		out.Volumes = append(out.Volumes, convert.Volume(v))
	}
	return out, nil
}

func (r *server) DeleteVolume(ctx context.Context, in *vmv1.DeleteVolumeRequest) (*emptypb.Empty, error) {
	t, err := admit(ctx, service+"DeleteVolume", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Delete(ctx, t, cloud.VolumeID(in.GetVolumeId()), rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return &emptypb.Empty{}, nil
}

func (r *server) ResizeVolume(ctx context.Context, in *vmv1.ResizeVolumeRequest) (*vmv1.Volume, error) {
	t, err := admit(ctx, service+"ResizeVolume", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Resize(ctx, t, cloud.VolumeID(in.GetVolumeId()), in.GetSizeGib(), rpc.BodyHash(in))
	return respond(ctx, out, err)
}

func (r *server) RegisterExternalVolume(ctx context.Context, in *vmv1.RegisterExternalVolumeRequest) (*vmv1.Volume, error) {
	t, err := admit(ctx, service+"RegisterExternalVolume", in)
	if err != nil {
		return nil, err
	}
	v := cloud.Volume{
		Name: in.GetName(), SizeGiB: in.GetSizeGib(), Driver: convert.VolumeDriver(in.GetDriver()), Class: in.GetStorageClass(),
		Metadata: in.GetMetadata(), Labels: in.GetLabels(),
	}
	if v.Driver == cloud.DriverManaged {
		return nil, errNotExternal()
	}
	at := RBDImage{Cluster: in.GetRbd().GetClusterId(), Pool: in.GetRbd().GetPool(), Image: in.GetRbd().GetImage()}
	out, err := r.s.RegisterExternal(ctx, t, v, at, rpc.BodyHash(in))
	return respond(ctx, out, err)
}

type storageServer struct {
	storagev1.UnsafeVolumeServiceServer
	s *Service
}

func (r *storageServer) UpdateVolume(ctx context.Context, in *storagev1.UpdateVolumeRequest) (*vmv1.Volume, error) {
	t, err := admit(ctx, storageService+"UpdateVolume", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Update(ctx, t, cloud.VolumeID(in.GetVolumeId()), in.GetName(), in.GetMetadata(), in.GetLabels(), rpc.BodyHash(in))
	return respond(ctx, out, err)
}

func (r *storageServer) FlattenVolume(ctx context.Context, in *storagev1.FlattenVolumeRequest) (*vmv1.Volume, error) {
	t, err := admit(ctx, storageService+"FlattenVolume", in)
	if err != nil {
		return nil, err
	}
	out, err := r.s.Flatten(ctx, t, cloud.VolumeID(in.GetVolumeId()), rpc.BodyHash(in))
	return respond(ctx, out, err)
}

func (r *storageServer) ListAllVolumes(ctx context.Context, in *storagev1.ListAllVolumesRequest) (*storagev1.ListAllVolumesResponse, error) {
	t, err := auth.AdmitAll(ctx, storageService+"ListAllVolumes", in)
	if err != nil {
		return nil, err
	}
	if in.GetNodeId() != "" {
		if err := cloud.CheckUUID("node_id", in.GetNodeId()); err != nil {
			return nil, err
		}
	}
	all, next, err := r.s.ListAll(ctx, t, cloud.NodeID(in.GetNodeId()), in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &storagev1.ListAllVolumesResponse{NextPageToken: next}
	for _, v := range all {
		out.Volumes = append(out.Volumes, convert.Volume(v))
	}
	return out, nil
}
