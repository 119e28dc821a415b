package image

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Register registers ImageService for API callers.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	vmv1.RegisterImageServiceServer(g, &server{s: s})
}

type server struct {
	vmv1.UnsafeImageServiceServer
	s *Service
}

// toProto converts an image to the response for a caller of org. Only the image's own org sees the list of orgs that
// the image is shared with.
func toProto(i *cloud.Image, org cloud.OrgID) *vmv1.Image {
	out := convert.Image(i)
	if i.Org != org {
		delete(out.Metadata, cloud.SharedWith)
	}
	return out
}

const service = "/vmcontroller.v1.ImageService/"

func admit(ctx context.Context, method auth.Method, org string) (cloud.OrgID, error) {
	t, err := auth.Admit(ctx, service+method, org, "")
	return t.Org, err
}

func (r *server) CreateImage(ctx context.Context, in *vmv1.CreateImageRequest) (*vmv1.Image, error) {
	org, err := admit(ctx, "CreateImage", in.GetOrgId())
	if err != nil {
		return nil, err
	}
	i := convert.ImageFrom(in)
	i.Org = org
	out, err := r.s.Create(ctx, i, rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return convert.Image(&out.Image), nil
}

func (r *server) GetImage(ctx context.Context, in *vmv1.GetImageRequest) (*vmv1.Image, error) {
	org, err := admit(ctx, "GetImage", in.GetOrgId())
	if err != nil {
		return nil, err
	}
	i, err := r.s.Get(ctx, org, cloud.ImageID(in.GetImageId()))
	if err != nil {
		return nil, err
	}
	return toProto(i, org), nil
}

func (r *server) ListImages(ctx context.Context, in *vmv1.ListImagesRequest) (*vmv1.ListImagesResponse, error) {
	org, err := admit(ctx, "ListImages", in.GetOrgId())
	if err != nil {
		return nil, err
	}
	list, next, err := r.s.List(ctx, org, in.GetIncludePublic(), in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &vmv1.ListImagesResponse{NextPageToken: next}
	for _, i := range list {
		out.Images = append(out.Images, toProto(i, org))
	}
	return out, nil
}

func (r *server) UpdateImage(ctx context.Context, in *vmv1.UpdateImageRequest) (*vmv1.Image, error) {
	org, err := admit(ctx, "UpdateImage", in.GetOrgId())
	if err != nil {
		return nil, err
	}
	i, err := r.s.Update(ctx, org, cloud.ImageID(in.GetImageId()), in.GetName(), convert.Visibility(in.GetVisibility()), in.GetMetadata())
	if err != nil {
		return nil, err
	}
	return convert.Image(&i), nil
}

func (r *server) DeleteImage(ctx context.Context, in *vmv1.DeleteImageRequest) (*emptypb.Empty, error) {
	org, err := admit(ctx, "DeleteImage", in.GetOrgId())
	if err != nil {
		return nil, err
	}
	if err := r.s.Delete(ctx, org, cloud.ImageID(in.GetImageId()), rpc.BodyHash(in)); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}

func (r *server) BeginImageUpload(ctx context.Context, in *vmv1.BeginImageUploadRequest) (*vmv1.BeginImageUploadResponse, error) {
	if _, err := admit(ctx, "BeginImageUpload", in.GetOrgId()); err != nil {
		return nil, err
	}
	i := convert.ImageFrom(&vmv1.CreateImageRequest{
		Name: in.GetName(), Visibility: in.GetVisibility(), Format: in.GetFormat(), OsType: in.GetOsType(), OsVersion: in.GetOsVersion(),
		Architecture: in.GetArchitecture(), MinDiskGib: in.GetMinDiskGib(), MinMemoryMib: in.GetMinMemoryMib(), Metadata: in.GetMetadata(),
	})
	if err := i.Check(); err != nil {
		return nil, err
	}
	return nil, rpc.Unimplemented("BeginImageUpload")
}

// checkUploadIDs checks the image ID and the upload session ID of an upload call.
func checkUploadIDs(image, id string) error {
	if err := cloud.CheckUUID("image_id", image); err != nil {
		return err
	}
	if id == "" {
		return fault.Invalid("upload_session_id", "is required")
	}
	return nil
}

func (r *server) UploadImagePart(ctx context.Context, in *vmv1.UploadImagePartRequest) (*vmv1.UploadImagePartResponse, error) {
	if _, err := admit(ctx, "UploadImagePart", in.GetOrgId()); err != nil {
		return nil, err
	}
	if err := checkUploadIDs(in.GetImageId(), in.GetUploadSessionId()); err != nil {
		return nil, err
	}
	if n := in.GetPartNumber(); n < 1 || n > 10_000 {
		return nil, fault.Invalid("part_number", "must be 1 to 10000, got %d", n)
	}
	return nil, rpc.Unimplemented("UploadImagePart")
}

func (r *server) CompleteImageUpload(ctx context.Context, in *vmv1.CompleteImageUploadRequest) (*vmv1.Image, error) {
	if _, err := admit(ctx, "CompleteImageUpload", in.GetOrgId()); err != nil {
		return nil, err
	}
	if err := checkUploadIDs(in.GetImageId(), in.GetUploadSessionId()); err != nil {
		return nil, err
	}
	return nil, rpc.Unimplemented("CompleteImageUpload")
}

func (r *server) AbortImageUpload(ctx context.Context, in *vmv1.AbortImageUploadRequest) (*emptypb.Empty, error) {
	if _, err := admit(ctx, "AbortImageUpload", in.GetOrgId()); err != nil {
		return nil, err
	}
	if err := checkUploadIDs(in.GetImageId(), in.GetUploadSessionId()); err != nil {
		return nil, err
	}
	return nil, rpc.Unimplemented("AbortImageUpload")
}
