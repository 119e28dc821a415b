package volume

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// fakeRBD is a Ceph cluster in memory with one image, which no client has open.
type fakeRBD struct {
	rbdv1.RbdServiceClient
	record []byte
	size   uint64
}

func (f *fakeRBD) GetRecord(context.Context, *rbdv1.GetRecordRequest, ...grpc.CallOption) (*rbdv1.Record, error) {
	return &rbdv1.Record{Data: f.record}, nil
}

func (f *fakeRBD) SetRecord(
	_ context.Context, in *rbdv1.SetRecordRequest, _ ...grpc.CallOption,
) (*emptypb.Empty, error) {
	if !bytes.Equal(f.record, in.GetBefore()) {
		return nil, status.Error(codes.Aborted, "the record has changed")
	}
	f.record = in.GetAfter()
	return &emptypb.Empty{}, nil
}

func (f *fakeRBD) GetImage(context.Context, *rbdv1.GetImageRequest, ...grpc.CallOption) (*rbdv1.Image, error) {
	if f.size == 0 {
		return nil, status.Error(codes.NotFound, "open image")
	}
	return &rbdv1.Image{Size: f.size}, nil
}

func (f *fakeRBD) CreateImage(
	_ context.Context, in *rbdv1.CreateImageRequest, _ ...grpc.CallOption,
) (*emptypb.Empty, error) {
	f.size = in.GetSize()
	return &emptypb.Empty{}, nil
}

// TestAttachmentEndsWhileQEMUOpens ends an attachment after Open has returned, and before QEMU has opened the RBD
// image. The cluster sees no client meanwhile, so the attachment of the next VM begins. Confirm must tell the first
// VM, whose QEMU has opened the image then, that it must not write.
func TestAttachmentEndsWhileQEMUOpens(t *testing.T) {
	ctx := t.Context()
	p := NewRBDPool(RBDOptions{Client: &fakeRBD{}, Pool: "pool", User: "user", Key: "key"})
	require.NoError(t, p.Create(ctx, Volume{ID: id(1), Size: 64 * mib}))
	first, second := Attachment{VM: "one", Generation: 1}, Attachment{VM: "two", Generation: 2}
	_, err := p.Open(ctx, id(1), first)
	require.NoError(t, err)
	require.NoError(t, p.Confirm(ctx, id(1), first))
	require.NoError(t, p.Detach(ctx, id(1), 1))
	require.ErrorIs(t, p.Confirm(ctx, id(1), first), ErrStale, "it was detached")
	_, err = p.Open(ctx, id(1), second)
	require.NoError(t, err)
	require.ErrorIs(t, p.Confirm(ctx, id(1), first), ErrStale, "another VM has the image")
	require.NoError(t, p.Confirm(ctx, id(1), second))
	require.ErrorIs(t, p.Confirm(ctx, id(1), Attachment{VM: "two", Generation: 3}), ErrStale, "it was not opened")
	require.NoError(t, p.Release(ctx, id(1), second))
	require.ErrorIs(t, p.Confirm(ctx, id(1), second), ErrStale, "it was released")
	require.ErrorIs(t, p.Confirm(ctx, id(2), second), ErrStale)
}
