package vm

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// nicReport adds reports about NICs to an observation.
func nicReport(nics ...cloud.NICObservation) func(*cloud.Observation) {
	return func(o *cloud.Observation) { o.NICs = nics }
}

// whenRequested runs report after a call has changed the desired state of vm, and then returns the result of the call.
func (w *world) whenRequested(vm *cloud.VM, report func(), call func() (PowerResult, error)) (PowerResult, error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		store.Await(w.t.Context(), w.store, VMs, func(now *cloud.VM) (bool, error) { return now.Generation > vm.Generation, nil },
			string(acme.Project), string(vm.ID))
		report()
	}()
	defer func() { <-done }()
	return call()
}

// TestAttachNICToRunningVM attaches NICs to a running VM. The call must wait until the host has reported that the guest
// has the NIC. If the host refuses, the NIC and its port must be removed, also for a repeated call.
func TestAttachNICToRunningVM(t *testing.T) {
	w := newWorld(t)
	w.networkHost("h1")
	vm := w.createInState(cloud.Running, "web")
	attach := func(key, nic string) func() (PowerResult, error) {
		return func() (PowerResult, error) {
			return w.vms.AttachNIC(w.as(acme, key), acme, vm.ID, cloud.NIC{ID: nic}, [32]byte{})
		}
	}
	out, err := w.whenRequested(vm, func() {
		require.Equal(t, cloud.DeviceAttaching, w.report(vm.ID, cloud.ObservedRunning).Spec.Network[0].Change)
		require.Len(t, w.assignedNICs(vm), 1)
		w.report(vm.ID, cloud.ObservedRunning, nicReport(cloud.NICObservation{ID: "a", Attached: true}))
	}, attach("", "a"))
	require.NoError(t, err)
	require.False(t, out.WaitEnded)
	require.Equal(t, cloud.DeviceUnchanged, out.VM.Spec.Network[0].Change)
	require.Equal(t, 1, w.records()["net-port"])

	vm = w.get(vm.ID)
	_, err = w.whenRequested(vm, func() {
		w.report(vm.ID, cloud.ObservedRunning, nicReport(
			cloud.NICObservation{ID: "a", Attached: true}, cloud.NICObservation{ID: "b", Error: "no free PCI slot"}))
	}, attach("k", "b"))
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	require.ErrorContains(t, err, "attach NIC b of VM web: no free PCI slot")
	require.Len(t, w.get(vm.ID).Spec.Network, 1)
	require.Equal(t, 1, w.records()["net-port"])
	require.Len(t, w.assignedNICs(vm), 1)
	_, err = attach("k", "b")()
	require.ErrorContains(t, err, "no free PCI slot", "a repeated call must get the refusal too")
}

// TestDetachNICFromRunningVM detaches NICs from a running VM. The VM must keep the NIC and its port until the host has
// reported that the guest released the device, and must keep both if the guest refuses.
func TestDetachNICFromRunningVM(t *testing.T) {
	w := newWorld(t)
	w.networkHost("h1")
	id := w.create("web", withNICs(cloud.NIC{ID: "a"})).ID
	w.report(id, cloud.ObservedBuilt)
	w.power(id, start, 0)
	has := nicReport(cloud.NICObservation{ID: "a", Attached: true})
	vm := w.report(id, cloud.ObservedRunning, has)
	detach := func() (PowerResult, error) {
		return w.vms.DetachNIC(w.as(acme, ""), acme, id, "a", [32]byte{})
	}

	_, err := w.whenRequested(vm, func() {
		require.Empty(t, w.assignedNICs(vm), "the host must be told to detach the NIC")
		now := w.report(id, cloud.ObservedRunning, has)
		require.Len(t, now.Spec.Network, 1, "the port of a NIC that the guest still has must not be released")
		w.report(id, cloud.ObservedRunning, nicReport(cloud.NICObservation{ID: "a", Attached: true, Error: "the guest did not release the device in 20s"}))
	}, detach)
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	require.ErrorContains(t, err, "detach NIC a of VM web: the guest did not release the device in 20s")
	require.Len(t, w.assignedNICs(vm), 1, "the host must be told to keep the NIC")
	require.Equal(t, 1, w.records()["net-port"])

	vm = w.get(id)
	out, err := w.whenRequested(vm, func() {
		stale := vm.Generation
		now := w.report(id, cloud.ObservedRunning, func(o *cloud.Observation) { o.Generation = stale })
		require.Len(t, now.Spec.Network, 1, "a report of the time before the call must not count")
		w.report(id, cloud.ObservedRunning, has)
		require.Equal(t, 1, w.records()["net-port"])
		w.report(id, cloud.ObservedRunning)
	}, detach)
	require.NoError(t, err)
	require.False(t, out.WaitEnded)
	require.Empty(t, out.VM.Spec.Network)
	require.Zero(t, w.records()["net-port"])
}

// TestNICChangesEndWithTheProcess stops a VM while NICs are being attached and detached. Without a process the changes
// are done.
func TestNICChangesEndWithTheProcess(t *testing.T) {
	w := newWorld(t)
	w.networkHost("h1")
	id := w.create("web", withNICs(cloud.NIC{ID: "a"})).ID
	w.report(id, cloud.ObservedBuilt)
	w.power(id, start, 0)
	w.report(id, cloud.ObservedRunning, nicReport(cloud.NICObservation{ID: "a", Attached: true}))
	request := func(n string) nicRequest { return nicRequest{Tenant: acme, VM: id, NIC: cloud.NIC{ID: n}} }
	_, err := w.vms.detachNICOnLeader(w.as(acme, ""), request("a"))
	require.NoError(t, err)
	_, err = w.vms.attachNICOnLeader(w.as(acme, ""), request("b"))
	require.NoError(t, err)
	w.power(id, stop, 0)
	vm := w.report(id, cloud.ObservedBuilt)
	require.Equal(t, cloud.Stopped, vm.State)
	require.Len(t, vm.Spec.Network, 1)
	require.Equal(t, []any{"b", cloud.DeviceUnchanged}, []any{vm.Spec.Network[0].ID, vm.Spec.Network[0].Change})
	require.Equal(t, 1, w.records()["net-port"])
}

// TestNICWaitTimesOut checks how long AttachNIC and DetachNIC wait for a host that reports nothing. The change must stay
// recorded.
func TestNICWaitTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.networkHost("h1")
		vm := w.createInState(cloud.Running, "web")
		began := time.Now()
		out, err := w.vms.AttachNIC(w.as(acme, ""), acme, vm.ID, cloud.NIC{ID: "a"}, [32]byte{})
		require.NoError(t, err)
		require.True(t, out.WaitEnded)
		require.Equal(t, nicWait, time.Since(began))
		require.Equal(t, cloud.DeviceAttaching, w.get(vm.ID).Spec.Network[0].Change)
		out, err = w.vms.DetachNIC(w.as(acme, ""), acme, vm.ID, "a", [32]byte{})
		require.NoError(t, err)
		require.True(t, out.WaitEnded)
		require.Equal(t, 2*nicWait, time.Since(began))
		require.Equal(t, cloud.DeviceDetaching, w.get(vm.ID).Spec.Network[0].Change)
	})
}
