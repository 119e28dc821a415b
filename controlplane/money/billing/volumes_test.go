package billing

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// gib is the price of an hour of a GiB of a volume in the tests of this file.
const gib = 3

func volumeRules(onEmpty Policy) Rules {
	p := prices
	p.VolumeGiBHour = gib
	return Rules{Enabled: true, Prices: p, OnEmpty: onEmpty}
}

// volumeWorld is a world with volumes.
type volumeWorld struct {
	*world
	volumes *volume.Service
}

func newVolumeWorld(t testing.TB, rules Rules) *volumeWorld {
	w := &volumeWorld{world: newWorld(t, rules)}
	o := volume.Options{Store: w.store, Commands: w.Commands, Key: clusterkey.Generate(), Log: w.Log}
	if rules.Enabled {
		o.Billing = w.bills
	}
	w.volumes = volume.New(o)
	require.NoError(t, storageclass.New(w.store, w.Commands, o.Key).Bootstrap(t.Context()))
	return w
}

func (w *volumeWorld) tryVolume(name string, size uint64) (cloud.VolumeID, error) {
	out, err := w.volumes.Create(w.as(acme), acme, cloud.Volume{Name: name, SizeGiB: size}, "", [32]byte{})
	return out.Volume.ID, err
}

func (w *volumeWorld) volume(name string, size uint64) cloud.VolumeID {
	w.t.Helper()
	id, err := w.tryVolume(name, size)
	require.NoError(w.t, err)
	return id
}

func (w *volumeWorld) resize(id cloud.VolumeID, size uint64) {
	w.t.Helper()
	_, err := w.volumes.Resize(w.as(acme), acme, id, size, [32]byte{})
	require.NoError(w.t, err)
}

func (w *volumeWorld) remove(id cloud.VolumeID) {
	w.t.Helper()
	_, err := w.volumes.Delete(w.as(acme), acme, id, [32]byte{})
	require.NoError(w.t, err)
}

// TestVolumeHours checks that a volume is charged from its creation to its deletion: once for each hour that has begun,
// for the largest size in the hour.
func TestVolumeHours(t *testing.T) {
	w := newVolumeWorld(t, volumeRules(Keep))
	w.fund(10_000)
	id := w.volume("data", 10)
	require.Equal(t, [3]int64{0, 10 * gib, 10_000 - 10*gib}, w.figures(), "the first hour must be reserved at the creation")
	w.bill()
	w.bill()
	require.Equal(t, [3]int64{10 * gib, 0, 10_000 - 10*gib}, w.figures())
	w.Clock.Advance(hour)
	w.bill()
	w.bill()
	require.EqualValues(t, 20*gib, w.wallet().Consumed())
	w.resize(id, 14)
	w.bill()
	require.EqualValues(t, 24*gib, w.wallet().Consumed(), "the hour in which a volume grows must cost the larger size")
	w.Clock.Advance(5 * hour)
	w.bill()
	require.EqualValues(t, (24+5*14)*gib, w.wallet().Consumed())
	last := w.transactions(t)
	require.Contains(t, last[len(last)-1].Description, "volume data, hour from ")
	require.Contains(t, last[len(last)-1].Description, ": 14 GiB")
	w.Clock.Advance(time.Minute)
	w.remove(id)
	w.Clock.Advance(5 * hour)
	w.bill()
	require.EqualValues(t, (24+5*14)*gib, w.wallet().Consumed(), "a deleted volume must cost nothing")
	w.remove(w.volume("short", 1))
	w.bill()
	require.EqualValues(t, (24+5*14+1)*gib, w.wallet().Consumed(), "a volume that exists for a moment must cost an hour")
	require.NoError(t, w.clean())
}

// TestVolumesWithoutCredit checks that a project that cannot pay cannot create volumes, that the hours of its volumes
// are still counted, and that with the policy Stop it cannot start VMs until these hours are paid.
func TestVolumesWithoutCredit(t *testing.T) {
	w := newVolumeWorld(t, volumeRules(Stop))
	_, err := w.tryVolume("none", 1)
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "an hour of volume none costs 3: project web has no wallet")
	w.fund(5*gib + running)
	_, err = w.tryVolume("large", 100)
	require.ErrorContains(t, err, "an hour of volume large costs 300")
	all, _, err := w.volumes.List(t.Context(), acme, 0, "", volume.Filter{})
	require.NoError(t, err)
	require.Empty(t, all)

	id := w.volume("data", 5)
	vm := w.create("web")
	w.reportObserved(vm, cloud.ObservedBuilt)
	w.bill()
	w.Clock.Advance(3 * hour)
	w.bill()
	_, sum := w.unpaidBills()
	require.Positive(t, sum)
	for _, call := range []func() error{
		func() error { _, err := w.tryVolume("more", 1); return err }, func() error { return w.start(vm) },
	} {
		err := call()
		require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
		require.ErrorContains(t, err, fmt.Sprintf("project web owes %d for earlier hours", sum))
	}
	_, err = w.volumes.Get(t.Context(), acme, id)
	require.NoError(t, err, "a volume that is not paid must not be deleted")
	w.topUp(sum + running)
	w.bill()
	require.NoError(t, w.start(vm))
	require.NoError(t, w.clean())
}

// TestVolumesFromBeforeBilling checks that volumes that were created, grown or deleted while billing was disabled are
// billed from the moment at which it is enabled, with their size at that time.
func TestVolumesFromBeforeBilling(t *testing.T) {
	w := newVolumeWorld(t, Rules{})
	w.fund(1000)
	id := w.volume("data", 2)
	w.Clock.Advance(7 * hour)
	later := w.member(volumeRules(Keep))
	run := func() { t.Helper(); require.NoError(t, later.Run(t.Context())) }
	run()
	run()
	require.EqualValues(t, 2*gib, w.wallet().Consumed(), "hours from before cost nothing")
	w.resize(id, 3) // by a member on which billing is disabled
	run()
	run()
	require.EqualValues(t, 3*gib, w.wallet().Consumed())
	w.remove(id)
	run()
	w.Clock.Advance(2 * hour)
	run()
	run()
	require.EqualValues(t, 3*gib, w.wallet().Consumed())
	require.NoError(t, w.clean())
}
