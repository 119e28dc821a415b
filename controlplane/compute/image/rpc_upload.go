package image

import (
	"context"

	"google.golang.org/protobuf/types/known/emptypb"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

func (r *server) BeginImageUpload(ctx context.Context, in *vmv1.BeginImageUploadRequest) (*vmv1.BeginImageUploadResponse, error) {
	org, err := admit(ctx, "BeginImageUpload", in.GetOrgId())
	if err != nil {
		return nil, err
	}
	i := convert.ImageFrom(&vmv1.CreateImageRequest{
		Name: in.GetName(), Visibility: in.GetVisibility(), Format: in.GetFormat(), OsType: in.GetOsType(), OsVersion: in.GetOsVersion(),
		Architecture: in.GetArchitecture(), MinDiskGib: in.GetMinDiskGib(), MinMemoryMib: in.GetMinMemoryMib(), Metadata: in.GetMetadata(),
	})
	i.Org = org
	out, err := r.s.BeginUpload(ctx, i, rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return &vmv1.BeginImageUploadResponse{
		Image: convert.Image(&out.Image), UploadSessionId: out.Image.Upload.ID, MinimumPartSizeBytes: MinPartBytes,
	}, nil
}

// uploadCall is implemented by the requests that name an upload session.
type uploadCall interface {
	GetImageId() string
	GetUploadSessionId() string
}

func refOf(org cloud.OrgID, in uploadCall) UploadRef {
	return UploadRef{Org: org, Image: cloud.ImageID(in.GetImageId()), Session: in.GetUploadSessionId()}
}

func (r *server) UploadImagePart(ctx context.Context, in *vmv1.UploadImagePartRequest) (*vmv1.UploadImagePartResponse, error) {
	org, err := admit(ctx, "UploadImagePart", in.GetOrgId())
	if err != nil {
		return nil, err
	}
	size, err := r.s.UploadPart(ctx, refOf(org, in), in.GetPartNumber(), in.GetBody())
	if err != nil {
		return nil, err
	}
	return &vmv1.UploadImagePartResponse{PartNumber: in.GetPartNumber(), CommittedSizeBytes: size}, nil
}

func (r *server) CompleteImageUpload(ctx context.Context, in *vmv1.CompleteImageUploadRequest) (*vmv1.Image, error) {
	org, err := admit(ctx, "CompleteImageUpload", in.GetOrgId())
	if err != nil {
		return nil, err
	}
	i, err := r.s.CompleteUpload(ctx, refOf(org, in))
	if err != nil {
		return nil, err
	}
	return toProto(i, org), nil
}

func (r *server) AbortImageUpload(ctx context.Context, in *vmv1.AbortImageUploadRequest) (*emptypb.Empty, error) {
	org, err := admit(ctx, "AbortImageUpload", in.GetOrgId())
	if err != nil {
		return nil, err
	}
	u := refOf(org, in)
	if err := u.check(); err != nil {
		return nil, err
	}
	if _, err := r.s.AbortUpload(ctx, u, rpc.BodyHash(in)); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, nil
}
