package image

import (
	"context"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// dataServer implements storage.v1.ImageDataService.
type dataServer struct {
	storagev1.UnsafeImageDataServiceServer
	s *Service
}

const (
	dataService = "/storage.v1.ImageDataService/"
	// maxPartsPage is the maximum number of parts that ListUploadedParts returns.
	maxPartsPage = 1000
)

func (r *dataServer) ListUploadedParts(ctx context.Context, in *storagev1.ListUploadedPartsRequest) (*storagev1.ListUploadedPartsResponse, error) {
	t, err := auth.Admit(ctx, dataService+"ListUploadedParts", in.GetOrgId(), "")
	if err != nil {
		return nil, err
	}
	size := int(in.GetPageSize())
	if size < 0 || size > maxPartsPage {
		return nil, fault.Invalid("page_size", "must be 0 to %d, got %d", maxPartsPage, size)
	}
	if size == 0 {
		size = maxPartsPage
	}
	list, more, err := r.s.Parts(ctx, refOf(t.Org, in), in.GetAfterPartNumber(), size)
	if err != nil {
		return nil, err
	}
	out := &storagev1.ListUploadedPartsResponse{More: more}
	for _, p := range list {
		out.Parts = append(out.Parts, &storagev1.UploadedPart{PartNumber: p.Number, SizeBytes: p.Size, Sha256: p.SHA256})
	}
	return out, nil
}

func (r *dataServer) DownloadImage(in *storagev1.DownloadImageRequest, stream storagev1.ImageDataService_DownloadImageServer) error {
	t, err := auth.Admit(stream.Context(), dataService+"DownloadImage", in.GetOrgId(), "")
	if err != nil {
		return err
	}
	return r.s.Download(stream.Context(), t.Org, cloud.ImageID(in.GetImageId()), in.GetOffset(), func(b []byte) error {
		return stream.Send(&storagev1.DownloadImageResponse{Data: b})
	})
}

func (r *dataServer) ListAllImages(ctx context.Context, in *storagev1.ListAllImagesRequest) (*storagev1.ListAllImagesResponse, error) {
	t, err := auth.AdmitAll(ctx, dataService+"ListAllImages", in)
	if err != nil {
		return nil, err
	}
	all, next, err := r.s.ListAll(ctx, t, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &storagev1.ListAllImagesResponse{NextPageToken: next}
	for _, i := range all {
		out.Images = append(out.Images, convert.Image(i))
	}
	return out, nil
}
