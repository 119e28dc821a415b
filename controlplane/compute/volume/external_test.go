package volume

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// registerAs registers the RBD image called image as a volume of the tenant t.
func (w *world) registerAs(t cloud.Tenant, name, class, image string) (*cloud.Volume, error) {
	out, err := w.volumes.RegisterExternal(w.asAdmin(), t, cloud.Volume{Name: name, SizeGiB: 5, Class: class}, RBDImage{Image: image}, [32]byte{})
	return &out.Volume, err
}

// TestRegisterExternalVolume registers an RBD image, and checks its life until the image can be registered again. At no
// time may a second volume have the image, and the host must never be asked to make or delete the image.
func TestRegisterExternalVolume(t *testing.T) {
	w := newWorld(t)
	w.rbdClass()
	a, b := w.rbdHost("a", ""), w.rbdHost("b", "")
	_, err := w.classes.Create(w.asAdmin(), cloud.StorageClass{
		Name: "again", Driver: cloud.DriverRBD, RBD: &cloud.RBDPool{
			FSID: "0190a000-0000-4000-8000-000000000001", Monitors: []string{"192.0.2.9"}, Pool: "vms", User: "other",
		},
	}, cephKey, [32]byte{})
	require.NoError(t, err)
	refused := func(why string) {
		t.Helper()
		for _, tenant := range []cloud.Tenant{acme, other} {
			for _, class := range []string{"ceph", "again"} {
				_, err := w.registerAs(tenant, "second", class, "disk")
				require.True(t, fault.Is(err, fault.AlreadyExists), "two volumes have the image (%s): %v", class, err)
				require.ErrorContains(t, err, why)
			}
		}
	}
	v, err := w.registerAs(acme, "data", "ceph", "disk")
	require.NoError(t, err)
	require.Equal(t, []any{cloud.DriverRBD, cloud.VolumePending, "disk"}, []any{v.Driver, v.Status(), convert.Volume(v).GetBacking().GetRbd().GetImage()})
	refused("is registered as volume data in project web")
	_, err = w.registerAs(acme, "data", "ceph", "disk-2")
	require.True(t, fault.Is(err, fault.AlreadyExists), "the name of the volume is taken")
	foreign, err := w.registerAs(other, "data", "again", "disk-3")
	require.NoError(t, err)
	_, err = w.volumes.Delete(w.as(other, ""), other, foreign.ID, [32]byte{})
	require.NoError(t, err)
	_, err = w.registerAs(acme, "third", "ceph", "disk-3")
	require.NoError(t, err, "no host has ever had the deleted volume of this image")

	w.place(a)
	sent := w.assigned(a)[0]
	require.Equal(t, []any{"disk", true, true, uint64(5) << 30}, []any{sent.GetExternalImage(), sent.GetCheckImage(), sent.GetMustExist(), sent.GetSizeBytes()})
	require.ErrorContains(t, w.attach(v.ID, vmA, a), "no host has checked its RBD image")
	w.report(a, cloud.VolumeObservation{Volume: v.ID, Generation: w.get(v.ID).Generation, Error: "the Ceph pool has no RBD image disk"})
	require.Equal(t, cloud.VolumeError, w.get(v.ID).Status())
	w.place(b)
	w.report(b, cloud.VolumeObservation{Volume: v.ID, Generation: w.get(v.ID).Generation, Present: true})
	require.Equal(t, cloud.VolumeAvailable, w.get(v.ID).Status())
	for _, one := range w.assigned(b) {
		require.Equal(t, one.GetVolumeId() != string(v.ID), one.GetCheckImage())
		require.True(t, one.GetMustExist())
	}
	require.NoError(t, w.attach(v.ID, vmA, a))
	refused("is registered as volume data")
	w.release(v.ID, vmA)
	_, err = w.volumes.Resize(w.as(acme, ""), acme, v.ID, 6, [32]byte{})
	require.NoError(t, err)
	_, err = w.volumes.Flatten(w.as(acme, ""), acme, v.ID, [32]byte{})
	require.ErrorContains(t, err, "only Ceph's program rbd can flatten")
	_, err = w.volumes.Update(w.as(acme, ""), acme, v.ID, "", map[string]string{cloud.SnapshotEvery: "24h"}, nil, [32]byte{})
	require.ErrorContains(t, err, "registered volumes cannot have snapshots")

	_, err = w.volumes.Delete(w.as(acme, ""), acme, v.ID, [32]byte{})
	require.NoError(t, err)
	refused("no host has released the image yet")
	require.ErrorContains(t, w.deleteClass(), "has volumes")
	sent = w.assigned(a)[0]
	require.Equal(t, []any{true, "disk"}, []any{sent.GetDeleted(), sent.GetExternalImage()})
	require.Equal(t, 1, w.report(a, cloud.VolumeObservation{Volume: v.ID, Generation: sent.GetGeneration()}))
	again, err := w.registerAs(other, "mine", "again", "disk")
	require.NoError(t, err)
	require.NotEqual(t, v.ID, again.ID)
}

// TestRegisterRefused checks registrations that must be refused. None of them may leave a record.
func TestRegisterRefused(t *testing.T) {
	w := newWorld(t)
	w.rbdClass()
	good := RBDImage{Cluster: "0190a000-0000-4000-8000-000000000001", Pool: "vms", Image: "disk"}
	for name, c := range map[string]struct {
		edit func(v *cloud.Volume, at *RBDImage)
		kind fault.Kind
		why  string
	}{
		"pool":     {func(_ *cloud.Volume, at *RBDImage) { at.Pool = "other" }, fault.InvalidArgument, "rbd.pool"},
		"cluster":  {func(_ *cloud.Volume, at *RBDImage) { at.Cluster = "x" }, fault.InvalidArgument, "rbd.cluster_id"},
		"path":     {func(_ *cloud.Volume, at *RBDImage) { at.Image = "other/disk" }, fault.InvalidArgument, "rbd.image"},
		"snapshot": {func(_ *cloud.Volume, at *RBDImage) { at.Image = "disk@snap" }, fault.InvalidArgument, "rbd.image"},
		"own": {
			func(_ *cloud.Volume, at *RBDImage) { at.Image = "volume-0190a000-0000-7000-8000-00000000000a" },
			fault.InvalidArgument, "are reserved for images that Trivet makes",
		},
		"managed":  {func(v *cloud.Volume, _ *RBDImage) { v.Class = "local" }, fault.FailedPrecondition, "driver MANAGED cannot be registered"},
		"default":  {func(v *cloud.Volume, _ *RBDImage) { v.Class = "" }, fault.FailedPrecondition, "driver MANAGED cannot be registered"},
		"driver":   {func(v *cloud.Volume, _ *RBDImage) { v.Class, v.Driver = "local", cloud.DriverRBD }, fault.InvalidArgument, "driver"},
		"class":    {func(v *cloud.Volume, _ *RBDImage) { v.Class = "none" }, fault.NotFound, "no storage class none"},
		"size":     {func(v *cloud.Volume, _ *RBDImage) { v.SizeGiB = 0 }, fault.InvalidArgument, "size_gib"},
		"name":     {func(v *cloud.Volume, _ *RBDImage) { v.Name = "" }, fault.InvalidArgument, "name"},
		"metadata": {func(v *cloud.Volume, _ *RBDImage) { v.Metadata = map[string]string{cloud.SnapshotEvery: "24h"} }, fault.FailedPrecondition, "snapshots"},
	} {
		v, at := cloud.Volume{Name: "data", SizeGiB: 5, Class: "ceph"}, good
		c.edit(&v, &at)
		_, err := w.volumes.RegisterExternal(w.asAdmin(), acme, v, at, [32]byte{})
		require.True(t, fault.Is(err, c.kind), "%s: an image outside of the rules was registered: %v", name, err)
		require.ErrorContains(t, err, c.why, name)
	}
	_, err := w.volumes.RegisterExternal(w.asAdmin(), acme, cloud.Volume{Name: "data", SizeGiB: 5, Class: "ceph"}, good, [32]byte{})
	require.NoError(t, err, "a refused registration left a record")
}
