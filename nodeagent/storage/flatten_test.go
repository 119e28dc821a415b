package storage

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// fromImage returns the desired state of a detached volume over an image that is in the cache of the host.
func (h *host) fromImage() *agentv1.AssignedVolume {
	h.Helper()
	data := bytes.Repeat([]byte("image"), mib/5)
	sum := sha256.Sum256(data)
	name := hex.EncodeToString(sum[:])
	require.NoError(h, os.WriteFile(filepath.Join(h.dir, "images", name), data, 0o444))
	v := detached()
	v.SizeBytes = 2 * mib
	v.Image = &agentv1.AssignedImage{Sha256: name, SizeBytes: uint64(len(data)), Format: vmv1.ImageFormat_IMAGE_FORMAT_RAW}
	v.Format = vmv1.VolumeFormat_VOLUME_FORMAT_QCOW2
	return v
}

func flatten(want *agentv1.AssignedVolume) *agentv1.AssignedVolume {
	return next(want, func(v *agentv1.AssignedVolume) { v.Flatten, v.MustExist = true, true })
}

// TestFlattenDetached flattens a detached volume. It must be reported as flattened, with its new format, and a VM must
// be able to open it afterwards, also with the desired state from before.
func TestFlattenDetached(t *testing.T) {
	h := newHost(t)
	v := h.fromImage()
	h.assign(v)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 1, Present: true, SizeBytes: 2 * mib})
	v = flatten(v)
	h.assign(v)
	want := cloud.VolumeObservation{
		Volume: vol, Generation: 2, Present: true, SizeBytes: 2 * mib, Flattened: true, FlattenPercent: 100, Format: cloud.VolumeRaw,
	}
	h.sees(want)
	used, err := h.UsedImages()
	require.NoError(t, err)
	require.NotEmpty(t, used, "the control plane has not released the image yet")
	v = attach(v)
	v.Flatten, v.Image = false, nil
	h.assign(v)
	used, err = h.UsedImages()
	require.NoError(t, err)
	require.Empty(t, used)
	files, err := h.Open(t.Context(), vm, "data", v)
	require.NoError(t, err)
	require.Nil(t, files.Base)
	files.Close()
}

// TestOpenEndsFlattening opens a volume for a VM while the agent flattens the volume. The VM must not wait until the
// volume is flattened. When the VM has closed the volume, the agent must begin to flatten it again.
func TestOpenEndsFlattening(t *testing.T) {
	h := newHost(t)
	v := attach(h.fromImage())
	h.assign(v)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 2, Present: true, SizeBytes: 2 * mib})
	v = flatten(v)
	p, err := h.pool("local")
	require.NoError(t, err)
	h.stop() // the test makes the steps itself
	h.assign(v)

	// The first call of progress opens the volume.
	ctx, cancel := context.WithCancel(t.Context())
	require.True(t, h.setFlattening(vol, v, cancel))
	var files volume.Files
	opened := make(chan error, 1)
	began := false
	err = p.Flatten(ctx, string(vol), func(uint32) {
		if began {
			return
		}
		began = true
		go func() {
			var err error
			files, err = h.Open(t.Context(), vm, "data", v)
			opened <- err
		}()
		<-ctx.Done()
	})
	require.ErrorIs(t, err, context.Canceled)
	h.setFlattening(vol, v, nil)
	require.NoError(t, <-opened)
	require.NotNil(t, files.Base)
	require.ErrorIs(t, h.step(t.Context(), v, false), volume.ErrInUse, "QEMU flattens the volume while the VM has it open")

	h.FlattenProgress(vol, 40, errors.New("QEMU could not copy /secret/path"))
	require.ErrorIs(t, h.step(t.Context(), v, false), volume.ErrInUse)
	h.sees(cloud.VolumeObservation{
		Volume: vol, Generation: 3, Present: true, SizeBytes: 2 * mib, FlattenPercent: 40, Error: "QEMU could not copy (file)",
	})
	files.Close()
	require.ErrorIs(t, h.step(t.Context(), v, false), volume.ErrInUse, "the VM has not released the volume")
	require.NoError(t, h.Release(t.Context(), "local", vol, vm, 1))
	require.NoError(t, h.step(t.Context(), v, false))
	h.sees(cloud.VolumeObservation{
		Volume: vol, Generation: 3, Present: true, SizeBytes: 2 * mib, FlushedGeneration: 1, Flattened: true, FlattenPercent: 100, Format: cloud.VolumeRaw,
	})

	// A change of the desired state also ends the flattening.
	ctx, cancel = context.WithCancel(t.Context())
	require.True(t, h.setFlattening(vol, v, cancel))
	newer := next(v, func(v *agentv1.AssignedVolume) { v.SizeBytes = 3 * mib })
	h.assign(newer)
	require.Error(t, ctx.Err())
	require.False(t, h.setFlattening(vol, v, cancel), "the desired state has changed")
}
