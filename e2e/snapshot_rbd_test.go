package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pattern "github.com/trivet-cloud/trivet/images/guest"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
)

// testSnapshots makes snapshots of all volumes of the running VM vm on the first host: the RBD volumes clone and data,
// and a volume in a storage pool. The guest has written the pattern "first" to data, and writes another pattern after
// the snapshot. A new volume from the snapshot of data must have the first pattern. An import of the snapshot and of
// the later differences must have the other one. A VM boots from an image of the snapshot of clone. Then the volumes
// with images or snapshots are made independent while the guest uses them. A snapshot of the volume in the storage pool
// must not make the VM hang while the Ceph cluster is stopped.
func (c *rbdCloud) testSnapshots(ctx context.Context, vm, clone, data string) {
	t := c.t
	s := &snapshotStory{c.on(1), ctx, storagev1.NewSnapshotServiceClient(c.admin.Conn())}
	local, err := c.admin.Volumes.CreateVolume(ctx, &vmv1.CreateVolumeRequest{Name: "local", OrgId: "default", ProjectId: "default", SizeGib: 1})
	require.NoError(t, err)
	attach := func(id, volume string) {
		_, err := c.admin.VMs.AttachDisk(ctx, &vmv1.AttachDiskRequest{OrgId: "default", ProjectId: "default", VmId: vm, Disk: &vmv1.DiskSpec{
			Id: id, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: volume}},
		}})
		require.NoError(t, err)
	}
	attach("local", local.GetId())
	s.command(ctx, vm, "write vdd local", written("local"))

	group, err := s.snapshots.CreateVmSnapshots(ctx, &storagev1.CreateVmSnapshotsRequest{OrgId: "default", ProjectId: "default", VmId: vm, Name: "all"})
	require.NoError(t, err)
	require.Len(t, group.GetSnapshots(), 3)
	of := map[string]*storagev1.Snapshot{}
	for _, one := range group.GetSnapshots() {
		of[one.GetVolumeId()] = s.available(one.GetId())
	}
	require.Equal(t, of[data].GetTakenAt(), of[local.GetId()].GetTakenAt())
	s.command(ctx, vm, "write vdc second", written("second"))
	later, err := s.snapshots.CreateSnapshot(ctx, &storagev1.CreateSnapshotRequest{OrgId: "default", ProjectId: "default", VolumeId: data, Name: "second"})
	require.NoError(t, err)
	s.available(later.GetId())

	copied, err := s.snapshots.CreateVolumeFromSnapshot(ctx, &storagev1.CreateVolumeFromSnapshotRequest{
		OrgId: "default", ProjectId: "default", SnapshotId: of[data].GetId(), Name: "copy",
	})
	require.NoError(t, err)
	made := copied.GetId()
	require.NoError(t, lab.Until(ctx, "the volume is made", func(ctx context.Context) error {
		v, err := c.admin.Volumes.GetVolume(ctx, &vmv1.GetVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: made})
		if err == nil && v.GetStatus() != vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE {
			err = fmt.Errorf("it is %s: %v", v.GetStatus(), v.GetMetadata())
		}
		return err
	}))
	attach("copy", made)
	s.command(ctx, vm, "sum vde", "SUM dev=vde off=0 len=1048576 "+written("first"))

	dir := t.TempDir()
	s.cli("volume", "export", "data", filepath.Join(dir, "first.diff"), "--snapshot", "all-data", "--format", "diff")
	s.cli("volume", "export", "data", filepath.Join(dir, "second.diff"), "--snapshot", "second", "--since", "all-data")
	s.cli("volume", "export", "data", filepath.Join(dir, "raw"), "--snapshot", "second")
	want := make([]byte, 1<<20)
	pattern.Pattern(want, "second", 0)
	content, err := os.ReadFile(filepath.Join(dir, "raw"))
	require.NoError(t, err)
	require.Len(t, content, 2<<30)
	require.True(t, bytes.Equal(want, content[:1<<20]))
	require.NoError(t, os.Remove(filepath.Join(dir, "raw")))
	s.cli("volume", "import", "back", filepath.Join(dir, "first.diff"), filepath.Join(dir, "second.diff"), "--class", "ceph")
	s.cli("vm", "disk", "attach", "one", "--volume", "back", "--id", "back")
	s.command(ctx, vm, "sum vdf", "SUM dev=vdf off=0 len=1048576 "+written("second"))

	s.bootImageOf(of[clone].GetId())

	s.cli("volume", "flatten", "clone")
	for _, id := range []string{clone, made} {
		require.NoError(t, lab.Until(ctx, "the RBD image is no clone", func(context.Context) error {
			if text := c.ceph.Run("rbd", "info", rbdtest.Pool+"/volume-"+id); strings.Contains(text, "parent:") {
				return errors.New(text)
			}
			return nil
		}))
	}
	half := make([]byte, 1<<19)
	pattern.Pattern(half, "first", 0)
	s.command(ctx, vm, "sum vde 0 524288", fmt.Sprintf("SUM dev=vde off=0 len=524288 sha256=%x", sha256.Sum256(half)))
	for _, one := range append(group.GetSnapshots(), later) {
		_, err := s.snapshots.DeleteSnapshot(ctx, &storagev1.DeleteSnapshotRequest{OrgId: "default", ProjectId: "default", SnapshotId: one.GetId()})
		require.NoError(t, err)
	}
	require.NoError(t, lab.Until(ctx, "the RBD snapshots are deleted", func(context.Context) error {
		if text := c.ceph.Run("rbd", "snap", "ls", "--all", rbdtest.Pool+"/volume-"+data); text != "" {
			return errors.New(text)
		}
		return nil
	}))

	c.ceph.Pause()
	alone, err := s.snapshots.CreateSnapshot(ctx, &storagev1.CreateSnapshotRequest{
		OrgId: "default", ProjectId: "default", VolumeId: local.GetId(), Name: "alone",
	})
	require.NoError(t, err)
	time.Sleep(3 * time.Second) // The agent tries to begin the snapshot.
	s.command(ctx, vm, "sum vdd", "SUM dev=vdd off=0 len=1048576 "+written("local"))
	c.ceph.Continue()
	s.available(alone.GetId())
	for _, id := range []string{"copy", "back", "local"} {
		require.NoError(t, lab.Until(ctx, "the volume is detached", func(ctx context.Context) error {
			_, err := c.admin.VMs.DetachDisk(ctx, &vmv1.DetachDiskRequest{OrgId: "default", ProjectId: "default", VmId: vm, DiskId: id})
			if status.Code(err) == codes.NotFound {
				return nil // an earlier attempt has detached it
			}
			return err
		}))
	}
	_, err = s.snapshots.DeleteSnapshot(ctx, &storagev1.DeleteSnapshotRequest{OrgId: "default", ProjectId: "default", SnapshotId: alone.GetId()})
	require.NoError(t, err)
	for _, name := range []string{"copy", "back", "local"} {
		s.cli("volume", "delete", name)
	}
}
