package volume

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// fakeRBD is a Ceph cluster in memory with one image.
type fakeRBD struct {
	rbdv1.RbdServiceClient
	record  []byte            // of the image
	deleted map[string][]byte // the lists of deleted volumes, by the names of the records
	size    uint64
	clients []string // those that have the image open, as the cluster knows them
	blocked []string
	// onBlock is called before clients are blocked; nil does nothing.
	onBlock func()
}

func (f *fakeRBD) GetRecord(_ context.Context, in *rbdv1.GetRecordRequest, _ ...grpc.CallOption) (*rbdv1.Record, error) {
	switch name := in.GetName().GetImage(); {
	case strings.HasPrefix(name, deletionsPrefix):
		return &rbdv1.Record{Data: f.deleted[name]}, nil
	case strings.HasSuffix(name, ".import"):
		return &rbdv1.Record{}, nil
	}
	return &rbdv1.Record{Data: f.record}, nil
}

func (f *fakeRBD) SetRecord(
	_ context.Context, in *rbdv1.SetRecordRequest, _ ...grpc.CallOption,
) (*emptypb.Empty, error) {
	name := in.GetName().GetImage()
	list := strings.HasPrefix(name, deletionsPrefix)
	have := f.record
	if list {
		have = f.deleted[name]
	}
	if !bytes.Equal(have, in.GetBefore()) {
		return nil, status.Error(codes.Aborted, "the record has changed")
	}
	switch {
	case !list:
		f.record = in.GetAfter()
	case f.deleted == nil:
		f.deleted = map[string][]byte{name: in.GetAfter()}
	default:
		f.deleted[name] = in.GetAfter()
	}
	return &emptypb.Empty{}, nil
}

func (f *fakeRBD) GetImage(context.Context, *rbdv1.GetImageRequest, ...grpc.CallOption) (*rbdv1.Image, error) {
	if f.size == 0 {
		return nil, status.Error(codes.NotFound, "open image")
	}
	return &rbdv1.Image{Size: f.size, Clients: f.clients}, nil
}

func (f *fakeRBD) BlockClients(
	_ context.Context, in *rbdv1.BlockClientsRequest, _ ...grpc.CallOption,
) (*emptypb.Empty, error) {
	if f.onBlock != nil {
		f.onBlock()
	}
	f.blocked = append(f.blocked, in.GetClients()...)
	return &emptypb.Empty{}, nil
}

func (f *fakeRBD) CreateImage(
	_ context.Context, in *rbdv1.CreateImageRequest, _ ...grpc.CallOption,
) (*emptypb.Empty, error) {
	f.size = in.GetSize()
	return &emptypb.Empty{}, nil
}

func (f *fakeRBD) RemoveImage(
	_ context.Context, in *rbdv1.RemoveImageRequest, _ ...grpc.CallOption,
) (*emptypb.Empty, error) {
	if !strings.HasSuffix(in.GetName().GetImage(), ".partial") {
		f.size = 0
	}
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

// TestFenceBlocksRecordedClients fences a volume whose process the Ceph cluster has forgotten, because the host of the
// process was cut off. The process could write when its host is connected again, so it must be blocked.
func TestFenceBlocksRecordedClients(t *testing.T) {
	ctx := t.Context()
	fake := &fakeRBD{}
	p := NewRBDPool(RBDOptions{Client: fake, Pool: "pool", User: "user", Key: "key"})
	require.NoError(t, p.Fence(ctx, id(1), 1), "a volume that does not exist")
	require.NoError(t, p.Create(ctx, Volume{ID: id(1), Size: 64 * mib}))
	first := Attachment{VM: "one", Generation: 1}
	_, err := p.Open(ctx, id(1), first)
	require.NoError(t, err)
	fake.clients = []string{"192.0.2.1:0/1"}
	require.NoError(t, p.Confirm(ctx, id(1), first))
	require.NoError(t, p.Confirm(ctx, id(1), first), "a repeated call")
	fake.clients = []string{"192.0.2.1:0/2"} // not confirmed

	fake.onBlock = func() {
		status, err := p.Status(ctx, id(1))
		require.NoError(t, err)
		require.Zero(t, status.Flushed, "the next attachment must not begin before the clients are blocked")
		require.ErrorIs(t, p.Confirm(ctx, id(1), first), ErrStale, "a process that opens the image now would not be blocked")
	}
	require.NoError(t, p.Fence(ctx, id(1), 2))
	require.Equal(t, []string{"192.0.2.1:0/1", "192.0.2.1:0/2"}, fake.blocked)
	status, err := p.Status(ctx, id(1))
	require.NoError(t, err)
	require.EqualValues(t, 2, status.Flushed)
	_, err = p.Open(ctx, id(1), first)
	require.ErrorIs(t, err, ErrStale)

	fake.clients = nil
	next := Attachment{VM: "two", Generation: 3}
	_, err = p.Open(ctx, id(1), next)
	require.NoError(t, err)
	fake.clients = []string{"192.0.2.2:0/3"}
	require.NoError(t, p.Confirm(ctx, id(1), next))
	require.ErrorIs(t, p.Fence(ctx, id(1), 2), ErrStale, "an old request to fence")
	require.Len(t, fake.blocked, 2, "the process of a later attachment must not be blocked")
}
