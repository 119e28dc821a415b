//go:build ceph

package main

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/ceph/go-ceph/rados"
	"github.com/ceph/go-ceph/rbd"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// features are the RBD features of new images: clones, one writer at a time, and the maps with which usage and
// differences are cheap to compute.
const features = rbd.FeatureLayering | rbd.FeatureExclusiveLock | rbd.FeatureObjectMap | rbd.FeatureFastDiff

// newImageOptions returns the options for new images. The caller destroys them.
func newImageOptions() (*rbd.ImageOptions, error) {
	options := rbd.NewRbdImageOptions()
	if err := options.SetUint64(rbd.ImageOptionFeatures, features); err != nil {
		options.Destroy()
		return nil, err
	}
	return options, nil
}

func (s *server) CreateImage(_ context.Context, in *rbdv1.CreateImageRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, s.withPool(in.GetName().GetPool(), func(io *rados.IOContext) error {
		err := create(io, in.GetName().GetImage(), in.GetSize())
		if !isErrno(err, unix.EEXIST) {
			return wrap("create image "+in.GetName().GetImage(), err)
		}
		return s.withImage(in.GetName(), func(_ *rados.IOContext, image *rbd.Image) error {
			size, err := image.GetSize()
			if err == nil && size != in.GetSize() {
				return status.Errorf(codes.AlreadyExists, "image %s has %d bytes", in.GetName().GetImage(), size)
			}
			return wrap("read the size of image "+in.GetName().GetImage(), err)
		})
	})
}

// create creates an image in a pool.
func create(io *rados.IOContext, name string, size uint64) error {
	if err := checkNames(name); err != nil {
		return err
	}
	options, err := newImageOptions()
	if err != nil {
		return err
	}
	defer options.Destroy()
	return rbd.CreateImage(io, name, size, options)
}

// CloneImage waits for an earlier call with the same image and snapshot, and returns its result. The earlier call can run
// on after its caller has given up. librbd first creates the image and then sets its parent, so that the image is no clone
// of the snapshot meanwhile.
func (s *server) CloneImage(_ context.Context, in *rbdv1.CloneImageRequest) (*emptypb.Empty, error) {
	_, err, _ := s.clones.Do(cloneKey(in), func() (any, error) { return nil, s.cloneImage(in) })
	return &emptypb.Empty{}, err
}

// cloneKey returns a key for in. Requests that clone the same snapshot to the same image have the same key.
func cloneKey(in *rbdv1.CloneImageRequest) string {
	of := in.GetParent()
	return strings.Join([]string{
		in.GetName().GetPool(), in.GetName().GetImage(), of.GetImage().GetPool(), of.GetImage().GetImage(), of.GetSnapshot(),
	}, "/")
}

func (s *server) cloneImage(in *rbdv1.CloneImageRequest) error {
	parent, name := in.GetParent(), in.GetName().GetImage()
	if err := checkNames(parent.GetImage().GetImage(), parent.GetSnapshot(), name); err != nil {
		return err
	}
	options, err := newImageOptions()
	if err != nil {
		return wrap("clone image "+name, err)
	}
	defer options.Destroy()
	return s.withPool(in.GetName().GetPool(), func(io *rados.IOContext) error {
		return s.withImage(parent.GetImage(), func(parentIO *rados.IOContext, image *rbd.Image) error {
			protected, err := image.GetSnapshot(parent.GetSnapshot()).IsProtected()
			if err != nil {
				return wrap("open snapshot "+parent.GetSnapshot(), err)
			}
			if !protected {
				return status.Errorf(codes.FailedPrecondition, "snapshot %s is not protected", parent.GetSnapshot())
			}
			err = rbd.CloneImage(parentIO, parent.GetImage().GetImage(), parent.GetSnapshot(), io, name, options)
			if isErrno(err, unix.EEXIST) {
				return s.checkClone(in)
			}
			return wrap("clone image "+name, err)
		})
	})
}

// checkClone returns an AlreadyExists error unless the image is a clone of the snapshot.
func (s *server) checkClone(in *rbdv1.CloneImageRequest) error {
	return s.withImage(in.GetName(), func(_ *rados.IOContext, image *rbd.Image) error {
		parent, err := parentOf(image)
		if err != nil {
			return err
		}
		want := in.GetParent()
		if parent.GetImage().GetPool() == want.GetImage().GetPool() && parent.GetSnapshot() == want.GetSnapshot() &&
			parent.GetImage().GetImage() == want.GetImage().GetImage() {
			return nil
		}
		return status.Errorf(codes.AlreadyExists, "image %s exists and is no clone of that snapshot", in.GetName().GetImage())
	})
}

// parentOf returns the snapshot that an image is a clone of, or nil if it is no clone.
func parentOf(image *rbd.Image) (*rbdv1.SnapshotName, error) {
	parent, err := image.GetParent()
	if isErrno(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, wrap("read the parent", err)
	}
	return &rbdv1.SnapshotName{
		Image:    &rbdv1.ImageName{Pool: parent.Image.PoolName, Image: parent.Image.ImageName},
		Snapshot: parent.Snap.SnapName,
	}, nil
}

func (s *server) GetImage(_ context.Context, in *rbdv1.GetImageRequest) (*rbdv1.Image, error) {
	out := &rbdv1.Image{}
	if err := checkNames(in.GetName().GetImage()); err != nil {
		return nil, err
	}
	err := s.withPool(in.GetName().GetPool(), func(io *rados.IOContext) error {
		// An image that is open read-only has no watcher.
		image, err := rbd.OpenImageReadOnly(io, in.GetName().GetImage(), rbd.NoSnapshot)
		if err != nil {
			return wrap("open image "+in.GetName().GetImage(), err)
		}
		defer image.Close()
		own, err := s.cluster()
		if err != nil {
			return err
		}
		err = read(image, in.GetUsage(), own.GetInstanceID(), out)
		if err == nil && in.GetClones() {
			err = findClones(io, in.GetName().GetImage(), out.Snapshots)
		}
		return wrap("read image "+in.GetName().GetImage(), err)
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// read fills out with the properties of an image. The parameter own is the id of this helper's client.
func read(image *rbd.Image, usage bool, own uint64, out *rbdv1.Image) error {
	var err error
	if out.Size, err = image.GetSize(); err != nil {
		return err
	}
	has, err := image.GetFeatures()
	if err != nil {
		return err
	}
	out.ExclusiveLock = has&rbd.FeatureExclusiveLock != 0
	if out.Parent, err = parentOf(image); err != nil {
		return err
	}
	snapshots, err := image.GetSnapshotNames()
	if err != nil {
		return err
	}
	for _, s := range snapshots {
		protected, err := image.GetSnapshot(s.Name).IsProtected()
		if err != nil {
			return err
		}
		out.Snapshots = append(out.Snapshots, &rbdv1.Snapshot{Name: s.Name, Size: s.Size, Protected: protected})
	}
	watchers, err := image.ListWatchers()
	if err != nil {
		return err
	}
	for _, w := range watchers {
		if uint64(w.Id) != own { // another call of this helper changes the image, for example FlattenImage
			out.Clients = append(out.Clients, w.Addr)
		}
	}
	if !usage {
		return nil
	}
	return image.DiffIterate(rbd.DiffIterateConfig{
		Length: out.Size, IncludeParent: rbd.ExcludeParent, WholeObject: rbd.EnableWholeObject,
		Callback: func(_, length uint64, exists int, _ interface{}) int {
			if exists != 0 {
				out.UsedBytes += length
			}
			return 0
		},
	})
}

// findClones sets the field Cloned of the snapshots of an image.
func findClones(io *rados.IOContext, name string, snapshots []*rbdv1.Snapshot) error {
	for _, s := range snapshots {
		image, err := rbd.OpenImageReadOnly(io, name, s.GetName())
		if err != nil {
			return err
		}
		_, clones, err := image.ListChildren()
		if err := errors.Join(err, image.Close()); err != nil {
			return err
		}
		s.Cloned = len(clones) > 0
	}
	return nil
}

func (s *server) ListImages(_ context.Context, in *rbdv1.ListImagesRequest) (*rbdv1.ListImagesResponse, error) {
	out := &rbdv1.ListImagesResponse{}
	return out, s.withPool(in.GetPool(), func(io *rados.IOContext) error {
		var err error
		out.Images, err = rbd.GetImageNames(io)
		slices.Sort(out.Images)
		out.Images = slices.Compact(out.Images) // librbd also lists images in the trash whose deletion was interrupted
		return wrap("list the images of pool "+in.GetPool(), err)
	})
}

func (s *server) ResizeImage(_ context.Context, in *rbdv1.ResizeImageRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, s.withImage(in.GetName(), func(_ *rados.IOContext, image *rbd.Image) error {
		size, err := image.GetSize()
		switch {
		case err != nil || size == in.GetSize():
			return wrap("read the size of image "+in.GetName().GetImage(), err)
		case size > in.GetSize():
			return status.Errorf(codes.FailedPrecondition, "image %s has %d bytes and cannot shrink", in.GetName().GetImage(), size)
		}
		return wrap("resize image "+in.GetName().GetImage(), image.Resize(in.GetSize()))
	})
}

func (s *server) FlattenImage(_ context.Context, in *rbdv1.FlattenImageRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, s.withImage(in.GetName(), func(_ *rados.IOContext, image *rbd.Image) error {
		if parent, err := parentOf(image); err != nil || parent == nil {
			return err
		}
		return wrap("flatten image "+in.GetName().GetImage(), image.Flatten())
	})
}

func (s *server) RemoveImage(_ context.Context, in *rbdv1.RemoveImageRequest) (*emptypb.Empty, error) {
	if err := checkNames(in.GetName().GetImage()); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, s.withPool(in.GetName().GetPool(), func(io *rados.IOContext) error {
		return remove(io, in.GetName().GetImage())
	})
}

// maxSameName is the maximum number of images with the same name that one call of remove deletes.
const maxSameName = 100

// remove deletes an image of a pool, if there is one. librbd moves an image to the trash before it deletes the image. If
// that was interrupted, an image in the trash and a new image can have the same name, so remove deletes all of them.
func remove(io *rados.IOContext, name string) error {
	return removeAll(name, func() error { return rbd.RemoveImage(io, name) })
}

// removeAll calls removeOne, which deletes one image, until no image with the name is left, but at most maxSameName
// times. If the last call also deleted an image, removeAll returns an Aborted error, and the caller may repeat the
// call.
func removeAll(name string, removeOne func() error) error {
	for range maxSameName {
		err := removeOne()
		if isErrno(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return wrap("delete image "+name, err)
		}
	}
	return status.Errorf(codes.Aborted, "delete image %s: after %d deletions an image still has this name", name, maxSameName)
}
