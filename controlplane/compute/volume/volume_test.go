package volume

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestCreateVolume checks the record of a new volume, and the requests that are refused.
func TestCreateVolume(t *testing.T) {
	w := newWorld(t)
	v := w.create("data", 3)
	require.Equal(t, []any{cloud.VolumeAvailable, "local", "local", cloud.DriverManaged, cloud.VolumeRaw, "ada"},
		[]any{v.Status(), v.Class, v.Pool, v.Driver, v.Format, v.CreatedBy})
	require.Equal(t, v, w.get(v.ID))

	for name, c := range map[string]struct {
		v    cloud.Volume
		i    cloud.ImageID
		kind fault.Kind
	}{
		"a name that is used":   {cloud.Volume{Name: "data", SizeGiB: 1}, "", fault.AlreadyExists},
		"an unknown class":      {cloud.Volume{Name: "a", SizeGiB: 1, Class: "none"}, "", fault.NotFound},
		"another driver":        {cloud.Volume{Name: "a", SizeGiB: 1, Driver: cloud.DriverRBD}, "", fault.InvalidArgument},
		"an unknown image":      {cloud.Volume{Name: "a", SizeGiB: 1}, cloud.ImageID(vmA), fault.NotFound},
		"an image as a path":    {cloud.Volume{Name: "a", SizeGiB: 1}, "/etc/passwd", fault.InvalidArgument},
		"an image too large":    {cloud.Volume{Name: "a", SizeGiB: 1}, w.image(1, 2<<30), fault.InvalidArgument},
		"metadata that is ours": {cloud.Volume{Name: "a", SizeGiB: 1, Metadata: map[string]string{cloud.VolumeReason: "x"}}, "", fault.InvalidArgument},
	} {
		_, err := w.volumes.Create(w.as(acme, ""), acme, c.v, c.i, [32]byte{})
		require.True(t, fault.Is(err, c.kind), "%s: %v", name, err)
	}
	_, err := w.volumes.Get(t.Context(), other, v.ID)
	require.True(t, fault.Is(err, fault.NotFound), "another tenant must not see the volume")
	_, err = w.volumes.Delete(w.as(other, ""), other, v.ID, [32]byte{})
	require.True(t, fault.Is(err, fault.NotFound), "another tenant must not delete the volume")

	first, err := w.volumes.Create(w.as(acme, "key"), acme, cloud.Volume{Name: "once", SizeGiB: 1}, "", [32]byte{1})
	require.NoError(t, err)
	again, err := w.volumes.Create(w.as(acme, "key"), acme, cloud.Volume{Name: "once", SizeGiB: 1}, "", [32]byte{1})
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, first.Volume.ID, again.Volume.ID)
}

// TestListVolumes lists volumes by pages and with filters.
func TestListVolumes(t *testing.T) {
	w := newWorld(t)
	host := w.host("h1", 10)
	a, b := w.create("a", 1), w.create("b", 1)
	require.NoError(t, w.attach(b.ID, vmA, host))
	names := func(size int32, token string, f Filter) (out []string, next string) {
		all, next, err := w.volumes.List(t.Context(), acme, size, token, f)
		require.NoError(t, err)
		for _, v := range all {
			out = append(out, v.Name)
		}
		return out, next
	}
	first, next := names(1, "", Filter{})
	second, _ := names(1, next, Filter{})
	require.Equal(t, []string{"a", "b"}, append(first, second...))
	for want, f := range map[string]Filter{"a": {Status: "AVAILABLE"}, "b": {VM: string(vmA)}} {
		got, _ := names(0, "", f)
		require.Equal(t, []string{want}, got)
	}
	got, _ := names(0, "", Filter{Class: "none"})
	require.Empty(t, got)
	all, _, err := w.volumes.List(t.Context(), other, 0, "", Filter{})
	require.NoError(t, err)
	require.Empty(t, all)
	require.NotEqual(t, a.ID, b.ID)
}

// TestVolumeQuota checks the quotas on the number and the total size of volumes.
func TestVolumeQuota(t *testing.T) {
	w := newWorld(t)
	two, five := uint64(2), uint64(5)
	w.Update(func(tx *store.Tx) error {
		return tenant.SetQuota(tx, acme.Project, tenant.Quota{Volumes: &two, VolumeGiB: &five})
	})
	a := w.create("a", 3)
	_, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: "b", SizeGiB: 3}, "", [32]byte{})
	require.ErrorContains(t, err, "allows 5 volume_gib")
	w.create("b", 1)
	_, err = w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: "c", SizeGiB: 1}, "", [32]byte{})
	require.ErrorContains(t, err, "allows 2 volumes")
	_, err = w.volumes.Resize(w.as(acme, ""), acme, a.ID, 5, [32]byte{})
	require.ErrorContains(t, err, "allows 5 volume_gib")
	_, err = w.volumes.Resize(w.as(acme, ""), acme, a.ID, 4, [32]byte{})
	require.NoError(t, err)
	_, err = w.volumes.Delete(w.as(acme, ""), acme, a.ID, [32]byte{})
	require.NoError(t, err)
	w.create("c", 4)
}

// TestConcurrentVolumeQuota makes 100 creates at the same time with a quota for 7 volumes and 12 GiB. Volumes of 2 GiB
// must use the quota of 12 GiB exactly.
func TestConcurrentVolumeQuota(t *testing.T) {
	w := newWorld(t)
	number, size := uint64(7), uint64(12)
	w.Update(func(tx *store.Tx) error {
		return tenant.SetQuota(tx, acme.Project, tenant.Quota{Volumes: &number, VolumeGiB: &size})
	})
	w.Quorum.Lose = func(after bool) bool { // delay commits, so that concurrent transactions conflict
		if !after {
			time.Sleep(2 * time.Millisecond)
		}
		return false
	}
	errs := make([]error, 100)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			v := cloud.Volume{Name: fmt.Sprintf("v%d", i), SizeGiB: 2}
			_, errs[i] = w.volumes.Create(w.as(acme, ""), acme, v, "", [32]byte{})
		})
	}
	wg.Wait()
	made := 0
	for _, err := range errs {
		if err == nil {
			made++
			continue
		}
		require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	}
	require.Equal(t, 6, made, "volumes exceed the quota, or do not use it")
	all, _, err := w.volumes.List(t.Context(), acme, 0, "", Filter{})
	require.NoError(t, err)
	require.Len(t, all, made)
}

// TestVolumeOnItsHost attaches a volume, which binds it to the host, then enlarges, detaches and deletes it. It checks
// the volume's records and the desired state that the host receives.
func TestVolumeOnItsHost(t *testing.T) {
	w := newWorld(t)
	host := w.host("h1", 10)
	v := w.create("data", 6)
	require.Empty(t, w.assigned(host), "an unbound volume is on no host")
	require.NoError(t, w.attach(v.ID, vmA, host))
	require.Equal(t, map[string]uint64{"local": 6}, w.Node(host).PoolAllocated)
	sent := w.assigned(host)[0]
	require.Equal(t, []any{uint64(6 << 30), string(vmA), "data", uint64(1), false, "local"},
		[]any{sent.SizeBytes, sent.VmId, sent.DiskId, sent.AttachmentGeneration, sent.MustExist, sent.Pool})

	require.Equal(t, 1, w.report(host, cloud.VolumeObservation{Volume: v.ID, Generation: sent.Generation, Present: true}))
	require.Zero(t, w.report(host, cloud.VolumeObservation{Volume: v.ID, Generation: sent.Generation, Present: true}), "an equal report changes nothing")
	require.Zero(t, w.report("00000000-0000-7000-a000-000000000009", cloud.VolumeObservation{Volume: v.ID, Generation: 9, Error: "mine"}),
		"a report of another host is ignored")
	require.True(t, w.assigned(host)[0].MustExist)

	_, err := w.volumes.Resize(w.as(acme, ""), acme, v.ID, 11, [32]byte{})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "has 4 GiB free in the storage pool local, 5 needed")
	_, err = w.volumes.Resize(w.as(acme, ""), acme, v.ID, 8, [32]byte{})
	require.NoError(t, err)
	require.EqualValues(t, 8<<30, w.assigned(host)[0].SizeBytes)
	_, err = w.volumes.Delete(w.as(acme, ""), acme, v.ID, [32]byte{})
	require.ErrorContains(t, err, "attached to VM "+string(vmA))

	w.release(v.ID, vmB)
	require.Equal(t, vmA, w.get(v.ID).VM, "only the VM that has the volume can release it")
	w.release(v.ID, vmA)
	require.Equal(t, cloud.VolumeInUse, w.get(v.ID).Status())
	require.ErrorContains(t, w.attach(v.ID, vmB, host), "has not flushed")
	w.report(host, cloud.VolumeObservation{Volume: v.ID, Generation: w.get(v.ID).Generation, Present: true, FlushedGeneration: 1})
	require.NoError(t, w.attach(v.ID, vmB, host))
	w.release(v.ID, vmB)

	generation := w.get(v.ID).Generation
	_, err = w.volumes.Delete(w.as(acme, ""), acme, v.ID, [32]byte{})
	require.NoError(t, err)
	sent = w.assigned(host)[0]
	require.True(t, sent.Deleted)
	require.Greater(t, sent.Generation, generation)
	w.report(host, cloud.VolumeObservation{Volume: v.ID, Generation: generation})
	require.Len(t, w.assigned(host), 1, "a report from before the deletion must not end it")
	w.report(host, cloud.VolumeObservation{Volume: v.ID, Generation: sent.Generation, Present: true})
	require.Len(t, w.assigned(host), 1, "the host still has the bytes")
	require.Equal(t, map[string]uint64{"local": 8}, w.Node(host).PoolAllocated)
	w.report(host, cloud.VolumeObservation{Volume: v.ID, Generation: sent.Generation})
	require.Empty(t, w.assigned(host))
	require.Empty(t, w.Node(host).PoolAllocated)
}

// TestFailedDeletion deletes a MANAGED volume and an RBD volume while their host cannot look into the pools. The report of
// such a host has an error, and the volume as absent. The room in the pool, the Bound record and the class of the RBD
// volume must be kept until the host has deleted the bytes.
func TestFailedDeletion(t *testing.T) {
	w := newWorld(t)
	w.rbdClass()
	host := w.AddHost("h1", cloud.Capacity{VCPUs: 8, MemoryMiB: 8192, StorageGiB: 100}, func(n *cloud.Node) {
		n.StoragePools, n.RBD = []cloud.StoragePool{{Name: "local", AllocatableGiB: 10}}, true
	})
	file := w.create("file", 6)
	require.NoError(t, w.attach(file.ID, vmA, host))
	w.release(file.ID, vmA)
	image, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: "image", SizeGiB: 3, Class: "ceph"}, "", [32]byte{})
	require.NoError(t, err)
	w.place(host)
	for _, id := range []cloud.VolumeID{file.ID, image.Volume.ID} {
		_, err := w.volumes.Delete(w.as(acme, ""), acme, id, [32]byte{})
		require.NoError(t, err)
	}
	report := func(why string) {
		for _, sent := range w.assigned(host) {
			w.report(host, cloud.VolumeObservation{Volume: cloud.VolumeID(sent.VolumeId), Generation: sent.Generation, Error: why})
		}
	}
	report("the pool cannot be opened")
	require.Len(t, w.assigned(host), 2, "the host has not deleted the bytes")
	require.Equal(t, map[string]uint64{"local": 6}, w.Node(host).PoolAllocated)
	require.ErrorContains(t, w.deleteClass(), "has volumes")
	report("")
	require.Empty(t, w.assigned(host))
	require.Empty(t, w.Node(host).PoolAllocated)
	require.NoError(t, w.deleteClass())
}

// TestPlacementOfVolumes checks the requirements of several volumes on the host of a VM.
func TestPlacementOfVolumes(t *testing.T) {
	w := newWorld(t)
	h1, h2 := w.host("h1", 10), w.host("h2", 10)
	a, b, c := w.create("a", 1), w.create("b", 1), w.create("c", 7)
	placement := func(ids ...cloud.VolumeID) (p Placement, err error) {
		w.Update(func(tx *store.Tx) error { p, err = PlacementOf(tx, acme, ids); return nil })
		return p, err
	}
	require.NoError(t, w.attach(a.ID, vmA, h1))
	require.NoError(t, w.attach(b.ID, vmB, h2))
	_, err := placement(a.ID, b.ID)
	require.ErrorContains(t, err, "volumes a and b are on different hosts")
	p, err := placement(a.ID, c.ID)
	require.NoError(t, err)
	require.Equal(t, Placement{Node: h1, Pools: map[string]uint64{"local": 7}}, p)
	require.Empty(t, p.Shortage(w.Node(h1)))
	require.Equal(t, "does not have the VM's volumes", p.Shortage(w.Node(h2)))
	_, err = placement(cloud.VolumeID(vmA))
	require.True(t, fault.Is(err, fault.NotFound))
	silent := w.AddHost("h3", cloud.Capacity{})
	require.ErrorContains(t, w.attach(c.ID, vmA, silent), "does not serve the storage pool local")
	require.Empty(t, w.get(c.ID).Node)
}

// TestVolumeFromImage checks that an image cannot be deleted while a volume uses it, and that the volume's host may
// read the image.
func TestVolumeFromImage(t *testing.T) {
	w := newWorld(t)
	host, id := w.host("h1", 10), w.image(7, 1<<30)
	out, err := w.volumes.Create(w.as(acme, ""), acme, cloud.Volume{Name: "root", SizeGiB: 2}, id, [32]byte{})
	require.NoError(t, err)
	v := &out.Volume
	require.Equal(t, cloud.VolumeQCOW2, v.Format)
	sum := v.Image.SHA256
	reads := func() (yes bool) {
		require.NoError(t, w.Store.Local(func(r *store.View) (err error) { yes, err = w.volumes.VolumesUseImage(r, host, sum); return err }))
		return yes
	}
	require.False(t, reads())
	require.NoError(t, w.attach(v.ID, vmA, host))
	require.True(t, reads())
	require.Equal(t, sum, w.assigned(host)[0].Image.Sha256)
	images := image.New(image.Options{Store: w.Store, Commands: w.Commands, Log: w.Log})
	require.ErrorContains(t, images.Delete(w.as(acme, ""), acme.Org, id, [32]byte{}), "used by volume "+string(v.ID))
	w.release(v.ID, vmA)
	_, err = w.volumes.Delete(w.as(acme, ""), acme, v.ID, [32]byte{})
	require.NoError(t, err)
	require.False(t, reads())
	require.NoError(t, images.Delete(w.as(acme, ""), acme.Org, id, [32]byte{}))
}

// TestUpdateVolume changes the name, labels, metadata and limits of a volume.
func TestUpdateVolume(t *testing.T) {
	w := newWorld(t)
	host := w.host("h1", 10)
	v := w.create("data", 1)
	w.create("taken", 1)
	require.NoError(t, w.attach(v.ID, vmA, host))
	update := func(name string, metadata map[string]string) (Result, error) {
		return w.volumes.Update(w.as(acme, ""), acme, v.ID, name, metadata, map[string]string{"tier": "gold"}, [32]byte{})
	}
	_, err := update("taken", nil)
	require.True(t, fault.Is(err, fault.AlreadyExists))
	_, err = update("", map[string]string{"trivet/max-iop": "500"})
	require.True(t, fault.Is(err, fault.InvalidArgument), "a misspelt key must be refused: %v", err)
	out, err := update("logs", map[string]string{cloud.MaxIOPS: "500"})
	require.NoError(t, err)
	require.Equal(t, []any{"logs", "gold"}, []any{out.Volume.Name, out.Volume.Labels["tier"]})
	require.EqualValues(t, 500, w.assigned(host)[0].MaxIops)
	revision := w.get(v.ID).UpdatedAt
	w.Clock.Advance(1000)
	_, err = update("", nil)
	require.NoError(t, err)
	require.Equal(t, revision, w.get(v.ID).UpdatedAt, "a repeated update must not write")
	w.create("data", 1)
}

// TestProjectWithVolumes checks that a project with volumes cannot be deleted.
func TestProjectWithVolumes(t *testing.T) {
	w := newWorld(t)
	w.create("data", 1)
	w.Update(func(tx *store.Tx) error {
		require.ErrorContains(t, CheckNoVolumes(tx, acme), "has volume data")
		require.NoError(t, CheckNoVolumes(tx, other))
		return nil
	})
}
