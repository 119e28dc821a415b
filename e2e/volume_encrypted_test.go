package e2e

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	pattern "github.com/trivet-cloud/trivet/images/guest"
)

// TestEncryptedVolumes creates a volume of an encrypted class through the API, starts a VM with it, and lets the guest
// write. The files of the pool must not contain what the guest wrote. The guest keeps the volume while the agent is
// killed. After a stop and a start with the new agent, which has got the key again, the guest reads what it wrote. Then
// the volume is moved to another VM. A volume from a snapshot has what the guest wrote before the snapshot.
func TestEncryptedVolumes(t *testing.T) {
	w, images, _ := cloud(t)
	ctx := w.context(5 * time.Minute)
	org := "default"
	const managed = vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED
	class, err := storagev1.NewStorageClassServiceClient(w.admin.Conn()).CreateStorageClass(ctx, &storagev1.CreateStorageClassRequest{
		Name: "secret", Driver: managed, Pool: "local", Encrypted: true,
	})
	require.NoError(t, err)
	require.True(t, class.GetEncrypted())
	volume, err := w.admin.Volumes.CreateVolume(ctx, &vmv1.CreateVolumeRequest{
		Name: "data", OrgId: org, ProjectId: org, SizeGib: 1, StorageClass: "secret",
	})
	require.NoError(t, err)
	require.Equal(t, vmv1.VolumeFormat_VOLUME_FORMAT_QCOW2, volume.GetFormat())
	disk := &vmv1.DiskSpec{
		Id: "data", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: volume.GetId()}}, Cache: vmv1.DiskCache_DISK_CACHE_NONE,
	}
	create := func(name string, more ...*vmv1.DiskSpec) string {
		root := &vmv1.DiskSpec{Id: "root", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}, SizeGib: 1}
		vm, err := w.admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{Name: name, OrgId: org, ProjectId: org, Spec: &vmv1.VmSpec{
			Memory: &vmv1.MemorySpec{SizeMib: 192},
			Boot:   &vmv1.BootSpec{Kernel: images.Kernel, Initrd: images.Initrd, Cmdline: guestCmdline},
			Disks:  append([]*vmv1.DiskSpec{root}, more...),
		}})
		require.NoError(t, err)
		return vm.GetId()
	}
	start := func(vm string, boots int) {
		_, err := w.admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: org, ProjectId: org, VmId: vm})
		require.NoError(t, err)
		require.NoError(t, consoleSays(ctx, w, vm, banner, boots))
	}
	one := create("one", disk)
	start(one, 1)
	w.command(ctx, one, "write vdb first", written("first"))
	s := &snapshotStory{w, ctx, storagev1.NewSnapshotServiceClient(w.admin.Conn())}
	taken, err := s.snapshots.CreateSnapshot(ctx, &storagev1.CreateSnapshotRequest{OrgId: org, ProjectId: org, VolumeId: volume.GetId(), Name: "first"})
	require.NoError(t, err)
	s.available(taken.GetId())
	copied, err := s.snapshots.CreateVolumeFromSnapshot(ctx, &storagev1.CreateVolumeFromSnapshotRequest{
		OrgId: org, ProjectId: org, SnapshotId: taken.GetId(), Name: "copy",
	})
	require.NoError(t, err)
	require.False(t, w.poolHas("first"), "the pool has what the guest wrote to the encrypted volume in plain text")

	require.NoError(t, w.dir.Kill(w.agent.Name))
	w.command(ctx, one, "write vdb second", written("second"))
	require.NoError(t, w.agent.Start(""))
	require.NoError(t, lab.Until(ctx, "the VM is stopped", func(ctx context.Context) error {
		_, err := w.admin.VMs.StopVm(ctx, &vmv1.StopVmRequest{OrgId: org, ProjectId: org, VmId: one, Force: true})
		return err
	}))
	start(one, 2)
	w.command(ctx, one, "sum vdb", "SUM dev=vdb off=0 len=1048576 "+written("second"))

	two := create("two")
	start(two, 1)
	_, err = w.admin.VMs.DetachDisk(ctx, &vmv1.DetachDiskRequest{OrgId: org, ProjectId: org, VmId: one, DiskId: "data"})
	require.NoError(t, err)
	_, err = w.admin.VMs.AttachDisk(ctx, &vmv1.AttachDiskRequest{OrgId: org, ProjectId: org, VmId: two, Disk: disk})
	require.NoError(t, err)
	w.command(ctx, two, "sum vdb", "SUM dev=vdb off=0 len=1048576 "+written("second"))
	require.False(t, w.poolHas("second"))
	copyDisk := &vmv1.DiskSpec{Id: "copy", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: copied.GetId()}}}
	require.NoError(t, lab.Until(ctx, "the volume is made from the snapshot and attached", func(ctx context.Context) error {
		_, err := w.admin.VMs.AttachDisk(ctx, &vmv1.AttachDiskRequest{OrgId: org, ProjectId: org, VmId: two, Disk: copyDisk})
		return err
	}))
	w.command(ctx, two, "sum vdc", "SUM dev=vdc off=0 len=1048576 "+written("first"))
	require.False(t, w.poolHas("first"))
}

// poolHas reports whether a file in the agent's storage pool contains the beginning of the pattern of seed.
func (w *world) poolHas(seed string) bool {
	w.t.Helper()
	buf := make([]byte, 512)
	pattern.Pattern(buf, seed, 0)
	files, err := filepath.Glob(filepath.Join(w.agent.DataDir(), "volumes", "*.qcow2"))
	require.NoError(w.t, err)
	require.NotEmpty(w.t, files)
	for _, file := range files {
		content, err := os.ReadFile(file)
		require.NoError(w.t, err)
		if bytes.Contains(content, buf) {
			return true
		}
	}
	return false
}
