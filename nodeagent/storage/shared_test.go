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
