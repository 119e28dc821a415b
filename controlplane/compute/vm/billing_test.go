package vm

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// fakeBilling implements Billing. Each call adds a line to the table billingLog in the same transaction, or fails with
// its error in refuse.
type fakeBilling struct {
	refuse map[string]error
}

var billingLog = store.NewTable[[]string]("told")

func (b *fakeBilling) record(tx *store.Tx, what string, vm *cloud.VM) error {
	if err := b.refuse[what]; err != nil {
		return err
	}
	all, err := billingLog.Get(tx, "all")
	if err != nil {
		return err
	}
	if all == nil {
		all = &[]string{}
	}
	*all = append(*all, what+" "+vm.State.String())
	billingLog.Put(tx, all, "all")
	return nil
}

func (b *fakeBilling) Admit(tx *store.Tx, vm *cloud.VM) error   { return b.record(tx, "admit", vm) }
func (b *fakeBilling) Start(tx *store.Tx, vm *cloud.VM) error   { return b.record(tx, "start", vm) }
func (b *fakeBilling) Changed(tx *store.Tx, vm *cloud.VM) error { return b.record(tx, "changed", vm) }
func (b *fakeBilling) Removed(tx *store.Tx, vm *cloud.VM) error { return b.record(tx, "removed", vm) }

func (w *world) assignment() (out []string) {
	w.t.Helper()
	w.update(func(tx *store.Tx) {
		all, err := billingLog.Get(tx, "all")
		require.NoError(w.t, err)
		if all != nil {
			out = *all
		}
		billingLog.Delete(tx, "all")
	})
	return out
}

// TestBillingIsNotified checks that each change of a VM calls the right methods of Billing, in order.
func TestBillingIsNotified(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	b := &fakeBilling{refuse: map[string]error{}}
	w.vms.opts.Billing = b
	power := func(id cloud.VMID, a powerAction) error {
		_, err := w.vms.changePowerOnLeader(w.as(acme, ""), powerRequest{Tenant: acme, VM: id, Action: a})
		return err
	}
	id := w.create("web").ID
	require.Equal(t, []string{"admit CREATING", "changed CREATING"}, w.assignment())
	w.report(id, cloud.ObservedBuilt)
	require.NoError(t, power(id, start))
	require.Equal(t, []string{"changed STOPPED", "start STARTING", "changed STARTING"}, w.assignment())
	require.NoError(t, power(id, start))
	require.Empty(t, w.assignment(), "a start of a VM whose desired state is on must call nothing")
	w.report(id, cloud.ObservedRunning)
	require.NoError(t, power(id, stop))
	w.report(id, cloud.ObservedEnded)
	require.Equal(t, []string{"changed RUNNING", "changed STOPPING", "changed STOPPED"}, w.assignment())
	_, err := w.vms.Update(w.as(acme, ""), acme, id, Change{CPU: &cloud.CPU{VCPUs: 4}})
	require.NoError(t, err)
	require.NoError(t, power(id, start))
	w.Clock.Advance(cloud.StartingTime * 1e6)
	require.Eventually(t, func() bool {
		require.NoError(t, w.vms.Settle(t.Context()))
		return w.get(id).State == cloud.Error
	}, 10*time.Second, time.Millisecond, "the leader must notice that the deadline has passed")
	require.Equal(t, []string{"changed STOPPED", "start STARTING", "changed STARTING", "changed ERROR"}, w.assignment())
	_, err = w.vms.Delete(w.as(acme, ""), acme, id, true, [32]byte{})
	require.NoError(t, err)
	require.Equal(t, []string{"removed DELETED"}, w.assignment())
}

// TestBillingRefuses checks that a create, start or update has no effect if Billing returns an error for it.
func TestBillingRefuses(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	b := &fakeBilling{refuse: map[string]error{}}
	w.vms.opts.Billing = b
	poor := fault.New(fault.ResourceExhausted, "no credit")
	b.refuse["admit"] = poor
	before := w.store.Revision()
	_, err := w.vms.Create(w.as(acme, "key"), acme, small("web"), [32]byte{})
	require.ErrorIs(t, err, poor)
	require.Equal(t, before, w.store.Revision())
	require.Zero(t, w.allocated(host))
	delete(b.refuse, "admit")
	vm := w.createInState(cloud.Stopped, "web")
	b.refuse["start"] = poor
	_, err = w.vms.Start(w.as(acme, ""), acme, vm.ID, [32]byte{})
	require.ErrorIs(t, err, poor)
	require.Equal(t, vm, w.get(vm.ID))
	b.refuse["changed"] = errors.New("the records cannot be read")
	_, err = w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{CPU: &cloud.CPU{VCPUs: 4}})
	require.ErrorIs(t, err, b.refuse["changed"])
	require.Equal(t, vm, w.get(vm.ID))
}

// TestHalt checks that Halt has the effect of a stop within the caller's transaction, and when it does nothing.
func TestHalt(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	halt := func(id cloud.VMID, of cloud.Tenant) (did bool) {
		w.update(func(tx *store.Tx) {
			var err error
			did, err = w.vms.Halt(tx, of, id)
			require.NoError(t, err)
		})
		return did
	}
	vm := w.createInState(cloud.Running, "web")
	require.False(t, halt(vm.ID, other))
	require.False(t, halt(newID(), acme))
	require.True(t, halt(vm.ID, acme))
	now := w.get(vm.ID)
	require.Equal(t, cloud.Stopping, now.State)
	require.False(t, now.Desired.On)
	require.EqualValues(t, cloud.DefaultStop, now.Desired.GraceMS)
	require.Greater(t, now.Generation, vm.Generation)
	require.False(t, halt(vm.ID, acme), "Halt changed a VM whose desired state is off already")
	_, err := w.vms.changePowerOnLeader(w.as(acme, ""), powerRequest{Tenant: acme, VM: vm.ID, Action: start})
	require.NoError(t, err)
	require.True(t, halt(vm.ID, acme), "Halt must change a VM whose desired state is on")
	require.False(t, w.get(vm.ID).Desired.StartAfterStop)
	require.False(t, halt(w.createInState(cloud.Stopped, "off").ID, acme))
}
