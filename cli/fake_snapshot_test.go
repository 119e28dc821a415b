package main

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// fakeSnapshots serves the snapshots of a fakeCloud. Each snapshot is AVAILABLE or ERROR at once or, if slow is true, when
// it is read the first time.
type fakeSnapshots struct {
	storagev1.UnimplementedSnapshotServiceServer
	cloud *fakeCloud
	all   []*storagev1.Snapshot
	// failure is the reason of the status ERROR of new snapshots; empty: they are AVAILABLE. If failing is not empty, only a
	// snapshot of that name is ERROR.
	failure, failing string
	slow             bool
	// hanging is the name of a snapshot that stays PENDING.
	hanging string
}

// add stores a snapshot. The caller holds the lock of the cloud.
func (f *fakeSnapshots) add(s *storagev1.Snapshot) *storagev1.Snapshot {
	s.Id, s.OrgId, s.ProjectId, s.SizeGib = f.cloud.nextID(), "default", "default", 20
	s.Status, s.Consistency = storagev1.SnapshotStatus_SNAPSHOT_STATUS_AVAILABLE, storagev1.SnapshotConsistency_SNAPSHOT_CONSISTENCY_CRASH
	if f.fails(s) {
		s.Status, s.StatusReason = storagev1.SnapshotStatus_SNAPSHOT_STATUS_ERROR, f.failure
	}
	if f.slow || s.GetName() == f.hanging {
		s.Status, s.StatusReason = storagev1.SnapshotStatus_SNAPSHOT_STATUS_PENDING, ""
	}
	s.CreatedAt, s.TakenAt, s.StoredBytes = now.Add(-time.Hour).UnixMilli(), now.Add(-time.Hour).UnixMilli(), 3<<30
	f.all = append(f.all, s)
	return s
}

func (f *fakeSnapshots) fails(s *storagev1.Snapshot) bool {
	return f.failure != "" && (f.failing == "" || f.failing == s.GetName())
}

func (f *fakeSnapshots) CreateSnapshot(_ context.Context, in *storagev1.CreateSnapshotRequest) (*storagev1.Snapshot, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	f.cloud.calls = append(f.cloud.calls, "  "+oneLine(in))
	return f.add(&storagev1.Snapshot{Name: in.GetName(), VolumeId: in.GetVolumeId(), Labels: in.GetLabels()}), nil
}

func (f *fakeSnapshots) CreateVmSnapshots(_ context.Context, in *storagev1.CreateVmSnapshotsRequest) (*storagev1.CreateVmSnapshotsResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	f.cloud.calls = append(f.cloud.calls, "  "+oneLine(in))
	out := &storagev1.CreateVmSnapshotsResponse{}
	for _, disk := range []string{"data", "logs"} {
		out.Snapshots = append(out.Snapshots, f.add(&storagev1.Snapshot{Name: in.GetName() + "-" + disk, VolumeId: id(900), GroupId: id(901)}))
	}
	return out, nil
}

func (f *fakeSnapshots) find(id string) (*storagev1.Snapshot, error) {
	for _, s := range f.all {
		if s.GetId() == id {
			return s, nil
		}
	}
	return nil, failed(codes.NotFound, "", "no snapshot %s", id)
}

func (f *fakeSnapshots) GetSnapshot(_ context.Context, in *storagev1.GetSnapshotRequest) (*storagev1.Snapshot, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	s, err := f.find(in.GetSnapshotId())
	if s.GetStatus() == storagev1.SnapshotStatus_SNAPSHOT_STATUS_PENDING && s.GetName() != f.hanging {
		s = proto.Clone(s).(*storagev1.Snapshot)
		if s.Status = storagev1.SnapshotStatus_SNAPSHOT_STATUS_AVAILABLE; f.fails(s) {
			s.Status, s.StatusReason = storagev1.SnapshotStatus_SNAPSHOT_STATUS_ERROR, f.failure
		}
	}
	return s, err
}

func (f *fakeSnapshots) ListSnapshots(_ context.Context, in *storagev1.ListSnapshotsRequest) (*storagev1.ListSnapshotsResponse, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	out := &storagev1.ListSnapshotsResponse{}
	for _, s := range f.all {
		if in.GetVolumeId() == "" || in.GetVolumeId() == s.GetVolumeId() {
			out.Snapshots = append(out.Snapshots, s)
		}
	}
	return out, nil
}

// ListAllSnapshots lists the snapshots for the administrator, all on one page.
func (f *fakeSnapshots) ListAllSnapshots(ctx context.Context, _ *storagev1.ListAllSnapshotsRequest) (*storagev1.ListAllSnapshotsResponse, error) {
	if bearer(ctx) != adminToken {
		return nil, failed(codes.PermissionDenied, "", "only system:admin may ListAllSnapshots")
	}
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	return &storagev1.ListAllSnapshotsResponse{Snapshots: slices.Clone(f.all)}, nil
}

func (f *fakeSnapshots) DeleteSnapshot(_ context.Context, in *storagev1.DeleteSnapshotRequest) (*emptypb.Empty, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	s, err := f.find(in.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	f.all = slices.DeleteFunc(f.all, func(have *storagev1.Snapshot) bool { return have == s })
	return &emptypb.Empty{}, nil
}

func (f *fakeSnapshots) CreateVolumeFromSnapshot(_ context.Context, in *storagev1.CreateVolumeFromSnapshotRequest) (*vmv1.Volume, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	f.cloud.calls = append(f.cloud.calls, "  "+oneLine(in))
	s, err := f.find(in.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	v := &vmv1.Volume{
		Id: f.cloud.nextID(), Name: in.GetName(), OrgId: "default", ProjectId: "default", SizeGib: max(in.GetSizeGib(), s.GetSizeGib()),
		StorageClass: "local", Status: vmv1.VolumeStatus_VOLUME_STATUS_PENDING, CreatedAt: now.Add(-time.Minute).UnixMilli(),
	}
	f.cloud.storage.volumes = append(f.cloud.storage.volumes, v)
	return v, nil
}
