package cloud

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestVolumeHasOneHolder attaches and detaches a volume, and tries every attachment that must be refused.
func TestVolumeHasOneHolder(t *testing.T) {
	v := Volume{Name: "data", SizeGiB: 1}
	require.Equal(t, VolumeAvailable, v.Status())
	require.NoError(t, v.Attach("a", "disk", "h1"))
	require.Equal(t, []any{uint64(1), uint64(0), uint64(1)}, []any{v.AttachmentGeneration, v.FlushedGeneration, v.Generation}, "the attachment generation must grow by 1")
	require.Equal(t, VolumeInUse, v.Status())

	// The VM is stopped, and the host has flushed the volume. The VM still has it.
	require.True(t, v.Observe(VolumeObservation{Generation: v.Generation, Present: true, FlushedGeneration: 1}))
	err := v.Attach("b", "disk", "h1")
	f, ok := fault.From(err)
	require.True(t, ok, "a second VM got the volume")
	require.Equal(t, "VOLUME_IN_USE", f.Reason)
	require.ErrorContains(t, err, "attached to VM a")

	v.Detach()
	require.Equal(t, VolumeAvailable, v.Status())
	_, ok = fault.From(v.Attach("b", "disk", "h2"))
	require.True(t, ok, "a volume was attached on another host than its own")
	require.NoError(t, v.Attach("b", "disk", "h1"))
	require.EqualValues(t, 2, v.AttachmentGeneration, "the attachment generation must grow by 1")

	v.Detach()
	require.Equal(t, VolumeInUse, v.Status(), "the host has not flushed the volume")
	f, ok = fault.From(v.Attach("c", "disk", "h1"))
	require.True(t, ok, "a volume was attached before it was flushed")
	require.Equal(t, "VOLUME_NOT_FLUSHED", f.Reason)
}

// TestSharedPoolOfHost checks which hosts can have a volume of a shared pool.
func TestSharedPoolOfHost(t *testing.T) {
	n := Node{StoragePools: []StoragePool{{Name: "local", ID: "b"}, {Name: "nfs", ID: "a", Shared: true}}}
	require.Equal(t, []string{"a", "", ""}, []string{n.SharedPoolID("nfs"), n.SharedPoolID("local"), n.SharedPoolID("other")})
	require.Empty(t, n.LacksSharedPool("nfs", "a"))
	require.Contains(t, n.LacksSharedPool("nfs", "c"), `another directory as the storage pool nfs: the pool ID there is "a", and that of the volume is "c"`)
	require.Contains(t, n.LacksSharedPool("local", "b"), "does not have `shared: true`")
	require.Contains(t, n.LacksSharedPool("other", "a"), "does not serve")
}

// TestRBDVolumeMoves checks when a volume of the driver RBD can get another host.
func TestRBDVolumeMoves(t *testing.T) {
	v := Volume{Name: "data", SizeGiB: 1, Driver: DriverRBD}
	require.Equal(t, VolumePending, v.Status())
	require.True(t, v.Move("h1"), "a new volume gets a host")
	require.False(t, v.Move("h1"))
	v.Observe(VolumeObservation{Generation: 1, Present: true})
	require.Equal(t, VolumeAvailable, v.Status())
	require.NoError(t, v.Attach("a", "disk", "h2"), "it can be attached on every host")
	require.Equal(t, NodeID("h2"), v.Node)
	require.False(t, v.Move("h3"), "a volume moved although a VM has it")
	v.Detach()
	require.False(t, v.Move("h3"), "a volume moved before it was flushed")
	_, refused := fault.From(v.Attach("b", "disk", "h3"))
	require.True(t, refused, "a volume was attached before it was flushed")
	v.Observe(VolumeObservation{Generation: v.Generation, Present: true, FlushedGeneration: 1})
	require.True(t, v.Move("h3"))
	require.NoError(t, v.Attach("b", "disk", "h1"))
	require.EqualValues(t, 2, v.AttachmentGeneration)
	managed := Volume{Name: "data", SizeGiB: 1, Driver: DriverManaged}
	require.False(t, managed.Move("h1"), "a volume of the driver MANAGED does not move")
}

// TestSharedVolumeOfReturnedHost checks that a volume in a shared pool which a lost host has flushed after its return is an
// ordinary volume again: it does not move while the next VM has it.
func TestSharedVolumeOfReturnedHost(t *testing.T) {
	v := Volume{Name: "data", SizeGiB: 1, Driver: DriverManaged, PoolID: "p"}
	require.NoError(t, v.Attach("a", "disk", "h1"))
	v.Ending = true // the host is lost
	v.Detach()      // the VM is deleted
	require.True(t, v.HostRemoved)
	v.Observe(VolumeObservation{Generation: v.Generation, Present: true, FlushedGeneration: 1}) // the host has come back
	require.NoError(t, v.Attach("b", "disk", "h1"))
	require.False(t, v.Move("h2"), "a volume moved although a VM has it")

	v.HostRemoved = true // as a record of a version that kept it after the flush
	v.FlushedGeneration = v.AttachmentGeneration
	require.True(t, v.Observe(VolumeObservation{Generation: v.Generation, FlushedGeneration: v.FlushedGeneration}), "the record is repaired")
	require.False(t, v.HostRemoved)
}

// TestVolumeReports checks which fields of a volume's record the reports of a host change.
func TestVolumeReports(t *testing.T) {
	v := Volume{Name: "data", SizeGiB: 1}
	require.NoError(t, v.Attach("a", "disk", "h1"))
	require.True(t, v.Observe(VolumeObservation{Generation: 1, Error: "no space"}))
	require.False(t, v.Observe(VolumeObservation{Generation: 1, Error: "no space"}), "an equal report changes nothing")
	require.Equal(t, "no space", v.LastError)
	require.False(t, v.Observe(VolumeObservation{Generation: 0}), "a report about an older generation must not remove the error")

	v.Observe(VolumeObservation{Generation: 1, FlushedGeneration: 9, Present: true})
	require.EqualValues(t, 1, v.FlushedGeneration, "a generation that was not granted cannot be flushed")
	v.Observe(VolumeObservation{Generation: 1})
	require.True(t, v.Present, "a volume that was made stays marked as made")
	require.EqualValues(t, 1, v.FlushedGeneration, "the flushed generation must not decrease")

	v.Detach()
	v.Observe(VolumeObservation{Generation: v.Generation, Error: "lost"})
	require.Equal(t, VolumeError, v.Status())
}

// TestVolumeFlatten flattens a volume. The volume must keep its image until its host has reported it as flattened, and
// the progress must be recorded in few steps that do not go back.
func TestVolumeFlatten(t *testing.T) {
	blank := Volume{Name: "data", SizeGiB: 1}
	require.False(t, blank.RequestFlatten(), "a blank volume needs no image")
	v := Volume{Name: "root", SizeGiB: 1, Format: VolumeQCOW2, Image: &ImageRef{ID: "i"}}
	require.NoError(t, v.Attach("a", "disk", "h1"))
	require.False(t, v.Observe(VolumeObservation{Generation: 1, Flattened: true}), "nobody has asked for it")
	require.True(t, v.RequestFlatten())
	require.False(t, v.RequestFlatten(), "a repeat changes nothing")
	require.EqualValues(t, 2, v.Generation)
	v.Observe(VolumeObservation{Generation: 1, Present: true, Flattened: true})
	require.NotNil(t, v.Image, "the host has not reported the volume as flattened")
	v.Observe(VolumeObservation{Generation: 2, Present: true})
	require.NotNil(t, v.Image, "the host has not reported the volume as flattened")
	for _, c := range []struct {
		percent, want uint32
		changed       bool
	}{{9, 0, false}, {19, 10, true}, {15, 10, false}, {5, 10, false}, {4000, 100, true}} {
		require.Equal(t, c.changed, v.Observe(VolumeObservation{Generation: 2, Present: true, FlattenPercent: c.percent}))
		require.Equal(t, c.want, v.FlattenPercent)
	}
	require.True(t, v.Observe(VolumeObservation{Generation: 2, Present: true, Flattened: true, Format: VolumeRaw}))
	require.Equal(t, []any{(*ImageRef)(nil), false, uint32(0), VolumeRaw, uint64(3)}, []any{v.Image, v.Flatten, v.FlattenPercent, v.Format, v.Generation})
	require.False(t, v.RequestFlatten())
	require.Error(t, CheckVolumePairs(map[string]string{VolumeFlatten: "1"}, nil))
}

// TestVolumeResize checks that a volume only grows, and that a repeated request changes nothing.
func TestVolumeResize(t *testing.T) {
	v := Volume{Name: "data", SizeGiB: 2}
	_, err := v.Resize(1)
	require.True(t, fault.Is(err, fault.InvalidArgument))
	changed, err := v.Resize(2)
	require.NoError(t, err)
	require.False(t, changed)
	changed, err = v.Resize(3)
	require.NoError(t, err)
	require.True(t, changed)
	require.Equal(t, []uint64{3, 1, 3 << 30}, []uint64{v.SizeGiB, v.Generation, v.SizeBytes()})
}

// TestVolumeLimits checks that metadata can lower the limits of the class, and cannot raise them.
func TestVolumeLimits(t *testing.T) {
	for _, c := range []struct {
		class uint64
		text  string
		want  uint64
	}{{0, "", 0}, {0, "100", 100}, {200, "100", 100}, {100, "200", 100}, {100, "", 100}} {
		v := Volume{ClassLimits: Limits{c.class, c.class}, Metadata: map[string]string{MaxIOPS: c.text, MaxBytesPerSecond: c.text}}
		require.Equal(t, Limits{c.want, c.want}, v.Limits(), "%+v", c)
	}
	for _, bad := range []string{"0", "-1", "x", "1.5", "1000000000000001"} {
		require.Error(t, CheckVolumePairs(map[string]string{MaxIOPS: bad}, nil), bad)
	}
	require.NoError(t, CheckVolumePairs(map[string]string{MaxIOPS: "1000000000000000"}, nil))
	require.Error(t, CheckVolumePairs(map[string]string{VolumeReason: "x"}, nil))
}

// TestCheckVolumeAndClass checks the fields that callers set.
func TestCheckVolumeAndClass(t *testing.T) {
	require.NoError(t, CheckVolume(&Volume{Name: "a", SizeGiB: MaxDiskGiB, Class: "fast"}))
	for field, v := range map[string]Volume{
		"name": {SizeGiB: 1}, "size_gib": {Name: "a"}, "driver": {Name: "a", SizeGiB: 1, Driver: 9}, "storage_class": {Name: "a", SizeGiB: 1, Class: "A/b"},
	} {
		f, _ := fault.From(CheckVolume(&v))
		require.NotNil(t, f, field)
		require.Equal(t, field, f.Field)
	}
	require.NoError(t, (&StorageClass{Name: "fast", Driver: DriverManaged, Pool: "nvme", Limits: Limits{IOPS: 1}}).Check())
	for field, c := range map[string]StorageClass{
		"name": {Driver: DriverManaged, Pool: "p"}, "driver": {Name: "a", Pool: "p", Driver: 9}, "rbd": {Name: "a", Driver: DriverRBD}, "pool": {Name: "a", Driver: DriverManaged, Pool: "../etc"},
		"max_iops": {Name: "a", Driver: DriverManaged, Pool: "p", Limits: Limits{IOPS: MaxLimit + 1}},
	} {
		f, _ := fault.From(c.Check())
		require.NotNil(t, f, field)
		require.Equal(t, field, f.Field)
	}
}

// TestPools checks the computation of the free space in the storage pools of a host.
func TestPools(t *testing.T) {
	n := Node{StoragePools: []StoragePool{{Name: "local", AllocatableGiB: 10}}}
	require.Empty(t, n.PoolShortage("local", 10, 0))
	n.AllocatePool("local", 4)
	require.Equal(t, "has 6 GiB free in the storage pool local, 7 needed", n.PoolShortage("local", 7, n.PoolAllocated["local"]))
	require.Equal(t, "does not serve the storage pool nvme", n.PoolShortage("nvme", 1, 0))
	n.AllocatePool("local", -5)
	require.Empty(t, n.PoolAllocated)
}
