package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// fakeStorage serves the volumes and storage classes of a fakeCloud.
type fakeStorage struct {
	vmv1.UnimplementedVolumeServiceServer
	storagev1.UnimplementedStorageClassServiceServer
	cloud   *fakeCloud
	volumes []*vmv1.Volume
	classes []*storagev1.StorageClass
}

// volume returns the volume with this ID. The caller holds the lock of the cloud.
func (f *fakeStorage) volume(id string) (*vmv1.Volume, error) {
	for _, v := range f.volumes {
		if v.GetId() == id {
			return v, nil
		}
	}
	return nil, failed(codes.NotFound, "", "no volume %s", id)
}

func (f *fakeStorage) CreateVolume(_ context.Context, in *vmv1.CreateVolumeRequest) (*vmv1.Volume, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	f.cloud.calls = append(f.cloud.calls, "  "+oneLine(in))
	if slices.ContainsFunc(f.volumes, func(v *vmv1.Volume) bool { return v.GetName() == in.GetName() }) {
		return nil, failed(codes.AlreadyExists, "", "the project has a volume called %s", in.GetName())
	}
	v := &vmv1.Volume{
		Id: f.cloud.nextID(), Name: in.GetName(), OrgId: "default", ProjectId: "default", SizeGib: in.GetSizeGib(), StorageClass: "local",
		Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED, Status: vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE,
		Labels: in.GetLabels(), Metadata: in.GetMetadata(), CreatedAt: now.Add(-2 * time.Hour).UnixMilli(),
	}
	if in.GetStorageClass() != "" {
		v.StorageClass = in.GetStorageClass()
	}
	f.volumes = append(f.volumes, v)
	return v, nil
}

func (f *fakeStorage) RegisterExternalVolume(_ context.Context, in *vmv1.RegisterExternalVolumeRequest) (*vmv1.Volume, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	f.cloud.calls = append(f.cloud.calls, "  "+oneLine(in))
	v := &vmv1.Volume{
		Id: f.cloud.nextID(), Name: in.GetName(), OrgId: "default", ProjectId: "default", SizeGib: in.GetSizeGib(), StorageClass: in.GetStorageClass(),
		Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_RBD, Status: vmv1.VolumeStatus_VOLUME_STATUS_PENDING,
		CreatedAt: now.Add(-2 * time.Hour).UnixMilli(),
	}
	f.volumes = append(f.volumes, v)
	return v, nil
}

func (f *fakeStorage) GetVolume(_ context.Context, in *vmv1.GetVolumeRequest) (*vmv1.Volume, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	v, err := f.volume(in.GetVolumeId())
	switch v.GetMetadata()["trivet/flatten"] {
	case "0":
		v.Metadata["trivet/flatten"] = "50"
	case "50":
		delete(v.Metadata, "trivet/flatten")
	}
	return v, err
}

func (f *fakeStorage) ListVolumes(context.Context, *vmv1.ListVolumesRequest) (*vmv1.ListVolumesResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	return &vmv1.ListVolumesResponse{Volumes: slices.Clone(f.volumes)}, nil
}

// ListAllVolumes lists the volumes for the administrator, all on one page.
func (f fakeFlatten) ListAllVolumes(ctx context.Context, in *storagev1.ListAllVolumesRequest) (*storagev1.ListAllVolumesResponse, error) {
	if bearer(ctx) != adminToken {
		return nil, failed(codes.PermissionDenied, "", "only system:admin may ListAllVolumes")
	}
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	return &storagev1.ListAllVolumesResponse{Volumes: slices.Clone(f.volumes)}, nil
}

func (f *fakeStorage) ResizeVolume(_ context.Context, in *vmv1.ResizeVolumeRequest) (*vmv1.Volume, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	v, err := f.volume(in.GetVolumeId())
	if err == nil && in.GetSizeGib() < v.GetSizeGib() {
		err = failed(codes.InvalidArgument, "size_gib", "size_gib: volume %s has %d GiB, and volumes cannot be made smaller", v.GetName(), v.GetSizeGib())
	}
	if err != nil {
		return nil, err
	}
	v.SizeGib = in.GetSizeGib()
	return v, nil
}

// fakeFlatten serves VolumeService of storage.v1. It is a type of its own, because a struct cannot embed the types
// UnimplementedVolumeServiceServer of both storage.v1 and vmcontroller.v1.
type fakeFlatten struct {
	storagev1.UnimplementedVolumeServiceServer
	*fakeStorage
}

// FlattenVolume begins to flatten a volume. Each later GetVolume adds 50 percent to the finished part.
func (f fakeFlatten) FlattenVolume(_ context.Context, in *storagev1.FlattenVolumeRequest) (*vmv1.Volume, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	v, err := f.volume(in.GetVolumeId())
	if err != nil {
		return nil, err
	}
	v.Metadata = map[string]string{"trivet/flatten": "0"}
	return v, nil
}

// UpdateVolume changes the name, the labels and the metadata of a volume.
func (f fakeFlatten) UpdateVolume(_ context.Context, in *storagev1.UpdateVolumeRequest) (*vmv1.Volume, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	v, err := f.volume(in.GetVolumeId())
	if err != nil {
		return nil, err
	}
	v.Name, v.Labels = cmp.Or(in.GetName(), v.GetName()), cloud.Merge(v.GetLabels(), in.GetLabels())
	v.Metadata = cloud.Merge(v.GetMetadata(), in.GetMetadata())
	return v, nil
}

func (f *fakeStorage) DeleteVolume(_ context.Context, in *vmv1.DeleteVolumeRequest) (*emptypb.Empty, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	v, err := f.volume(in.GetVolumeId())
	if err == nil && v.GetAttachedToVm() != "" {
		err = failed(codes.FailedPrecondition, "", "volume %s is attached to VM %s: detach it first", v.GetName(), v.GetAttachedToVm())
	}
	if err != nil {
		return nil, err
	}
	f.volumes = slices.DeleteFunc(f.volumes, func(have *vmv1.Volume) bool { return have == v })
	return &emptypb.Empty{}, nil
}

// AttachDisk attaches an existing or new volume to a VM in any state.
func (c *fakeCloud) AttachDisk(_ context.Context, in *vmv1.AttachDiskRequest) (*vmv1.VirtualMachine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, "  "+oneLine(in))
	vm, err := c.vm(in.GetVmId())
	if err != nil {
		return nil, err
	}
	if in.GetDisk().GetSource().GetVolumeId() == "" {
		v := &vmv1.Volume{
			Id: fmt.Sprintf("00000000-0000-7000-8000-0000000000%02x", 0xa0+len(c.storage.volumes)), Name: vm.GetName() + "-" + in.GetDisk().GetId(), OrgId: in.GetOrgId(),
			ProjectId: in.GetProjectId(), SizeGib: in.GetDisk().GetSizeGib(), Status: vmv1.VolumeStatus_VOLUME_STATUS_PENDING,
		}
		c.storage.volumes = append(c.storage.volumes, v)
		in.Disk.Source, in.Disk.SizeGib = &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: v.GetId()}}, 0
	}
	v, err := c.storage.volume(in.GetDisk().GetSource().GetVolumeId())
	if err != nil {
		return nil, err
	}
	if v.GetAttachedToVm() != "" {
		return nil, failed(codes.FailedPrecondition, "", "volume %s is attached to VM %s", v.GetName(), v.GetAttachedToVm())
	}
	v.AttachedToVm, v.AttachedToNode, v.Status = vm.GetId(), "host-1", vmv1.VolumeStatus_VOLUME_STATUS_IN_USE
	v.AttachmentGeneration++
	if vm.Spec == nil {
		vm.Spec = &vmv1.VmSpec{}
	}
	vm.Spec.Disks = append(vm.Spec.Disks, in.GetDisk())
	return vm, nil
}

func (c *fakeCloud) DetachDisk(ctx context.Context, in *vmv1.DetachDiskRequest) (*vmv1.VirtualMachine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	vm, err := c.vm(in.GetVmId())
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(vm.GetSpec().GetDisks(), func(d *vmv1.DiskSpec) bool { return d.GetId() == in.GetDiskId() })
	if i < 0 {
		return nil, failed(codes.NotFound, "disk_id", "VM %s has no disk %s", vm.GetName(), in.GetDiskId())
	}
	if v, err := c.storage.volume(vm.GetSpec().GetDisks()[i].GetSource().GetVolumeId()); err == nil {
		v.AttachedToVm, v.Status = "", vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE
		v.LastFlushedAttachmentGeneration = v.GetAttachmentGeneration()
	}
	before := proto.CloneOf(vm)
	vm.Spec.Disks = slices.Delete(vm.GetSpec().GetDisks(), i, i+1)
	if md, _ := metadata.FromIncomingContext(ctx); vm.GetState() == vmv1.VmState_VM_STATE_RUNNING && len(md.Get("prefer")) > 0 {
		return before, nil // the guest has not released the disk yet
	}
	return vm, nil
}

func (f *fakeStorage) class(name string) (*storagev1.StorageClass, error) {
	for _, c := range f.classes {
		if c.GetName() == name {
			return c, nil
		}
	}
	return nil, failed(codes.NotFound, "", "no storage class %s", name)
}

// makeDefault marks one class as the default.
func (f *fakeStorage) makeDefault(one *storagev1.StorageClass) {
	for _, c := range f.classes {
		c.IsDefault = c == one
	}
}

func (f *fakeStorage) CreateStorageClass(_ context.Context, in *storagev1.CreateStorageClassRequest) (*storagev1.StorageClass, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	c := &storagev1.StorageClass{
		Name: in.GetName(), Driver: in.GetDriver(), Pool: in.GetPool(), MaxIops: in.GetMaxIops(), MaxBytesPerSecond: in.GetMaxBytesPerSecond(),
		Encrypted: in.GetEncrypted(), Rbd: in.GetRbd(), Description: in.GetDescription(),
	}
	if c.Rbd != nil {
		f.cloud.calls = append(f.cloud.calls, "  "+oneLine(c.Rbd))
	}
	f.classes = append(f.classes, c)
	if in.GetIsDefault() {
		f.makeDefault(c)
	}
	return c, nil
}

func (f *fakeStorage) GetStorageClass(_ context.Context, in *storagev1.GetStorageClassRequest) (*storagev1.StorageClass, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	return f.class(in.GetName())
}

func (f *fakeStorage) ListStorageClasses(context.Context, *storagev1.ListStorageClassesRequest) (*storagev1.ListStorageClassesResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	return &storagev1.ListStorageClassesResponse{StorageClasses: slices.Clone(f.classes)}, nil
}

func (f *fakeStorage) UpdateStorageClass(_ context.Context, in *storagev1.UpdateStorageClassRequest) (*storagev1.StorageClass, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	f.cloud.calls = append(f.cloud.calls, "  "+oneLine(in))
	c, err := f.class(in.GetName())
	if err != nil {
		return nil, err
	}
	if in.GetIsDefault() {
		f.makeDefault(c)
	}
	if in.MaxIops != nil {
		c.MaxIops = in.GetMaxIops()
	}
	if in.Description != nil {
		c.Description = in.GetDescription()
	}
	return c, nil
}

func (f *fakeStorage) DeleteStorageClass(_ context.Context, in *storagev1.DeleteStorageClassRequest) (*emptypb.Empty, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	c, err := f.class(in.GetName())
	if err != nil {
		return nil, err
	}
	f.classes = slices.DeleteFunc(f.classes, func(have *storagev1.StorageClass) bool { return have == c })
	return &emptypb.Empty{}, nil
}
