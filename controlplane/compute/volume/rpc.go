// Package volume implements VolumeService, which this version does not support: each call checks the caller's
// permission and the arguments, and then returns Unimplemented.
package volume

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Register registers VolumeService for API callers.
func Register(g grpc.ServiceRegistrar) { vmv1.RegisterVolumeServiceServer(g, server{}) }

type server struct {
	vmv1.UnsafeVolumeServiceServer
}

type request interface {
	GetOrgId() string
	GetProjectId() string
}

// unsupported authorizes the caller, runs check on the arguments, and then returns Unimplemented.
func unsupported(ctx context.Context, method auth.Method, in request, check func() error) error {
	if _, err := auth.Admit(ctx, "/vmcontroller.v1.VolumeService/"+method, in.GetOrgId(), in.GetProjectId()); err != nil {
		return err
	}
	if err := check(); err != nil {
		return err
	}
	return rpc.Unimplemented(string(method))
}

// newVolume holds the fields that CreateVolumeRequest and RegisterExternalVolumeRequest have in common.
type newVolume interface {
	GetName() string
	GetSizeGib() uint64
	GetDriver() vmv1.VolumeDriverKind
	GetStorageClass() string
	GetMetadata() map[string]string
	GetLabels() map[string]string
}

func checkNew(in newVolume) error {
	if err := cloud.CheckName("name", in.GetName()); err != nil {
		return err
	}
	if err := checkSize(in.GetSizeGib()); err != nil {
		return err
	}
	if _, known := vmv1.VolumeDriverKind_name[int32(in.GetDriver())]; !known {
		return fault.Invalid("driver", "unknown value %d", in.GetDriver())
	}
	if len(in.GetStorageClass()) > 63 {
		return fault.Invalid("storage_class", "at most 63 bytes")
	}
	if err := cloud.CheckPairs("metadata", in.GetMetadata()); err != nil {
		return err
	}
	return cloud.CheckPairs("labels", in.GetLabels())
}

func checkSize(gib uint64) error {
	if gib < 1 || gib > cloud.MaxDiskGiB {
		return fault.Invalid("size_gib", "must be 1 to %d, got %d", cloud.MaxDiskGiB, gib)
	}
	return nil
}

func (server) CreateVolume(ctx context.Context, in *vmv1.CreateVolumeRequest) (*vmv1.Volume, error) {
	return nil, unsupported(ctx, "CreateVolume", in, func() error {
		if err := checkNew(in); err != nil {
			return err
		}
		if in.GetImageId() == "" {
			return nil
		}
		return cloud.CheckUUID("image_id", in.GetImageId())
	})
}

func (server) GetVolume(ctx context.Context, in *vmv1.GetVolumeRequest) (*vmv1.Volume, error) {
	return nil, unsupported(ctx, "GetVolume", in, func() error { return cloud.CheckUUID("volume_id", in.GetVolumeId()) })
}

func (server) ListVolumes(ctx context.Context, in *vmv1.ListVolumesRequest) (*vmv1.ListVolumesResponse, error) {
	return nil, unsupported(ctx, "ListVolumes", in, func() error {
		if n := in.GetPageSize(); n < 0 || n > cloud.MaxPage {
			return fault.Invalid("page_size", "must be 0 to %d, got %d", cloud.MaxPage, n)
		}
		if in.GetPageToken() != "" {
			return fault.Invalid("page_token", "is not one that this list gave")
		}
		return nil
	})
}

func (server) DeleteVolume(ctx context.Context, in *vmv1.DeleteVolumeRequest) (*emptypb.Empty, error) {
	return nil, unsupported(ctx, "DeleteVolume", in, func() error { return cloud.CheckUUID("volume_id", in.GetVolumeId()) })
}

func (server) ResizeVolume(ctx context.Context, in *vmv1.ResizeVolumeRequest) (*vmv1.Volume, error) {
	return nil, unsupported(ctx, "ResizeVolume", in, func() error {
		if err := cloud.CheckUUID("volume_id", in.GetVolumeId()); err != nil {
			return err
		}
		return checkSize(in.GetSizeGib())
	})
}

func (server) RegisterExternalVolume(ctx context.Context, in *vmv1.RegisterExternalVolumeRequest) (*vmv1.Volume, error) {
	return nil, unsupported(ctx, "RegisterExternalVolume", in, func() error {
		if err := checkNew(in); err != nil {
			return err
		}
		if in.GetRbd().GetPool() == "" || in.GetRbd().GetImage() == "" {
			return fault.Invalid("rbd", "names a pool and an image")
		}
		return nil
	})
}
