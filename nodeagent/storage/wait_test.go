package storage

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestSnapshotBeforeFlattening requires a volume to be flattened that has a pending snapshot. The agent must not
// begin to flatten it, because the snapshot could then miss its deadline.
func TestSnapshotBeforeFlattening(t *testing.T) {
	h := newHost(t)
	v := h.fromImage()
	h.assign(v)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 1, Present: true, SizeBytes: 2 * mib})
	h.stop() // the test makes the steps itself
	group := wanted(1)
	// The host does not know the other volume of the group yet.
	group.GroupId, group.GroupVolumes = "g", []string{string(vol), string(vol2)}
	v = withSnapshots(flatten(v), group)
	h.assign(v)
	require.ErrorIs(t, h.step(t.Context(), v, false), errLater)
	status, err := h.Pools()[0].Status(string(vol))
	require.NoError(t, err)
	require.False(t, status.Flattened)
	v = withSnapshots(v)
	h.assign(v)
	require.NoError(t, h.step(t.Context(), v, false))
	status, err = h.Pools()[0].Status(string(vol))
	require.NoError(t, err)
	require.True(t, status.Flattened)
}

// TestVolumeFromSnapshotIsMadeByRun opens a volume that is not made from its snapshot yet. A VM's start is too short
// for the copy, so Open fails until Run has made the volume. Run copies only some snapshots at once, each with a time
// that depends on its size.
func TestVolumeFromSnapshotIsMadeByRun(t *testing.T) {
	h := newHost(t)
	v := withSnapshots(detached(), wanted(1))
	h.assign(v)
	h.seesSnapshot(vol, 1, cloud.SnapshotComplete)
	h.stop() // the test makes the steps itself
	restored := attach(&agentv1.AssignedVolume{
		VolumeId: string(vol2), Generation: 1, Pool: "local", SizeBytes: 2 * mib,
		Source: &agentv1.SnapshotSource{VolumeId: string(vol), SnapshotId: snapshotID(1)},
	})
	h.assign(v, restored)
	_, err := h.Open(t.Context(), vm, "data", restored)
	require.ErrorIs(t, err, errBeingMade)
	for range maxRestores {
		h.restoreSlots <- struct{}{}
	}
	require.ErrorIs(t, h.step(t.Context(), restored, false), volume.ErrInUse)
	<-h.restoreSlots
	require.NoError(t, h.step(t.Context(), restored, false))
	require.Len(t, h.restoreSlots, maxRestores-1, "the step has released its slot")
	files, err := h.Open(t.Context(), vm, "data", restored)
	require.NoError(t, err)
	files.Close()

	restored.SizeBytes = 1 << 40
	require.Equal(t, stepWithin+1024*copyPerGiB, timeOfStep(restored))
	require.Greater(t, timeOfStep(restored), 8*time.Hour)
	require.Equal(t, stepWithin, timeOfStep(detached()))
}

// TestVolumeIsNotDetachedWhileItIsOpened requires a volume to be detached after Open has returned its RBD image.
// Until the VM has opened the image, or has given up, the host must not report the attachment as flushed.
func TestVolumeIsNotDetachedWhileItIsOpened(t *testing.T) {
	h := newHost(t)
	v := attach(detached())
	h.assign(v)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 2, Present: true, SizeBytes: mib})
	h.stop() // the test makes the steps itself
	h.setUnconfirmed(vol, true)
	v = detach(v)
	h.assign(v)
	require.ErrorIs(t, h.step(t.Context(), v, false), volume.ErrInUse)
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 3, Present: true, SizeBytes: mib})
	require.NoError(t, h.Release(t.Context(), "local", vol, vm, 1))
	require.NoError(t, h.step(t.Context(), v, false))
	h.sees(cloud.VolumeObservation{Volume: vol, Generation: 3, Present: true, SizeBytes: mib, FlushedGeneration: 1})
}
