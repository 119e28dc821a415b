//go:build ceph

package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/ceph/go-ceph/rados"
	"github.com/ceph/go-ceph/rbd"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// maxData is the largest number of bytes in an Extent.
const maxData = 4 << 20

// partial is the end of the name of an image that ImportImage is writing.
const partial = ".partial"

func (s *server) ImportImage(in grpc.ClientStreamingServer[rbdv1.ImportImageRequest, emptypb.Empty]) error {
	first, err := in.Recv()
	if err != nil {
		return err
	}
	name, size := first.GetImage().GetName().GetImage(), first.GetImage().GetSize()
	if err := checkNames(name, name+partial); err != nil {
		return err
	}
	// An earlier call, whose agent has given up, can still be running.
	done, err := s.beginImport(in.Context(), first.GetImage().GetName())
	if err != nil {
		return err
	}
	defer done()
	err = s.withPool(first.GetImage().GetName().GetPool(), func(pool *rados.IOContext) error {
		if existing, err := rbd.OpenImageReadOnly(pool, name, rbd.NoSnapshot); err == nil {
			_ = existing.Close()
			return status.Errorf(codes.AlreadyExists, "image %s exists", name)
		}
		if err := remove(pool, name+partial); err != nil {
			return err
		}
		if err := create(pool, name+partial, size); err != nil {
			return wrap("create image "+name+partial, err)
		}
		if err := receive(in, pool, name+partial, size, first.GetExtent()); err != nil {
			return err
		}
		return wrap("rename image "+name+partial, rbd.GetImage(pool, name+partial).Rename(name))
	})
	if err != nil {
		return err
	}
	return in.SendAndClose(&emptypb.Empty{})
}

// beginImport waits until no other import of the image runs, and returns the function that ends this one.
func (s *server) beginImport(ctx context.Context, name *rbdv1.ImageName) (done func(), err error) {
	key := name.GetPool() + "/" + name.GetImage()
	for {
		s.mu.Lock()
		other, busy := s.importing[key]
		if !busy {
			mine := make(chan struct{})
			s.importing[key] = mine
			s.mu.Unlock()
			return func() {
				s.mu.Lock()
				defer s.mu.Unlock()
				delete(s.importing, key)
				close(mine)
			}, nil
		}
		s.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// receive writes the extents of a stream, the first of which has been read, to an image.
func receive(in grpc.ClientStreamingServer[rbdv1.ImportImageRequest, emptypb.Empty], pool *rados.IOContext,
	name string, size uint64, extent *rbdv1.Extent) error {
	image, err := rbd.OpenImage(pool, name, rbd.NoSnapshot)
	if err != nil {
		return wrap("open image "+name, err)
	}
	defer image.Close()
	for {
		data, offset := extent.GetData(), extent.GetOffset()
		if offset > size || uint64(len(data)) > size-offset || len(data) > maxData {
			return status.Errorf(codes.InvalidArgument, "%d bytes at offset %d: want at most %d, within the image's %d",
				len(data), offset, maxData, size)
		}
		if len(data) > 0 {
			if _, err := image.WriteAt(data, int64(offset)); err != nil {
				return wrap("write image "+name, err)
			}
		}
		message, err := in.Recv()
		if errors.Is(err, io.EOF) {
			return wrap("flush image "+name, image.Flush())
		}
		if err != nil {
			return err
		}
		if message.GetImage() != nil {
			return status.Error(codes.InvalidArgument, "only the first message may name the image")
		}
		extent = message.GetExtent()
	}
}

func (s *server) ExportImage(in *rbdv1.ExportImageRequest, out grpc.ServerStreamingServer[rbdv1.Extent]) error {
	name, snapshot := in.GetSnapshot().GetImage(), in.GetSnapshot().GetSnapshot()
	if err := checkNames(name.GetImage(), snapshot); err != nil {
		return err
	}
	if in.GetFromSnapshot() != "" {
		if err := checkNames(in.GetFromSnapshot()); err != nil {
			return err
		}
	}
	return s.withPool(name.GetPool(), func(pool *rados.IOContext) error {
		image, err := rbd.OpenImageReadOnly(pool, name.GetImage(), snapshot)
		if err != nil {
			return wrap("open snapshot "+snapshot+" of image "+name.GetImage(), err)
		}
		defer image.Close()
		return sendChanges(out.Context(), image, in, func(e extent) error { return send(image, e, out) })
	})
}

// exportWindow is the number of bytes of an image that are compared at once. An export keeps the extents of one window
// in memory. An extent takes 24 bytes of memory and describes at least 512 bytes of the image, so a window needs at
// most 192 MiB. exportWindow is a multiple of every object size.
const exportWindow = 4 << 30

// sendChanges calls send with each extent of the snapshot that is open as image, in the order of their offsets.
func sendChanges(ctx context.Context, image *rbd.Image, in *rbdv1.ExportImageRequest, send func(extent) error) error {
	name := in.GetSnapshot().GetImage().GetImage()
	size, err := image.GetSize()
	if err != nil {
		return wrap("open image "+name, err)
	}
	for at := in.GetOffset() / maxData * maxData; at < size; at += exportWindow {
		if err := ctx.Err(); err != nil {
			return status.FromContextError(err).Err()
		}
		extents, err := changes(image, in.GetFromSnapshot(), at, min(exportWindow, size-at))
		if err != nil {
			return wrap("compare snapshots of image "+name, err)
		}
		for _, e := range extents {
			if e.offset+e.length <= in.GetOffset() {
				continue
			}
			if err := send(e); err != nil {
				return wrap("read image "+name, err)
			}
		}
	}
	return nil
}

// extent is a range of bytes that changed between two snapshots. If exists is false, they became zero.
type extent struct {
	offset, length uint64
	exists         bool
}

// changes returns the extents within length bytes from the offset at that changed since the snapshot from. If from is
// empty, changes returns all extents there that exist.
func changes(image *rbd.Image, from string, at, length uint64) ([]extent, error) {
	var extents []extent
	err := image.DiffIterate(rbd.DiffIterateConfig{
		SnapName: from, Offset: at, Length: length, IncludeParent: rbd.IncludeParent, WholeObject: rbd.DisableWholeObject,
		Callback: func(offset, length uint64, exists int, _ interface{}) int {
			extents = append(extents, extent{offset, length, exists != 0})
			return 0
		},
	})
	return extents, err
}

// send sends an extent in messages of at most maxData bytes.
func send(image *rbd.Image, e extent, out grpc.ServerStreamingServer[rbdv1.Extent]) error {
	if !e.exists {
		return out.Send(&rbdv1.Extent{Offset: e.offset, Zeros: e.length})
	}
	for e.length > 0 {
		data := make([]byte, min(e.length, maxData))
		n, err := image.ReadAt(data, int64(e.offset))
		if err != nil && !errors.Is(err, io.EOF) || n == 0 {
			return errors.Join(fmt.Errorf("%d of %d bytes at offset %d", n, len(data), e.offset), err)
		}
		if err := out.Send(&rbdv1.Extent{Offset: e.offset, Data: data[:n]}); err != nil {
			return err
		}
		e.offset += uint64(n)
		e.length -= uint64(n)
	}
	return nil
}
