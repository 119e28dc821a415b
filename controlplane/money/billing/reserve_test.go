package billing

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestCreateReservesTheFirstHour checks that the price of the first hour is reserved in the transaction that creates
// the VM, and charged when the VM runs.
func TestCreateReservesTheFirstHour(t *testing.T) {
	w := newWorld(t, on)
	w.fund(100)
	before := w.Quorum.Committed.Load()
	id := w.create("web")
	require.EqualValues(t, 1, w.Quorum.Committed.Load()-before, "the VM and its reservation must be one log entry")
	require.Equal(t, [3]int64{0, running, 100 - running}, w.figures())
	w.bill()
	require.Equal(t, [3]int64{0, running, 100 - running}, w.figures(), "a VM that is not built must not be charged")
	w.reportObserved(id, cloud.ObservedBuilt)
	w.bill()
	require.Equal(t, [3]int64{0, running, 100 - running}, w.figures(), "a built VM must not be charged while it can still be started in its first hour")
	require.NoError(t, w.start(id))
	w.bill()
	require.Equal(t, [3]int64{running, 0, 100 - running}, w.figures())
	all := w.transactions(t)
	last := all[len(all)-1]
	require.Equal(t, ledger.Charge, last.Type)
	require.Equal(t, "VM web, its first hour", last.Description)
	require.Equal(t, string(id), last.ResourceID)

	w.Clock.Advance(hour)
	w.bill()
	all = w.transactions(t)
	last = all[len(all)-1]
	require.Equal(t, ledger.BillingCharge, last.Type)
	require.Equal(t, "VM web, hour from 2027-01-15T09:00:00Z: 2 vCPU, 512 MiB, 5 GiB of disks", last.Description)
	require.Equal(t, string(id), last.ResourceID)
	require.EqualValues(t, running, last.Amount)
	require.NoError(t, w.clean())
}

// TestCreateWithoutCreditIsRefused creates VMs that the wallet cannot pay for. The error must name the price and the
// available amount, and nothing may be written.
func TestCreateWithoutCreditIsRefused(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(w *world)
		reason  string
		says    string
		details map[string]any
	}{
		{"no wallet", func(*world) {}, "NO_WALLET", "an hour of VM web costs 27: project web has no wallet", map[string]any{"price": int64(running), "available": int64(0)}},
		{"an empty wallet", func(w *world) { w.fund(0) }, "INSUFFICIENT_CREDIT", "an hour of VM web costs 27: 27 is wanted, 0 is available", map[string]any{"price": int64(running), "available": int64(0)}},
		{"a wallet with 1 too little", func(w *world) { w.fund(running - 1) }, "INSUFFICIENT_CREDIT", "26 is available", map[string]any{"price": int64(running), "available": int64(running - 1)}},
		{"credit reserved for something else", func(w *world) {
			w.fund(100)
			w.order(ledger.Command{Op: ledger.DoReserve, Amount: 80})
		}, "INSUFFICIENT_CREDIT", "20 is available", map[string]any{"price": int64(running), "available": int64(20)}},
		{"a suspended wallet", func(w *world) { w.fund(100); w.order(ledger.Command{Op: ledger.DoSuspend}) }, "WALLET_SUSPENDED", "the wallet is suspended", map[string]any{"price": int64(running)}},
		{"a closed wallet", func(w *world) { w.fund(100); w.order(ledger.Command{Op: ledger.DoClose}) }, "WALLET_CLOSED", "the wallet is closed", map[string]any{"price": int64(running)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, on)
			c.prepare(w)
			before := w.store.Revision()
			_, err := w.tryCreate("web")
			f, ok := fault.From(err)
			require.True(t, ok && f.Kind == fault.ResourceExhausted, "%v", err)
			require.Contains(t, f.Message, c.says)
			require.Equal(t, c.reason, f.Reason)
			require.Equal(t, c.details, f.Details)
			require.Equal(t, before, w.store.Revision(), "a refused create must write nothing")
		})
	}
}

// TestFailedCreationReservesNothing checks that no reservation is left if a create fails for another reason or its log
// entry is lost.
func TestFailedCreationReservesNothing(t *testing.T) {
	w := newWorld(t, on)
	w.fund(1000)
	w.create("web")
	require.EqualValues(t, running, w.wallet().Reserved())
	_, err := w.tryCreate("web")
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
	big := small("big")
	big.Spec.CPU = &cloud.CPU{VCPUs: 200, Model: "Itanium"}
	_, err = w.vms.Create(w.as(acme), acme, big, [32]byte{})
	require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
	w.Quorum.Lose = func(after bool) bool { return !after }
	_, err = w.tryCreate("lost")
	require.ErrorIs(t, err, storetest.ErrLost)
	w.Quorum.Lose = nil
	require.EqualValues(t, running, w.wallet().Reserved())
	require.NoError(t, w.clean())
}

// TestReservationIsReleased checks that a VM that is deleted before it has run, or cannot be built, releases its
// reservation and costs nothing. A built VM must pay for its disks from the end of the first hour.
func TestReservationIsReleased(t *testing.T) {
	w := newWorld(t, on)
	w.fund(100)
	id := w.create("web")
	require.NoError(t, w.delete(id))
	require.Equal(t, [3]int64{0, 0, 100}, w.figures())

	id = w.create("broken")
	w.reportObserved(id, cloud.ObservedBuildFailed, func(o *cloud.Observation) { o.Exit, o.LastError = cloud.ExitFailed, "the image is corrupt" })
	require.Equal(t, [3]int64{0, 0, 100}, w.figures())
	w.Clock.Advance(3 * hour)
	w.bill()
	require.NoError(t, w.delete(id))
	require.Equal(t, [3]int64{0, 0, 100}, w.figures(), "a VM that was never built must cost nothing")

	id = w.create("idle")
	w.reportObserved(id, cloud.ObservedBuilt)
	w.bill()
	require.NoError(t, w.delete(id))
	require.Equal(t, [3]int64{0, 0, 100}, w.figures(), "a VM that is deleted in its first hour and never ran must cost nothing")

	id = w.create("late")
	w.reportObserved(id, cloud.ObservedBuilt)
	w.Clock.Advance(hour)
	w.bill()
	require.Equal(t, [3]int64{2 * off, 0, 100 - 2*off}, w.figures(), "after the first hour the VM must pay for its disks, for that hour and the next")
	require.NoError(t, w.start(id))
	w.bill()
	require.Equal(t, [3]int64{off + running, 0, 100 - off - running}, w.figures(), "the started VM must pay the rest of the price of this hour")
	require.NoError(t, w.clean())
}

// TestReservationExpires checks that the first hour is charged from the available amount if the reservation has expired
// before Run.
func TestReservationExpires(t *testing.T) {
	w := newWorld(t, on)
	w.fund(200)
	w.run("web")
	w.Clock.Advance(2 * hour)
	require.NoError(t, w.credits.Sweep(t.Context()))
	require.Equal(t, [3]int64{0, 0, 200}, w.figures())
	w.bill()
	require.Equal(t, [3]int64{3 * running, 0, 200 - 3*running}, w.figures())
	require.NoError(t, w.clean())
}

// TestTenantCannotReleaseAVMsReservation checks that a tenant can neither release nor commit the reservation for a VM.
func TestTenantCannotReleaseAVMsReservation(t *testing.T) {
	w := newWorld(t, on)
	w.fund(running)
	id := w.create("web")
	for _, op := range []ledger.Op{ledger.DoRelease, ledger.DoCommit} {
		_, err := w.credits.Execute(w.as(acme), credit.Request{Tenant: acme, Command: ledger.Command{Op: op, Reservation: idOf(id, "reservation")}})
		require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	}
	require.Equal(t, [3]int64{0, running, 0}, w.figures())
}
