//go:build ceph

package main

import (
	"context"

	"github.com/ceph/go-ceph/rados"
	"github.com/ceph/go-ceph/rbd"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/emptypb"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

func (s *server) CreateSnapshot(_ context.Context, in *rbdv1.CreateSnapshotRequest) (*emptypb.Empty, error) {
	name := in.GetName().GetSnapshot()
	if err := checkNames(name); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, s.withImage(in.GetName().GetImage(), func(_ *rados.IOContext, image *rbd.Image) error {
		_, err := image.CreateSnapshot(name)
		if err != nil && !isErrno(err, unix.EEXIST) {
			return wrap("create snapshot "+name, err)
		}
		if !in.GetProtect() {
			return nil
		}
		snapshot := image.GetSnapshot(name)
		protected, err := snapshot.IsProtected()
		if err != nil || protected {
			return wrap("open snapshot "+name, err)
		}
		return wrap("protect snapshot "+name, snapshot.Protect())
	})
}

func (s *server) RemoveSnapshot(_ context.Context, in *rbdv1.RemoveSnapshotRequest) (*emptypb.Empty, error) {
	name := in.GetName().GetSnapshot()
	if err := checkNames(name); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, s.withImage(in.GetName().GetImage(), func(_ *rados.IOContext, image *rbd.Image) error {
		snapshot := image.GetSnapshot(name)
		protected, err := snapshot.IsProtected()
		if isErrno(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return wrap("open snapshot "+name, err)
		}
		if protected {
			if err := snapshot.Unprotect(); err != nil {
				return wrap("end the protection of snapshot "+name+", which may have clones", err)
			}
		}
		return wrap("delete snapshot "+name, snapshot.Remove())
	})
}
