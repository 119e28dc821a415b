package cloud

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestExternalImageNames checks which RBD images can be registered. A name must not select another pool, a namespace or
// a snapshot, and must not be the name of an image that Trivet has made.
func TestExternalImageNames(t *testing.T) {
	const id, sum = "0190a000-0000-7000-8000-00000000000a", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
	for _, name := range []string{"disk", "vm-100-disk-0", "A.b_c-1", "volume", "images", "my-volume-" + id, strings.Repeat("x", 96)} {
		require.NoError(t, CheckExternalImage(name), name)
	}
	for _, name := range []string{
		"", ".", "..", ".disk", "../disk", "a/b", "other/disk", "pool/namespace/disk", "disk@snap", "disk:conf=/etc/x", "disk\x00", "a b", "disk\n",
		"d\u00efsk", strings.Repeat("x", 97),
	} {
		err := CheckExternalImage(name)
		require.True(t, fault.Is(err, fault.InvalidArgument), "%q: %v", name, err)
		require.ErrorContains(t, err, "rbd.image")
	}
	for _, name := range []string{"volume-" + id, "image-" + sum, "image-" + sum + ".partial", "volume-backup"} {
		err := CheckExternalImage(name)
		require.True(t, fault.Is(err, fault.InvalidArgument), "an image that Trivet has made was accepted: %s", name)
		require.ErrorContains(t, err, "are reserved for images that Trivet makes")
	}
}

// TestRegisteredVolume checks that a registered volume cannot be attached or resized before a host has checked its
// image, and that it can never have snapshots.
func TestRegisteredVolume(t *testing.T) {
	v := Volume{ID: "v", Name: "data", SizeGiB: 1, Driver: DriverRBD, ExternalImage: "disk"}
	require.Equal(t, "disk", v.RBDImage())
	require.Equal(t, VolumePending, v.Status())
	err := v.Attach("a", "disk", "h1")
	f, ok := fault.From(err)
	require.True(t, ok, "a volume was attached before its image was checked")
	require.Equal(t, "VOLUME_NOT_CHECKED", f.Reason)
	_, err = v.Resize(2)
	require.ErrorContains(t, err, "no host has checked")
	_, err = v.Resize(1)
	require.NoError(t, err, "the size does not change")
	require.True(t, v.Observe(VolumeObservation{Generation: 9, Error: "the image is missing"}))
	require.Equal(t, VolumeError, v.Status())
	_, ok = fault.From(v.Attach("a", "disk", "h1"))
	require.True(t, ok, "a volume was attached before its image was checked")
	require.True(t, v.Observe(VolumeObservation{Generation: 9, Present: true}))
	require.Equal(t, VolumeAvailable, v.Status())
	require.NoError(t, v.Attach("a", "disk", "h1"))
	_, err = v.Resize(2)
	require.NoError(t, err)
	require.ErrorContains(t, v.CheckSnapshots(), "registered volumes cannot have snapshots")
}
