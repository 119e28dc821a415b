package storageclass

import (
	"context"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

// Register registers StorageClassService for API callers.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	storagev1.RegisterStorageClassServiceServer(g, &server{s: s})
}

type server struct {
	storagev1.UnsafeStorageClassServiceServer
	s *Service
}

const service = "/storage.v1.StorageClassService/"

// admit authorizes a call without an org and a project, because storage classes belong to no tenant.
func admit(ctx context.Context, method auth.Method) error {
	_, err := auth.Admit(ctx, service+method, "", "")
	return err
}

// toProto returns a class as the message of the API. The message does not contain the key of the Ceph user.
func toProto(c *cloud.StorageClass) *storagev1.StorageClass {
	out := &storagev1.StorageClass{
		Name: c.Name, Driver: vmv1.VolumeDriverKind(c.Driver), IsDefault: c.Default, Pool: c.Pool, MaxIops: c.Limits.IOPS,
		MaxBytesPerSecond: c.Limits.BytesPerSecond, CreatedAt: c.CreatedAt, UpdatedAt: c.UpdatedAt,
		Encrypted: c.Encrypted, Description: c.Description,
	}
	if p := c.RBD; p != nil {
		out.Rbd = &storagev1.RbdPool{Fsid: p.FSID, Monitors: p.Monitors, Pool: p.Pool, User: p.User}
	}
	return out
}

// respond converts the result of a change to its response.
func respond(ctx context.Context, out Result, err error) (*storagev1.StorageClass, error) {
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return toProto(&out.Class), nil
}

func (r *server) CreateStorageClass(ctx context.Context, in *storagev1.CreateStorageClassRequest) (*storagev1.StorageClass, error) {
	if err := admit(ctx, "CreateStorageClass"); err != nil {
		return nil, err
	}
	c := cloud.StorageClass{
		Name: in.GetName(), Driver: convert.VolumeDriver(in.GetDriver()), Default: in.GetIsDefault(), Pool: in.GetPool(),
		Limits:    cloud.Limits{IOPS: in.GetMaxIops(), BytesPerSecond: in.GetMaxBytesPerSecond()},
		Encrypted: in.GetEncrypted(), Description: in.GetDescription(),
	}
	if p := in.GetRbd(); p != nil {
		c.RBD = &cloud.RBDPool{FSID: p.GetFsid(), Monitors: slices.Clone(p.GetMonitors()), Pool: p.GetPool(), User: p.GetUser()}
	}
	out, err := r.s.Create(ctx, c, in.GetRbd().GetKey(), rpc.BodyHash(in))
	return respond(ctx, out, err)
}

func (r *server) GetStorageClass(ctx context.Context, in *storagev1.GetStorageClassRequest) (*storagev1.StorageClass, error) {
	if err := admit(ctx, "GetStorageClass"); err != nil {
		return nil, err
	}
	c, err := r.s.Get(ctx, in.GetName())
	if err != nil {
		return nil, err
	}
	return toProto(c), nil
}

func (r *server) ListStorageClasses(ctx context.Context, in *storagev1.ListStorageClassesRequest) (*storagev1.ListStorageClassesResponse, error) {
	if err := admit(ctx, "ListStorageClasses"); err != nil {
		return nil, err
	}
	all, next, err := r.s.List(ctx, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &storagev1.ListStorageClassesResponse{NextPageToken: next}
	for _, c := range all {
		out.StorageClasses = append(out.StorageClasses, toProto(c))
	}
	return out, nil
}

func (r *server) UpdateStorageClass(ctx context.Context, in *storagev1.UpdateStorageClassRequest) (*storagev1.StorageClass, error) {
	if err := admit(ctx, "UpdateStorageClass"); err != nil {
		return nil, err
	}
	u := cloud.ClassUpdate{
		Default: in.IsDefault, Description: in.Description, IOPS: in.MaxIops, BytesPerSecond: in.MaxBytesPerSecond,
		Monitors: slices.Clone(in.GetRbd().GetMonitors()), User: in.GetRbd().GetUser(),
	}
	out, err := r.s.Update(ctx, in.GetName(), u, in.GetRbd().GetKey(), rpc.BodyHash(in))
	return respond(ctx, out, err)
}

func (r *server) DeleteStorageClass(ctx context.Context, in *storagev1.DeleteStorageClassRequest) (*emptypb.Empty, error) {
	if err := admit(ctx, "DeleteStorageClass"); err != nil {
		return nil, err
	}
	out, err := r.s.Delete(ctx, in.GetName(), rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return &emptypb.Empty{}, nil
}
