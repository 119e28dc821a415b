package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"

	"github.com/stretchr/testify/require"

	pattern "github.com/trivet-cloud/trivet/images/guest"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// cli runs the program trivet as system:admin in the project default.
func (s *snapshotStory) cli(args ...string) string {
	s.t.Helper()
	home := s.t.TempDir()
	token := filepath.Join(home, "token")
	require.NoError(s.t, os.WriteFile(token, []byte(s.adminToken), 0o600))
	out, errs, code := s.trivet(s.ctx, home, append([]string{"--token-file", token, "--org", "default", "--project", "default"}, args...)...)
	require.Zero(s.t, code, "trivet %s: %s%s", strings.Join(args, " "), out, errs)
	return out
}

// exports exports the snapshot all-data of the volume data, in which the guest had written the pattern "first", and the
// differences of a later snapshot with the pattern "second". It imports both as a new volume, attaches the volume to a
// running VM, and requires that the guest reads "second". It also makes an image from the snapshot all-root, and boots
// a VM from the image. The parameter root is the ID of the snapshot all-root. exports returns the IDs of the later
// snapshot and of the new volume.
func (s *snapshotStory) exports(root, data, vm string) (snapshot, volume string) {
	t, dir := s.t, s.t.TempDir()
	later, err := s.snapshots.CreateSnapshot(s.ctx, &storagev1.CreateSnapshotRequest{
		OrgId: "default", ProjectId: "default", VolumeId: data, Name: "second",
	})
	require.NoError(t, err)
	s.available(later.GetId())
	path := func(name string) string { return filepath.Join(dir, name) }
	s.cli("volume", "export", "data", path("first.diff"), "--snapshot", "all-data", "--format", "diff")
	s.cli("volume", "export", "data", path("second.diff"), "--snapshot", "second", "--since", "all-data")
	s.cli("volume", "export", "data", path("raw"), "--snapshot", "all-data")
	s.cli("volume", "export", "data", path("now"))
	for name, seed := range map[string]string{"raw": "first", "now": "second"} {
		want := make([]byte, 1<<20)
		pattern.Pattern(want, seed, 0)
		content, err := os.ReadFile(path(name))
		require.NoError(t, err)
		require.Len(t, content, 1<<30)
		require.True(t, bytes.Equal(want, content[:1<<20]), "%s has the pattern %s", name, seed)
	}
	list, err := s.snapshots.ListSnapshots(s.ctx, &storagev1.ListSnapshotsRequest{OrgId: "default", ProjectId: "default", VolumeId: data})
	require.NoError(t, err)
	require.Len(t, list.GetSnapshots(), 2, "the snapshot of the export is deleted")
	left, err := filepath.Glob(path("*.part*"))
	require.NoError(t, err)
	require.Empty(t, left)

	s.cli("volume", "import", "copy", path("first.diff"), path("second.diff"))
	v, err := s.admin.Volumes.ListVolumes(s.ctx, &vmv1.ListVolumesRequest{OrgId: "default", ProjectId: "default"})
	require.NoError(t, err)
	for _, one := range v.GetVolumes() {
		if one.GetName() == "copy" {
			volume = one.GetId()
		}
	}
	require.NotEmpty(t, volume)
	_, err = s.admin.VMs.AttachDisk(s.ctx, &vmv1.AttachDiskRequest{OrgId: "default", ProjectId: "default", VmId: vm, Disk: &vmv1.DiskSpec{
		Id: "copy", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: volume}},
	}})
	require.NoError(t, err)
	s.command(s.ctx, vm, "sum vdc", "SUM dev=vdc off=0 len=1048576 "+written("second"))

	s.bootImageOf(root)
	return later.GetId(), volume
}

// bootImageOf makes an image of a snapshot, boots a VM from the image, and deletes the VM.
func (s *snapshotStory) bootImageOf(snapshot string) {
	t := s.t
	s.cli("image", "import", "template", "snapshot:"+snapshot)
	s.cli("vm", "create", "three", "--image", "template", "--memory", "192", "--start")
	vms, err := s.admin.VMs.ListVms(s.ctx, &vmv1.ListVmsRequest{OrgId: "default", ProjectId: "default"})
	require.NoError(t, err)
	three := ""
	for _, one := range vms.GetVms() {
		if one.GetName() == "three" {
			three = one.GetId()
		}
	}
	require.NotEmpty(t, three)
	require.NoError(t, consoleSays(s.ctx, s.world, three, banner, 1))
	_, err = s.admin.VMs.DeleteVm(s.ctx, &vmv1.DeleteVmRequest{OrgId: "default", ProjectId: "default", VmId: three, Force: true})
	require.NoError(t, err)
}
