package instancetype

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Register registers InstanceTypeService for API callers.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	operatorv1.RegisterInstanceTypeServiceServer(g, &server{s: s})
}

type server struct {
	operatorv1.UnsafeInstanceTypeServiceServer
	s *Service
}

const service = "/operator.v1.InstanceTypeService/"

// admit authorizes a call without an org and a project, because instance types belong to no tenant.
func admit(ctx context.Context, method auth.Method) error {
	_, err := auth.Admit(ctx, service+method, "", "")
	return err
}

func toProto(t *cloud.InstanceType) *operatorv1.InstanceType {
	return &operatorv1.InstanceType{
		Name: t.Name, Vcpus: t.VCPUs, MemoryMib: t.MemoryMiB, RootDiskGib: t.RootDiskGiB, Description: t.Description,
		Available: t.Available, CreatedAt: t.CreatedAt, UpdatedAt: t.UpdatedAt,
	}
}

// respond converts the result of a change to its response.
func respond(ctx context.Context, out Result, err error) (*operatorv1.InstanceType, error) {
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return toProto(&out.Type), nil
}

func (r *server) CreateInstanceType(ctx context.Context, in *operatorv1.CreateInstanceTypeRequest) (*operatorv1.InstanceType, error) {
	if err := admit(ctx, "CreateInstanceType"); err != nil {
		return nil, err
	}
	out, err := r.s.Create(ctx, cloud.InstanceType{
		Name: in.GetName(), VCPUs: in.GetVcpus(), MemoryMiB: in.GetMemoryMib(), RootDiskGiB: in.GetRootDiskGib(),
		Description: in.GetDescription(),
	}, rpc.BodyHash(in))
	return respond(ctx, out, err)
}

func (r *server) GetInstanceType(ctx context.Context, in *operatorv1.GetInstanceTypeRequest) (*operatorv1.InstanceType, error) {
	if err := admit(ctx, "GetInstanceType"); err != nil {
		return nil, err
	}
	t, err := r.s.Get(ctx, in.GetName())
	if err != nil {
		return nil, err
	}
	return toProto(t), nil
}

func (r *server) ListInstanceTypes(ctx context.Context, in *operatorv1.ListInstanceTypesRequest) (*operatorv1.ListInstanceTypesResponse, error) {
	if err := admit(ctx, "ListInstanceTypes"); err != nil {
		return nil, err
	}
	all, next, err := r.s.List(ctx, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	out := &operatorv1.ListInstanceTypesResponse{NextPageToken: next}
	for _, t := range all {
		out.InstanceTypes = append(out.InstanceTypes, toProto(t))
	}
	return out, nil
}

func (r *server) UpdateInstanceType(ctx context.Context, in *operatorv1.UpdateInstanceTypeRequest) (*operatorv1.InstanceType, error) {
	if err := admit(ctx, "UpdateInstanceType"); err != nil {
		return nil, err
	}
	u := cloud.InstanceTypeUpdate{Description: in.Description, Available: in.Available}
	out, err := r.s.Update(ctx, in.GetName(), u, rpc.BodyHash(in))
	return respond(ctx, out, err)
}

func (r *server) DeleteInstanceType(ctx context.Context, in *operatorv1.DeleteInstanceTypeRequest) (*emptypb.Empty, error) {
	if err := admit(ctx, "DeleteInstanceType"); err != nil {
		return nil, err
	}
	out, err := r.s.Delete(ctx, in.GetName(), rpc.BodyHash(in))
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return &emptypb.Empty{}, nil
}
