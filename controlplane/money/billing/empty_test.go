package billing

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestPolicyKeep checks that with the policy Keep unpaid VMs continue to run. The unpaid hours must need one record,
// and be charged before anything else when there is credit again.
func TestPolicyKeep(t *testing.T) {
	w := newWorld(t, on)
	w.fund(2 * running)
	id := w.run("web")
	w.Clock.Advance(hour)
	w.bill()
	require.Equal(t, [3]int64{2 * running, 0, 0}, w.figures())
	for range 4 {
		w.Clock.Advance(hour)
		w.bill()
	}
	w.Clock.Advance(3 * hour)
	w.bill()
	bills, sum := w.unpaidBills()
	require.Len(t, bills, 1, "all hours of one price must be one record")
	require.EqualValues(t, 7*running, sum)
	require.Equal(t, cloud.Running, w.get(id).State)
	_, err := w.tryCreate("more")
	f, _ := fault.From(err)
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.Equal(t, map[string]any{"price": int64(running), "available": int64(0), "owed": int64(7 * running)}, f.Details)
	require.Contains(t, f.Message, "project web owes 189 for earlier hours")

	w.topUp(3*running + 1)
	w.bill()
	bills, sum = w.unpaidBills()
	require.Len(t, bills, 1)
	require.EqualValues(t, 4*running, sum, "three of the seven hours must be paid")
	require.Equal(t, [3]int64{5 * running, 0, 1}, w.figures())
	_, err = w.tryCreate("more")
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)

	w.order(ledger.Command{Op: ledger.DoSuspend})
	w.topUp(1000)
	w.bill()
	require.Equal(t, [3]int64{5 * running, 0, 1001}, w.figures(), "a suspended wallet must not be charged")
	w.order(ledger.Command{Op: ledger.DoResume})
	w.create("more")
	require.Equal(t, [3]int64{9 * running, running, 1001 - 5*running}, w.figures(), "unpaid hours must be charged before a new VM is created")
	_, sum = w.unpaidBills()
	require.Zero(t, sum)
	require.NoError(t, w.clean())
}

// TestPolicyStop checks that with the policy Stop unpaid VMs are stopped, and can be started only when all bills are
// paid and the wallet covers the rest of the hour.
func TestPolicyStop(t *testing.T) {
	w := newWorld(t, strict)
	w.fund(2*running + 3)
	first, second := w.create("first"), w.create("second")
	for _, id := range []cloud.VMID{first, second} {
		w.reportObserved(id, cloud.ObservedBuilt)
	}
	require.NoError(t, w.start(first), "the reservation made at creation must cover the start")
	require.NoError(t, w.start(second))
	w.bill()
	w.Clock.Advance(hour)
	w.bill()
	for _, id := range []cloud.VMID{first, second} {
		require.Equal(t, cloud.Stopping, w.get(id).State)
		require.False(t, w.get(id).Desired.On)
		w.reportObserved(id, cloud.ObservedEnded)
		require.Equal(t, cloud.Stopped, w.get(id).State)
	}
	require.Equal(t, [3]int64{2 * running, 0, 3}, w.figures())
	_, sum := w.unpaidBills()
	require.EqualValues(t, 2*running, sum, "the hour that had begun must be billed for both VMs")
	err := w.start(first)
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "an hour of VM first costs 27")
	require.ErrorContains(t, err, "owes 54")
	require.Equal(t, cloud.Stopped, w.get(first).State)

	w.topUp(2*running - 3)
	require.NoError(t, w.start(first), "the VM can be started when the unpaid hours can be charged")
	w.stop(first)
	w.Clock.Advance(hour)
	w.bill()
	_, sum = w.unpaidBills()
	require.EqualValues(t, 2*off, sum)
	w.topUp(2*off + running - off - 1)
	err = w.start(second)
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	require.ErrorContains(t, err, "21 is available")
	w.topUp(1)
	require.NoError(t, w.start(second), "the VM can be started when there is credit for the rest of the hour")
	w.bill()
	require.EqualValues(t, 0, w.wallet().Available())
	require.Equal(t, cloud.Running, w.get(second).State)
	require.NoError(t, w.clean())
}

// TestStopMany checks that all VMs of a project that cannot pay are stopped, even if it has more than maxBills unpaid
// bills.
func TestStopMany(t *testing.T) {
	w := newWorld(t, strict)
	const vms = maxBills + 20
	w.fund(vms * running)
	ids := make([]cloud.VMID, vms)
	for n := range ids {
		ids[n] = w.run(fmt.Sprint("web-", n))
	}
	w.Clock.Advance(hour)
	w.bill()
	for _, id := range ids {
		require.Equal(t, cloud.Stopping, w.get(id).State)
	}
	require.NoError(t, w.clean())
}

// TestInconsistentWallet makes the records of a wallet inconsistent. The reports and the deletion of its project's VMs
// must still succeed, and other projects must still be charged.
func TestInconsistentWallet(t *testing.T) {
	w := newWorld(t, on)
	w.fund(1000)
	_, err := w.credits.Execute(w.as(evil), credit.Request{Tenant: evil, Command: ledger.Command{Op: ledger.DoCreate, Amount: 100}})
	require.NoError(t, err)
	made, err := w.vms.Create(w.as(evil), evil, small("sound"), [32]byte{})
	require.NoError(t, err)
	_, err = w.vms.Observed(t.Context(), w.host, []cloud.Observation{{VM: made.VM.ID, Generation: 1, Observed: cloud.ObservedBuilt}})
	require.NoError(t, err)
	id := w.create("web")
	wallets := store.NewTable[ledger.Wallet]("wallet")
	w.Update(func(tx *store.Tx) error {
		all, _, err := wallets.List(tx, 0)
		for _, r := range all {
			if r.Value.Project == acme.Project {
				r.Value.Accounts.Wallet += 5
				wallets.Put(tx, r.Value, r.Path...)
			}
		}
		return err
	})
	w.reportObserved(id, cloud.ObservedBuilt)
	require.Equal(t, cloud.Stopped, w.get(id).State)
	w.Clock.Advance(hour)
	require.ErrorContains(t, w.bills.Run(t.Context()), "web")
	sound, err := w.credits.Wallet(t.Context(), evil)
	require.NoError(t, err)
	require.EqualValues(t, 2*off, sound.Consumed())
	_, err = w.tryCreate("more")
	var v *ledger.Violation
	require.ErrorAs(t, err, &v)
	require.NoError(t, w.delete(id), "a VM of a project with an inconsistent wallet can be deleted")
}

// TestDebtorsAreLoggedOnce checks that isNew returns true once for a project that cannot pay, and again if the reason
// changes or after the project could pay for a round.
func TestDebtorsAreLoggedOnce(t *testing.T) {
	var d debtors
	require.True(t, d.isNew("web", "a"))
	require.False(t, d.isNew("web", "a"))
	d.round()
	require.False(t, d.isNew("web", "a"))
	require.True(t, d.isNew("web", "b"))
	d.round()
	d.round()
	require.True(t, d.isNew("web", "b"))
}

func TestEvery(t *testing.T) {
	for length, want := range map[time.Duration]time.Duration{0: 10 * time.Second, time.Minute: 6 * time.Second, time.Second: 200 * time.Millisecond} {
		require.Equal(t, want, New(Options{Rules: Rules{Hour: length}}).Every())
	}
}
