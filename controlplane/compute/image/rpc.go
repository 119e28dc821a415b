package image

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

// Register registers ImageService and ImageDataService for API callers.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	storagev1.RegisterImageDataServiceServer(g, &dataServer{s: s})
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
