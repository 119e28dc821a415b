package storage

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestVolumeIsOpenElsewhere assigns a volume of a shared pool, which a removed host still has open, to this host as
// detached. The report must name the removed host. When the removed host has closed the volume, this host must report
// the attachment as flushed.
func TestVolumeIsOpenElsewhere(t *testing.T) {
	h := newHost(t)
	dir := filepath.Join(h.dir, "shared")
	require.NoError(t, os.Mkdir(dir, 0o700))
	removed, err := volume.OpenPool(t.Context(), volume.Options{
		Name: "shared", Host: "host-2", Shared: true, Path: dir, State: filepath.Join(t.TempDir(), "pool.json"),
	})
	require.NoError(t, err)
	t.Cleanup(removed.Close)
	require.NoError(t, removed.Create(t.Context(), volume.Volume{ID: string(vol), Size: mib}))
	files, err := removed.Open(t.Context(), string(vol), volume.Attachment{VM: string(vm), Generation: 1})
	require.NoError(t, err)
	h.openPools(t.Context())

	v := next(detached(), func(v *agentv1.AssignedVolume) { v.Pool, v.MustExist, v.AttachmentGeneration = "shared", true, 1 })
	h.assign(v)
	h.sees(cloud.VolumeObservation{
		Volume: vol, Generation: 2, Present: true, SizeBytes: mib,
		Error: "detach volume " + string(vol) + ": another host has the volume open: host host-2 opened it for VM " + string(vm),
	})
	require.True(t, h.Has(vol))
	files.Close()
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 2, Present: true, SizeBytes: mib, FlushedGeneration: 1})
}

// TestVolumeOfMigration assigns a volume of a shared pool to this host as the target of a migration, then as the VM's
// host, and then as the source. The host may write to the volume only in between. While it is not the VM's host, it does
// not change the volume.
func TestVolumeOfMigration(t *testing.T) {
	h := newHost(t)
	dir := filepath.Join(h.dir, "shared")
	require.NoError(t, os.Mkdir(dir, 0o700))
	other, err := volume.OpenPool(t.Context(), volume.Options{
		Name: "shared", Host: "host-2", Shared: true, Path: dir, State: filepath.Join(t.TempDir(), "pool.json"),
	})
	require.NoError(t, err)
	t.Cleanup(other.Close)
	require.NoError(t, other.Create(t.Context(), volume.Volume{ID: string(vol), Size: mib}))
	source, err := other.Open(t.Context(), string(vol), volume.Attachment{VM: string(vm), Generation: 1})
	require.NoError(t, err)
	h.openPools(t.Context())

	v := next(detached(), func(v *agentv1.AssignedVolume) {
		v.Pool, v.MustExist, v.AttachmentGeneration, v.VmId, v.DiskId, v.Standby = "shared", true, 2, string(vm), "data", true
		v.SizeBytes = 2 * mib
	})
	h.assign(v)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 2, Present: true, SizeBytes: mib}) // It was not enlarged.
	files, err := h.OpenStandby(t.Context(), vm, "data", v)
	require.NoError(t, err)
	require.NoError(t, h.ConfirmStandby(t.Context(), vm, "data", v))
	require.ErrorIs(t, h.Activate(t.Context(), vm, "data", v), errNotAttached, "before the switchover")
	_, err = h.OpenStandby(t.Context(), vm, "root", v)
	require.ErrorIs(t, err, errNotAttached)

	v = next(v, func(v *agentv1.AssignedVolume) { v.Standby, v.Migrated, v.SizeBytes = false, true, mib })
	require.NoError(t, h.Activate(t.Context(), vm, "data", v))
	_, err = h.OpenStandby(t.Context(), vm, "data", v)
	require.ErrorIs(t, err, errNotAttached, "after the switchover")
	source.Close()

	v = next(v, func(v *agentv1.AssignedVolume) { v.Standby, v.Migrated, v.AttachmentGeneration = true, false, 3 })
	h.assign(v)
	files.Close()
	_, err = h.Open(t.Context(), vm, "data", v)
	require.ErrorIs(t, err, errNotAttached, "two hosts may write to the volume")
	require.ErrorIs(t, h.TakeBack(t.Context(), vm, "data", v, 2), errNotAttached)
	v = next(v, func(v *agentv1.AssignedVolume) { v.Standby, v.Migrated, v.AttachmentGeneration = false, true, 4 })
	require.NoError(t, h.TakeBack(t.Context(), vm, "data", v, 2))
	status, err := other.Status(string(vol))
	require.NoError(t, err)
	require.EqualValues(t, 4, status.Attachment.Generation)
}
