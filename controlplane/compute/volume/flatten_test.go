package volume

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestFlatten flattens a volume, which must release its image in the transaction that applies the host's report. The
// host must receive the request, and must not be able to fetch the image afterwards.
func TestFlatten(t *testing.T) {
	w := newWorld(t)
	host := w.host("h1", 10)
	img := w.image(1, 1<<30)
	out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: "root", SizeGiB: 2}, img, [32]byte{})
	require.NoError(t, err)
	v := out.Volume
	used := func() bool {
		t.Helper()
		err := w.Store.Local(func(r *store.View) error { return image.CheckUnused(r, img, acme.Org) })
		if err != nil {
			require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
			require.ErrorContains(t, err, string(v.ID))
		}
		return err != nil
	}
	fetched := func() (ok bool) {
		require.NoError(t, w.Store.Local(func(r *store.View) (err error) {
			ok, err = w.volumes.VolumesUseImage(r, host, v.Image.SHA256)
			return err
		}))
		return ok
	}
	flatten := func() cloud.Volume {
		t.Helper()
		out, err := w.volumes.Flatten(w.as(acme, ""), acme, v.ID, [32]byte{})
		require.NoError(t, err)
		return out.Volume
	}
	require.True(t, flatten().Flatten, "the request is kept until the volume has a host")
	require.NoError(t, w.attach(v.ID, vmA, host))
	require.True(t, w.assigned(host)[0].Flatten)
	require.Equal(t, flatten(), *w.get(v.ID), "a repeat changes nothing")
	generation := w.get(v.ID).Generation
	require.Equal(t, 1, w.report(host, cloud.VolumeObservation{Volume: v.ID, Generation: generation, Present: true, FlattenPercent: 33}))
	require.Equal(t, 0, w.report(host, cloud.VolumeObservation{Volume: v.ID, Generation: generation, Present: true, FlattenPercent: 34}))
	require.True(t, used())
	require.True(t, fetched())

	w.report(host, cloud.VolumeObservation{Volume: v.ID, Generation: generation - 1, Present: true, Flattened: true})
	require.True(t, used(), "a report of an older desired state")
	require.Equal(t, 1, w.report(host, cloud.VolumeObservation{
		Volume: v.ID, Generation: generation, Present: true, Flattened: true, Format: cloud.VolumeQCOW2,
	}))
	require.False(t, used())
	require.False(t, fetched())
	require.Nil(t, w.assigned(host)[0].Image)
	require.False(t, w.assigned(host)[0].Flatten)
	require.False(t, flatten().Flatten, "it has no image any more")
	w.release(v.ID, vmA)
	_, err = w.volumes.Delete(w.as(acme, ""), acme, v.ID, [32]byte{})
	require.NoError(t, err)

	_, err = w.volumes.Flatten(w.as(other, ""), other, v.ID, [32]byte{})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	_, err = w.volumes.Flatten(w.as(acme, ""), acme, "x", [32]byte{})
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
}
