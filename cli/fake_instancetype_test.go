package main

import (
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
)

// fakeInstanceTypes serves the instance types of a fakeCloud.
type fakeInstanceTypes struct {
	operatorv1.UnimplementedInstanceTypeServiceServer
	cloud *fakeCloud
	types []*operatorv1.InstanceType
}

// find returns the type with this name. The caller must hold f.cloud.mu.
func (f *fakeInstanceTypes) find(name string) (*operatorv1.InstanceType, error) {
	for _, t := range f.types {
		if t.GetName() == name {
			return t, nil
		}
	}
	return nil, failed(codes.NotFound, "", "no instance type %s", name)
}

func (f *fakeInstanceTypes) CreateInstanceType(_ context.Context, in *operatorv1.CreateInstanceTypeRequest) (*operatorv1.InstanceType, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	f.cloud.calls = append(f.cloud.calls, "  "+oneLine(in))
	if in.GetMemoryMib() < 64 {
		return nil, failed(codes.InvalidArgument, "memory_mib", "memory_mib: must be 64 to 12582912, got %d", in.GetMemoryMib())
	}
	if in.GetRootDiskGib() > 65536 {
		return nil, failed(codes.InvalidArgument, "root_disk_gib", "root_disk_gib: must be at most 65536, got %d", in.GetRootDiskGib())
	}
	if _, err := f.find(in.GetName()); err == nil {
		return nil, failed(codes.AlreadyExists, "", "the cloud has an instance type %s", in.GetName())
	}
	t := &operatorv1.InstanceType{
		Name: in.GetName(), Vcpus: in.GetVcpus(), MemoryMib: in.GetMemoryMib(), RootDiskGib: in.GetRootDiskGib(),
		Description: in.GetDescription(), Available: true, CreatedAt: now.UnixMilli(), UpdatedAt: now.UnixMilli(),
	}
	f.types = append(f.types, t)
	return t, nil
}

func (f *fakeInstanceTypes) GetInstanceType(_ context.Context, in *operatorv1.GetInstanceTypeRequest) (*operatorv1.InstanceType, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	return f.find(in.GetName())
}

func (f *fakeInstanceTypes) ListInstanceTypes(context.Context, *operatorv1.ListInstanceTypesRequest) (*operatorv1.ListInstanceTypesResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	return &operatorv1.ListInstanceTypesResponse{InstanceTypes: slices.Clone(f.types)}, nil
}

func (f *fakeInstanceTypes) UpdateInstanceType(_ context.Context, in *operatorv1.UpdateInstanceTypeRequest) (*operatorv1.InstanceType, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	f.cloud.calls = append(f.cloud.calls, "  "+oneLine(in))
	t, err := f.find(in.GetName())
	if err != nil {
		return nil, err
	}
	if in.Description != nil {
		t.Description = in.GetDescription()
	}
	if in.Available != nil {
		t.Available = in.GetAvailable()
	}
	return t, nil
}

func (f *fakeInstanceTypes) DeleteInstanceType(_ context.Context, in *operatorv1.DeleteInstanceTypeRequest) (*emptypb.Empty, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	t, err := f.find(in.GetName())
	if err != nil {
		return nil, err
	}
	f.types = slices.DeleteFunc(f.types, func(have *operatorv1.InstanceType) bool { return have == t })
	return &emptypb.Empty{}, nil
}
