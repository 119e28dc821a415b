package volume

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMigrationOfSharedVolume opens a volume on two hosts of a shared pool, as in a migration of a VM. No other host, and
// no other VM, gets the volume meanwhile.
func TestMigrationOfSharedVolume(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	a, b, c := newHost(t, dir, true), newHost(t, dir, true), newHost(t, dir, true)
	a.make(Volume{ID: id(1), Size: mib})
	at := func(generation uint64) Attachment { return Attachment{"vm-x", generation} }
	source, err := a.Open(ctx, id(1), at(3))
	require.NoError(t, err)

	_, err = b.OpenStandby(ctx, id(1), Attachment{"vm-y", 4})
	require.ErrorIs(t, err, ErrStale, "another VM gets the volume")
	_, err = b.OpenStandby(ctx, id(1), at(3))
	require.ErrorIs(t, err, ErrStale)
	target, err := b.OpenStandby(ctx, id(1), at(4))
	require.NoError(t, err)
	_, err = c.OpenStandby(ctx, id(1), at(5))
	require.ErrorIs(t, err, ErrInUse, "three processes have the volume open")
	third := func(generation uint64) {
		t.Helper()
		_, err := c.Open(ctx, id(1), at(generation))
		require.ErrorIs(t, err, ErrInUse, "a third host may write to the volume")
		require.ErrorIs(t, c.Detach(ctx, id(1), generation), ErrInUse)
		require.ErrorIs(t, c.Delete(ctx, id(1)), ErrInUse)
	}
	third(6)

	require.NoError(t, b.Activate(ctx, id(1), at(4)))
	require.NoError(t, b.Activate(ctx, id(1), at(4)), "a repeated call")
	require.Equal(t, at(4), a.list().Volumes[0].Attachment)
	require.ErrorIs(t, a.Release(ctx, id(1), at(3)), ErrStale)
	third(6)
	source.Close()
	third(6)
	_, err = a.Open(ctx, id(1), at(3))
	require.ErrorIs(t, err, ErrStale, "the source opens the volume again")

	back, err := a.OpenStandby(ctx, id(1), at(5))
	require.NoError(t, err)
	target.Close()
	third(6)
	require.NoError(t, a.Activate(ctx, id(1), at(5)))
	back.Close()
	require.NoError(t, a.Release(ctx, id(1), at(5)))
	files, err := c.Open(ctx, id(1), Attachment{"vm-y", 6})
	require.NoError(t, err)
	files.Close()
	own := newHost(t, t.TempDir(), false)
	own.make(Volume{ID: id(1), Size: mib})
	_, err = own.OpenStandby(ctx, id(1), at(1))
	require.ErrorIs(t, err, ErrRefused, "no other host uses the pool")
}

// TestSourceTakesVolumeBack undoes migrations. The source does not get the volume back before the process of the target
// has closed it. Then the target cannot activate the volume any more. If the target has activated the volume, the source
// never gets it back, also after the process of the target has ended.
func TestSourceTakesVolumeBack(t *testing.T) {
	ctx := t.Context()
	a, b := twoHosts(t)
	a.make(Volume{ID: id(1), Size: mib})
	at := func(generation uint64) Attachment { return Attachment{"vm-x", generation} }
	source, err := a.Open(ctx, id(1), at(1))
	require.NoError(t, err)
	defer func() { source.Close() }()
	// The agent of the source ends after each TakeBack, so that its process keeps generation 1.
	for before := uint64(1); before <= 3; before += 2 {
		target, err := b.OpenStandby(ctx, id(1), at(before+1))
		require.NoError(t, err)
		err = a.TakeBack(ctx, id(1), at(before+2), 1)
		require.ErrorIs(t, err, ErrElsewhere, "the target may write to the volume")
		target.Close()
		require.NoError(t, a.TakeBack(ctx, id(1), at(before+2), 1), "no target has activated the volume")
		require.NoError(t, a.TakeBack(ctx, id(1), at(before+2), 1), "a repeated call")
		require.ErrorIs(t, b.Activate(ctx, id(1), at(before+1)), ErrStale, "two hosts may write to the volume")
		require.Equal(t, at(before+2), b.list().Volumes[0].Attachment)
		_, err = b.Open(ctx, id(1), Attachment{"vm-y", before + 3})
		require.ErrorIs(t, err, ErrElsewhere)
	}

	target, err := b.OpenStandby(ctx, id(1), at(6))
	require.NoError(t, err)
	require.NoError(t, b.Activate(ctx, id(1), at(6)))
	refused := func() {
		t.Helper()
		err := a.TakeBack(ctx, id(1), at(7), 5)
		require.ErrorIs(t, err, ErrActivated, "the guest continues with the memory of the switchover")
		require.Equal(t, at(6), a.list().Volumes[0].Attachment)
	}
	refused()
	target.Close()
	refused()

	// The VM starts again from the volume. A migration of the new guest can be undone.
	source.Close()
	source, err = a.Open(ctx, id(1), at(7))
	require.NoError(t, err)
	target, err = b.OpenStandby(ctx, id(1), at(8))
	require.NoError(t, err)
	target.Close()
	require.NoError(t, a.TakeBack(ctx, id(1), at(9), 7))
}

// rbdMigration is a fake cluster with two hosts. The process of the source, with the address src, has the volume open at
// generation 1. The process of the target, with the address dst, has opened it for generation 2.
func rbdMigration(t *testing.T) (cluster *fakeRBD, a, b *RBDPool) {
	ctx := t.Context()
	cluster = &fakeRBD{}
	a = NewRBDPool(RBDOptions{Client: cluster, Pool: "pool", User: "user", Key: "key"})
	b = NewRBDPool(RBDOptions{Client: cluster, Pool: "pool", User: "user", Key: "key"})
	require.NoError(t, a.Create(ctx, Volume{ID: id(1), Size: 64 * mib}))
	_, err := a.Open(ctx, id(1), Attachment{"vm-x", 1})
	require.NoError(t, err)
	cluster.clients = []string{"src"}
	_, err = b.OpenStandby(ctx, id(1), Attachment{"vm-x", 2})
	require.ErrorIs(t, err, ErrRefused, "the address of the source is not recorded")
	require.ErrorContains(t, err, "stop and start the VM once")
	require.NoError(t, a.Confirm(ctx, id(1), Attachment{"vm-x", 1}))
	_, err = b.OpenStandby(ctx, id(1), Attachment{"vm-y", 2})
	require.ErrorIs(t, err, ErrStale, "another VM gets the volume")
	cluster.clients = []string{"src", "other"}
	_, err = b.OpenStandby(ctx, id(1), Attachment{"vm-x", 2})
	require.ErrorIs(t, err, ErrInUse, "another client has the image open")
	cluster.clients = []string{"src"}
	_, err = b.OpenStandby(ctx, id(1), Attachment{"vm-x", 2})
	require.NoError(t, err)
	cluster.clients = append(cluster.clients, "dst")
	require.NoError(t, b.ConfirmStandby(ctx, id(1), Attachment{"vm-x", 2}))
	return cluster, a, b
}

// TestMigrationOfRBDVolume migrates a VM with an RBD volume. Nobody is blocked, and the source cannot open the volume
// again.
func TestMigrationOfRBDVolume(t *testing.T) {
	ctx := t.Context()
	cluster, a, b := rbdMigration(t)
	require.ErrorIs(t, a.Detach(ctx, id(1), 1), ErrInUse)
	require.NoError(t, b.Activate(ctx, id(1), Attachment{"vm-x", 2}))
	require.NoError(t, b.Activate(ctx, id(1), Attachment{"vm-x", 2}), "a repeated call")
	require.NoError(t, b.ConfirmStandby(ctx, id(1), Attachment{"vm-x", 2}), "a repeated call")
	_, err := a.Open(ctx, id(1), Attachment{"vm-x", 1})
	require.ErrorIs(t, err, ErrStale)
	require.ErrorIs(t, a.Release(ctx, id(1), Attachment{"vm-x", 1}), ErrStale)
	_, err = a.Open(ctx, id(1), Attachment{"vm-y", 3})
	require.ErrorIs(t, err, ErrInUse, "two hosts may write to the volume")
	require.Empty(t, cluster.blocked)
	cluster.clients = nil
	require.NoError(t, b.Release(ctx, id(1), Attachment{"vm-x", 2}))
	_, err = a.Open(ctx, id(1), Attachment{"vm-y", 3})
	require.NoError(t, err)
}

// TestReleaseDuringRBDMigration ends the process of the source before the target has activated the volume. The release
// at the source must not block the process of the target.
func TestReleaseDuringRBDMigration(t *testing.T) {
	ctx := t.Context()
	cluster, a, b := rbdMigration(t)
	cluster.clients = []string{"dst"}
	require.NoError(t, a.Release(ctx, id(1), Attachment{"vm-x", 1}))
	require.Empty(t, cluster.blocked)
	require.NoError(t, b.Activate(ctx, id(1), Attachment{"vm-x", 2}))
}

// TestSourceTakesRBDVolumeBack undoes a migration of a VM with an RBD volume. The cluster must refuse the requests of the
// target's process, and only these.
func TestSourceTakesRBDVolumeBack(t *testing.T) {
	ctx := t.Context()
	cluster, a, b := rbdMigration(t)
	cluster.clients = []string{"src"} // The cluster has forgotten the target's process, which may still write.
	require.NoError(t, a.TakeBack(ctx, id(1), Attachment{"vm-x", 3}, 1))
	require.NoError(t, a.TakeBack(ctx, id(1), Attachment{"vm-x", 3}, 1), "a repeated call")
	require.Equal(t, []string{"dst"}, cluster.blocked, "the target may write to the volume")
	require.ErrorIs(t, b.Activate(ctx, id(1), Attachment{"vm-x", 2}), ErrStale, "two hosts may write to the volume")
	require.ErrorIs(t, b.ConfirmStandby(ctx, id(1), Attachment{"vm-x", 2}), ErrStale)

	// A target that did not end blocks the next one only until the cluster refuses its requests.
	_, err := b.OpenStandby(ctx, id(1), Attachment{"vm-x", 4})
	require.NoError(t, err)
	cluster.clients = append(cluster.clients, "dst2")
	require.NoError(t, b.ConfirmStandby(ctx, id(1), Attachment{"vm-x", 4}))
	_, err = b.OpenStandby(ctx, id(1), Attachment{"vm-x", 5})
	require.NoError(t, err)
	require.Equal(t, []string{"dst", "dst2"}, cluster.blocked)
	cluster.clients = append(cluster.clients, "dst3")
	require.NoError(t, b.ConfirmStandby(ctx, id(1), Attachment{"vm-x", 5}))

	// The agent of the source has ended after the first TakeBack, so that its process has generation 1. No target has
	// activated the volume, and the guest continues.
	require.NoError(t, a.TakeBack(ctx, id(1), Attachment{"vm-x", 6}, 1))
	require.Contains(t, cluster.blocked, "dst3")
	require.NotContains(t, cluster.blocked, "src", "the source's process is blocked")
}

// TestSourceTakesRegisteredVolumeBack undoes a migration of a VM with a registered image, while a client that is not
// Trivet's has the image open. The cluster must refuse the requests of the target's process, and not those of this client.
// It refuses those of an unknown client of an image that Trivet has made.
func TestSourceTakesRegisteredVolumeBack(t *testing.T) {
	ctx := t.Context()
	cluster, made, _ := rbdMigration(t)
	cluster.clients = []string{"src", "dst", "unknown"}
	require.NoError(t, made.TakeBack(ctx, id(1), Attachment{"vm-x", 3}, 1))
	require.Equal(t, []string{"dst", "unknown"}, cluster.blocked)

	f := &fakeExternal{fakeRBD: &fakeRBD{}}
	f.size, f.lock = 8*mib, true
	a := NewRBDPool(RBDOptions{Client: f, Pool: "vms"}).Registered("disk")
	b := NewRBDPool(RBDOptions{Client: f, Pool: "vms"}).Registered("disk")
	require.NoError(t, a.Create(ctx, Volume{ID: id(1), Size: 8 * mib}))
	_, err := a.Open(ctx, id(1), Attachment{"vm-x", 1})
	require.NoError(t, err)
	f.clients = []string{"src"}
	require.NoError(t, a.Confirm(ctx, id(1), Attachment{"vm-x", 1}))
	_, err = b.OpenStandby(ctx, id(1), Attachment{"vm-x", 2})
	require.NoError(t, err)
	f.clients = []string{"src", "dst"}
	require.NoError(t, b.ConfirmStandby(ctx, id(1), Attachment{"vm-x", 2}))
	f.clients = []string{"src", "dst", "unknown"}
	require.NoError(t, a.TakeBack(ctx, id(1), Attachment{"vm-x", 3}, 1))
	require.Equal(t, []string{"dst"}, f.blocked)
}

// TestSourceOfActivatedRBDVolume checks that the source of a migration does not get an RBD volume back that the target has
// activated, also after the process of the target has ended and its host has released the volume. The cluster must refuse
// the requests of the target's process.
func TestSourceOfActivatedRBDVolume(t *testing.T) {
	ctx := t.Context()
	for _, released := range []bool{false, true} {
		cluster, a, b := rbdMigration(t)
		require.NoError(t, b.Activate(ctx, id(1), Attachment{"vm-x", 2}))
		cluster.clients = nil
		if released {
			require.NoError(t, b.Release(ctx, id(1), Attachment{"vm-x", 2}))
		}
		for range 2 {
			err := a.TakeBack(ctx, id(1), Attachment{"vm-x", 3}, 1)
			require.ErrorIs(t, err, ErrActivated, "the guest continues with the memory of the switchover")
		}
		require.Contains(t, cluster.blocked, "dst")

		// The VM starts again from the volume. A migration of the new guest can be undone.
		require.NoError(t, a.EndMigrated(ctx, id(1), 3))
		_, err := a.Open(ctx, id(1), Attachment{"vm-x", 3})
		require.NoError(t, err)
		cluster.clients = []string{"src2"}
		require.NoError(t, a.Confirm(ctx, id(1), Attachment{"vm-x", 3}))
		_, err = b.OpenStandby(ctx, id(1), Attachment{"vm-x", 4})
		require.NoError(t, err)
		require.NoError(t, a.TakeBack(ctx, id(1), Attachment{"vm-x", 5}, 3))
		require.NotContains(t, cluster.blocked, "src2")
	}
}

// TestFenceDuringRBDMigration fences a volume of a VM whose hosts are both lost. The cluster must refuse the requests of
// both processes.
func TestFenceDuringRBDMigration(t *testing.T) {
	ctx := t.Context()
	for _, activated := range []bool{false, true} {
		cluster, _, b := rbdMigration(t)
		if activated {
			require.NoError(t, b.Activate(ctx, id(1), Attachment{"vm-x", 2}))
		}
		cluster.clients = nil
		require.NoError(t, b.EndMigrated(ctx, id(1), 4))
		require.ElementsMatch(t, []string{"src", "dst"}, cluster.blocked)
		require.ErrorIs(t, b.Activate(ctx, id(1), Attachment{"vm-x", 2}), ErrStale)
		_, err := b.Open(ctx, id(1), Attachment{"vm-x", 4})
		require.NoError(t, err)
		require.NoError(t, b.EndMigrated(ctx, id(1), 4), "the present attachment")
	}
}
