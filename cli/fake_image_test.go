package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// fakeImageData holds the bytes of uploaded images. Its mutex is that of the cloud.
type fakeImageData struct {
	storagev1.UnimplementedImageDataServiceServer
	cloud *fakeCloud
	// parts holds the parts of open uploads, by image ID and number, and content the bytes of complete images.
	parts   map[string]map[uint32][]byte
	content map[string][]byte
}

// fakePublisher answers requests for a list of checksums, at any host.
type fakePublisher struct{}

func (fakePublisher) RoundTrip(r *http.Request) (*http.Response, error) {
	a := httptest.NewRecorder()
	if path.Base(r.URL.Path) == "SHA256SUMS" {
		fmt.Fprintf(a, "%x *tiny.qcow2\n", sha256.Sum256(nil))
	} else {
		http.NotFound(a, r)
	}
	return a.Result(), nil
}

func (c *fakeCloud) BeginImageUpload(_ context.Context, in *vmv1.BeginImageUploadRequest) (*vmv1.BeginImageUploadResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := &vmv1.Image{
		Id: c.nextID(), Name: in.GetName(), OrgId: "default", Visibility: in.GetVisibility(), Format: in.GetFormat(),
		Metadata: in.GetMetadata(), Status: vmv1.ImageStatus_IMAGE_STATUS_PENDING, CreatedAt: now.UnixMilli(), UpdatedAt: now.UnixMilli(),
	}
	c.images = append(c.images, i)
	c.data.parts[i.GetId()] = map[uint32][]byte{}
	return &vmv1.BeginImageUploadResponse{Image: i, UploadSessionId: "session of " + i.GetId(), MinimumPartSizeBytes: 5 << 20}, nil
}

func (c *fakeCloud) UploadImagePart(_ context.Context, in *vmv1.UploadImagePartRequest) (*vmv1.UploadImagePartResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.data.parts[in.GetImageId()] == nil {
		return nil, failed(codes.NotFound, "", "no such upload")
	}
	c.data.parts[in.GetImageId()][in.GetPartNumber()] = in.GetBody()
	c.calls = append(c.calls, fmt.Sprintf("  part %d of %d bytes", in.GetPartNumber(), len(in.GetBody())))
	return &vmv1.UploadImagePartResponse{PartNumber: in.GetPartNumber(), CommittedSizeBytes: uint64(len(in.GetBody()))}, nil
}

// CompleteImageUpload joins the parts. The image gets the statuses in c.looks, one per call, or AVAILABLE.
func (c *fakeCloud) CompleteImageUpload(_ context.Context, in *vmv1.CompleteImageUploadRequest) (*vmv1.Image, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.images[slices.IndexFunc(c.images, func(i *vmv1.Image) bool { return i.GetId() == in.GetImageId() })]
	if parts := c.data.parts[i.GetId()]; parts != nil {
		var all []byte
		for _, n := range slices.Sorted(maps.Keys(parts)) {
			all = append(all, parts[n]...)
		}
		delete(c.data.parts, i.GetId())
		c.data.content[i.GetId()] = all
		i.SizeBytes, i.Checksum, i.Format = uint64(len(all)), fmt.Sprintf("sha256:%x", sha256.Sum256(all)), vmv1.ImageFormat_IMAGE_FORMAT_RAW
	}
	i.Status = vmv1.ImageStatus_IMAGE_STATUS_AVAILABLE
	if len(c.looks) > 0 {
		i.Status, c.looks = c.looks[0], c.looks[1:]
	}
	if i.GetStatus() == vmv1.ImageStatus_IMAGE_STATUS_ERROR {
		i.Metadata = map[string]string{"trivet/error": "it has a backing file"}
	}
	return i, nil
}

func (c *fakeCloud) AbortImageUpload(_ context.Context, in *vmv1.AbortImageUploadRequest) (*emptypb.Empty, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.data.parts, in.GetImageId())
	c.images = slices.DeleteFunc(c.images, func(i *vmv1.Image) bool { return i.GetId() == in.GetImageId() })
	return &emptypb.Empty{}, nil
}

// ListUploadedParts returns one part per page.
func (d *fakeImageData) ListUploadedParts(_ context.Context, in *storagev1.ListUploadedPartsRequest) (*storagev1.ListUploadedPartsResponse, error) {
	d.cloud.mu.Lock()
	defer d.cloud.mu.Unlock()
	parts := d.parts[in.GetImageId()]
	if d.content[in.GetImageId()] != nil {
		return nil, failed(codes.FailedPrecondition, "", "the upload is complete")
	}
	if parts == nil {
		return nil, failed(codes.NotFound, "", "no such upload")
	}
	out := &storagev1.ListUploadedPartsResponse{}
	for _, n := range slices.Sorted(maps.Keys(parts)) {
		if n <= in.GetAfterPartNumber() {
			continue
		}
		if len(out.GetParts()) == 1 {
			out.More = true
			break
		}
		out.Parts = append(out.Parts, &storagev1.UploadedPart{
			PartNumber: n, SizeBytes: uint64(len(parts[n])), Sha256: fmt.Sprintf("%x", sha256.Sum256(parts[n])),
		})
	}
	return out, nil
}

// DownloadImage sends the image in two pieces. A fault of DownloadImage "after" breaks the stream between them.
func (d *fakeImageData) DownloadImage(in *storagev1.DownloadImageRequest, stream grpc.ServerStreamingServer[storagev1.DownloadImageResponse]) error {
	d.cloud.mu.Lock()
	rest := d.content[in.GetImageId()][in.GetOffset():]
	d.cloud.calls = append(d.cloud.calls, fmt.Sprintf("  from %d", in.GetOffset()))
	d.cloud.mu.Unlock()
	half := len(rest) / 2
	if err := stream.Send(&storagev1.DownloadImageResponse{Data: rest[:half]}); err != nil {
		return err
	}
	if err := d.cloud.fault("", "DownloadImage", true); err != nil {
		return err
	}
	return stream.Send(&storagev1.DownloadImageResponse{Data: rest[half:]})
}

// ListAllImages lists the images for the administrator, all on one page.
func (d *fakeImageData) ListAllImages(ctx context.Context, _ *storagev1.ListAllImagesRequest) (*storagev1.ListAllImagesResponse, error) {
	if bearer(ctx) != adminToken {
		return nil, failed(codes.PermissionDenied, "", "only system:admin may ListAllImages")
	}
	d.cloud.mu.Lock()
	defer d.cloud.mu.Unlock()
	return &storagev1.ListAllImagesResponse{Images: slices.Clone(d.cloud.images)}, nil
}
