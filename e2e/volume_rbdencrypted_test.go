package e2e

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pattern "github.com/trivet-cloud/trivet/images/guest"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
)

// useEncrypted uses volumes of an encrypted class. The guest of VM one on the first host writes to a volume while the
// volume is grown. A volume made from a snapshot has what the guest wrote, and VM two on the second host reads it from
// the volume itself. A third VM boots from a volume made from an image. The cluster must not have in plain text what
// the guest wrote, nor the image.
func (c *rbdCloud) useEncrypted(ctx context.Context, one, two string) {
	t := c.t
	c.createClass(ctx, "ceph-secret", "--encrypted")
	s := &snapshotStory{c.on(1), ctx, storagev1.NewSnapshotServiceClient(c.admin.Conn())}
	secret, root := c.createVolume(ctx, "ceph-secret", "secret", ""), c.createVolume(ctx, "ceph-secret", "secret-root", c.images.Disk)
	require.NoError(t, c.attachOld(ctx, one, secret))
	c.on(1).command(ctx, one, "write vdc hidden", written("hidden"))
	_, err := c.admin.Volumes.ResizeVolume(ctx, &vmv1.ResizeVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: secret, SizeGib: 3})
	require.NoError(t, err)
	c.on(1).command(ctx, one, "disks", "vdc:6291456")
	taken, err := s.snapshots.CreateSnapshot(ctx, &storagev1.CreateSnapshotRequest{OrgId: "default", ProjectId: "default", VolumeId: secret, Name: "secret"})
	require.NoError(t, err)
	s.available(taken.GetId())
	export, err := s.snapshots.ExportSnapshot(ctx, &storagev1.ExportSnapshotRequest{
		OrgId: "default", ProjectId: "default", SnapshotId: taken.GetId(),
	})
	require.NoError(t, err)
	_, err = export.Recv()
	require.Equal(t, codes.FailedPrecondition, status.Code(err), "a snapshot of an encrypted volume was exported: %v", err)
	copied, err := s.snapshots.CreateVolumeFromSnapshot(ctx, &storagev1.CreateVolumeFromSnapshotRequest{
		OrgId: "default", ProjectId: "default", SnapshotId: taken.GetId(), Name: "secret-copy",
	})
	require.NoError(t, err)
	c.on(1).command(ctx, one, "write vdc later", written("later"))
	c.detachOld(ctx, one)
	c.awaitVolume(ctx, copied.GetId(), vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE, "")
	require.NoError(t, c.attachOld(ctx, one, copied.GetId()))
	c.on(1).command(ctx, one, "sum vdc", "SUM dev=vdc off=0 len=1048576 "+written("hidden"))
	require.NoError(t, lab.Until(ctx, "the volume is attached on the other host", func(ctx context.Context) error { return c.attachOld(ctx, two, secret) }))
	c.on(2).command(ctx, two, "sum vdc", "SUM dev=vdc off=0 len=1048576 "+written("later"))

	booted, err := c.admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{Name: "secret", OrgId: "default", ProjectId: "default", Spec: &vmv1.VmSpec{
		Memory: &vmv1.MemorySpec{SizeMib: 192},
		Disks:  []*vmv1.DiskSpec{{Id: "root", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: root}}}},
	}})
	require.NoError(t, err)
	_, err = c.admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: "default", ProjectId: "default", VmId: booted.GetId()})
	require.NoError(t, err)
	require.NoError(t, consoleSays(ctx, c.world, booted.GetId(), banner, 1))
	_, err = c.admin.VMs.DeleteVm(ctx, &vmv1.DeleteVmRequest{OrgId: "default", ProjectId: "default", VmId: booted.GetId(), Force: true})
	require.NoError(t, err)

	raw := filepath.Join(t.TempDir(), "disk")
	text, err := exec.CommandContext(ctx, "qemu-img", "convert", "-O", "raw", filepath.Join(guest(t), "disk.qcow2"), raw).CombinedOutput()
	require.NoError(t, err, "%s", text)
	image, err := os.ReadFile(raw)
	require.NoError(t, err)
	hidden, later := make([]byte, 512), make([]byte, 512)
	pattern.Pattern(hidden, "hidden", 0)
	pattern.Pattern(later, "later", 0)
	for _, v := range []string{secret, copied.GetId(), root} {
		require.False(t, c.rbdImageHas(v, hidden, later, image[:64]), "the cluster has the content of volume %s in plain text", v)
	}
	c.detachOld(ctx, one)
	c.detachOld(ctx, two)
	_, err = s.snapshots.DeleteSnapshot(ctx, &storagev1.DeleteSnapshotRequest{OrgId: "default", ProjectId: "default", SnapshotId: taken.GetId()})
	require.NoError(t, err)
	for _, v := range []string{secret, copied.GetId(), root} {
		require.NoError(t, lab.Until(ctx, "the volume is deleted", func(ctx context.Context) error {
			_, err := c.admin.Volumes.DeleteVolume(ctx, &vmv1.DeleteVolumeRequest{OrgId: "default", ProjectId: "default", VolumeId: v})
			if status.Code(err) == codes.NotFound {
				return nil // an earlier attempt has deleted it
			}
			return err
		}))
	}
}

// rbdImageHas reports whether the RBD image of a volume contains one of these texts.
func (c *rbdCloud) rbdImageHas(volume string, texts ...[]byte) bool {
	c.t.Helper()
	file := filepath.Join(c.t.TempDir(), "image")
	c.ceph.Run("rbd", "export", "--no-progress", rbdtest.Pool+"/volume-"+volume, file)
	f, err := os.Open(file)
	require.NoError(c.t, err)
	defer f.Close()
	const overlap = 4096
	piece := make([]byte, 8<<20)
	for at := int64(0); ; at += int64(len(piece)) - overlap {
		n, err := f.ReadAt(piece, at)
		for _, text := range texts {
			if bytes.Contains(piece[:n], text) {
				return true
			}
		}
		if err == io.EOF {
			break
		}
		require.NoError(c.t, err)
	}
	return false
}
