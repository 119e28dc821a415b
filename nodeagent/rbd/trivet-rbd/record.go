//go:build ceph

package main

import (
	"bytes"
	"context"

	"github.com/ceph/go-ceph/rados"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// maxRecord is the maximum length of a record in bytes.
const maxRecord = 64 << 10

// recordObject returns the name of the RADOS object with the record of an image.
func recordObject(image string) string { return "trivet.record." + image }

func (s *server) GetRecord(_ context.Context, in *rbdv1.GetRecordRequest) (*rbdv1.Record, error) {
	name := in.GetName().GetImage()
	if err := checkNames(name); err != nil {
		return nil, err
	}
	out := &rbdv1.Record{}
	return out, s.withPool(in.GetName().GetPool(), func(io *rados.IOContext) (err error) {
		out.Data, err = readRecord(io, name)
		return err
	})
}

// readRecord returns the record of an image, or nil if there is none.
func readRecord(io *rados.IOContext, image string) ([]byte, error) {
	data := make([]byte, maxRecord)
	n, err := io.Read(recordObject(image), data, 0)
	if isErrno(err, unix.ENOENT) {
		return nil, nil
	}
	return data[:n], wrap("read the record of image "+image, err)
}

func (s *server) SetRecord(_ context.Context, in *rbdv1.SetRecordRequest) (*emptypb.Empty, error) {
	name := in.GetName().GetImage()
	if err := checkNames(name); err != nil {
		return nil, err
	}
	switch longest := max(len(in.GetBefore()), len(in.GetAfter())); {
	case longest > maxRecord:
		return nil, status.Errorf(codes.InvalidArgument, "a record has at most %d bytes", maxRecord)
	case longest == 0:
		return nil, status.Error(codes.InvalidArgument, "before or after is required")
	}
	return &emptypb.Empty{}, s.withPool(in.GetName().GetPool(), func(io *rados.IOContext) error {
		err := replaceRecord(io, name, in.GetBefore(), in.GetAfter())
		if err == nil {
			return nil
		}
		now, readErr := readRecord(io, name)
		switch {
		case readErr != nil:
			return readErr
		case bytes.Equal(now, in.GetAfter()): // An earlier call has written the record.
			return nil
		case !bytes.Equal(now, in.GetBefore()):
			return status.Errorf(codes.Aborted, "the record of image %s has changed", name)
		}
		return wrap("write the record of image "+name, err)
	})
}

// replaceRecord replaces the record before by the record after in one atomic operation. The cluster refuses the
// operation if the object does not begin with before. If before is empty, the object must not exist. If after is empty,
// the object is deleted. The operation also succeeds in a full pool, because records are small, and because a volume
// cannot be deleted without a change of its record.
func replaceRecord(io *rados.IOContext, image string, before, after []byte) error {
	op := rados.CreateWriteOp()
	defer op.Release()
	switch {
	case len(before) == 0:
		op.Create(rados.CreateExclusive)
		op.WriteFull(after)
	case len(after) == 0:
		op.CmpExt(before, 0)
		op.Remove()
	default:
		op.CmpExt(before, 0)
		op.WriteFull(after)
	}
	return op.Operate(io, recordObject(image), rados.OperationFullForce)
}
