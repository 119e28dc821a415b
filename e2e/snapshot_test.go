package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// snapshotStory has the clients and the volumes of TestSnapshots.
type snapshotStory struct {
	*world
	ctx       context.Context
	snapshots storagev1.SnapshotServiceClient
}

// available waits until a snapshot is AVAILABLE, and returns it.
func (s *snapshotStory) available(id string) (out *storagev1.Snapshot) {
	s.t.Helper()
	require.NoError(s.t, lab.Until(s.ctx, "the snapshot is AVAILABLE", func(ctx context.Context) (err error) {
		out, err = s.snapshots.GetSnapshot(ctx, &storagev1.GetSnapshotRequest{OrgId: "default", ProjectId: "default", SnapshotId: id})
		if err == nil && out.GetStatus() != storagev1.SnapshotStatus_SNAPSHOT_STATUS_AVAILABLE {
			err = fmt.Errorf("the snapshot is %s: %s", out.GetStatus(), out.GetStatusReason())
		}
		return err
	}))
	return out
}

// boot starts a VM that boots from one volume and has another as its second disk, and waits until the guest is ready.
func (s *snapshotStory) boot(name, root, data string) string {
	s.t.Helper()
	disk := func(id, volume string) *vmv1.DiskSpec {
		return &vmv1.DiskSpec{Id: id, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: volume}}}
	}
	vm, err := s.admin.VMs.CreateVm(s.ctx, &vmv1.CreateVmRequest{Name: name, OrgId: "default", ProjectId: "default", Spec: &vmv1.VmSpec{
		Memory: &vmv1.MemorySpec{SizeMib: 192}, Disks: []*vmv1.DiskSpec{disk("root", root), disk("data", data)},
	}})
	require.NoError(s.t, err)
	_, err = s.admin.VMs.StartVm(s.ctx, &vmv1.StartVmRequest{OrgId: "default", ProjectId: "default", VmId: vm.GetId()})
	require.NoError(s.t, err)
	require.NoError(s.t, consoleSays(s.ctx, s.world, vm.GetId(), banner, 1))
	return vm.GetId()
}

// TestSnapshots boots a VM from a volume, and makes snapshots of the VM's two volumes while it runs. A second VM boots
// from volumes that are made from the snapshots. Its guest must read what the first guest wrote before the snapshots,
// and not what it wrote afterwards. When the VMs, volumes and snapshots are deleted, no file may be left.
func TestSnapshots(t *testing.T) {
	w, images, _ := cloud(t)
	s := &snapshotStory{w, w.context(8 * time.Minute), storagev1.NewSnapshotServiceClient(w.admin.Conn())}
	const org = "default"
	create := func(name, image string) string {
		v, err := w.admin.Volumes.CreateVolume(s.ctx, &vmv1.CreateVolumeRequest{
			Name: name, OrgId: org, ProjectId: org, SizeGib: 1, ImageId: image, Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED,
		})
		require.NoError(t, err)
		return v.GetId()
	}
	root, data := create("root", images.Disk), create("data", "")
	vm := s.boot("one", root, data)
	w.command(s.ctx, vm, "write vdb first", written("first"))
	group, err := s.snapshots.CreateVmSnapshots(s.ctx, &storagev1.CreateVmSnapshotsRequest{OrgId: org, ProjectId: org, VmId: vm, Name: "all"})
	require.NoError(t, err)
	require.Len(t, group.GetSnapshots(), 2)
	var taken []int64
	var restored []string
	for _, one := range group.GetSnapshots() {
		done := s.available(one.GetId())
		require.Equal(t, storagev1.SnapshotConsistency_SNAPSHOT_CONSISTENCY_CRASH, done.GetConsistency())
		taken = append(taken, done.GetTakenAt())
	}
	require.Equal(t, taken[0], taken[1], "both snapshots have one instant")
	w.command(s.ctx, vm, "write vdb second", written("second"))
	for i, one := range group.GetSnapshots() {
		v, err := s.snapshots.CreateVolumeFromSnapshot(s.ctx, &storagev1.CreateVolumeFromSnapshotRequest{
			OrgId: org, ProjectId: org, SnapshotId: one.GetId(), Name: fmt.Sprint("restored-", i),
		})
		require.NoError(t, err)
		restored = append(restored, v.GetId())
	}
	if group.GetSnapshots()[0].GetVolumeId() != root {
		restored[0], restored[1] = restored[1], restored[0]
	}
	two := s.boot("two", restored[0], restored[1])
	w.command(s.ctx, two, "sum vdb", "SUM dev=vdb off=0 len=1048576 "+written("first"))
	rootSnapshot := group.GetSnapshots()[0].GetId()
	if group.GetSnapshots()[0].GetVolumeId() != root {
		rootSnapshot = group.GetSnapshots()[1].GetId()
	}
	second, copied := s.exports(rootSnapshot, data, two)

	for _, id := range []string{vm, two} {
		_, err = w.admin.VMs.DeleteVm(s.ctx, &vmv1.DeleteVmRequest{OrgId: org, ProjectId: org, VmId: id, Force: true})
		require.NoError(t, err)
	}
	var detached *storagev1.Snapshot
	require.NoError(t, lab.Until(s.ctx, "the detached volume has a snapshot", func(ctx context.Context) (err error) {
		detached, err = s.snapshots.CreateSnapshot(ctx, &storagev1.CreateSnapshotRequest{OrgId: org, ProjectId: org, VolumeId: data, Name: "later"})
		return err
	}))
	s.available(detached.GetId())
	_, err = w.admin.Volumes.DeleteVolume(s.ctx, &vmv1.DeleteVolumeRequest{OrgId: org, ProjectId: org, VolumeId: data})
	require.ErrorContains(t, err, "snapshots: delete them first")
	for _, one := range append(group.GetSnapshots(), detached, &storagev1.Snapshot{Id: second}) {
		_, err := s.snapshots.DeleteSnapshot(s.ctx, &storagev1.DeleteSnapshotRequest{OrgId: org, ProjectId: org, SnapshotId: one.GetId()})
		require.NoError(t, err)
	}
	for _, id := range append(restored, root, data, copied) {
		require.NoError(t, lab.Until(s.ctx, "the volume is deleted", func(ctx context.Context) error {
			_, err := w.admin.Volumes.DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{OrgId: org, ProjectId: org, VolumeId: id})
			return err
		}))
	}
	require.NoError(t, lab.Until(s.ctx, "all files are deleted", func(context.Context) error {
		left, err := filepath.Glob(filepath.Join(w.agent.DataDir(), "volumes", "*-*"))
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%v are left", left)
		}
		return err
	}))
}
