package credit

import (
	"errors"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var reserveCommand = ledger.Command{Op: ledger.DoReserve, Amount: 60, Reservation: "00000000-0000-7000-8000-000000000001", IDs: [2]string{"one"}, TTL: 10}

// TestWithin checks that the requests in another service's transaction are executed with it in one log entry, or not at
// all if the transaction fails.
func TestWithin(t *testing.T) {
	w := funded(t, 100)
	before := w.quorum.Committed.Load()
	failed := errors.New("no")
	for _, end := range []error{failed, nil} {
		_, err := w.store.Update(t.Context(), func(tx *store.Tx) error {
			out, err := w.credits.Within(tx, Request{Tenant: tenant, Command: reserveCommand})
			require.NoError(t, err)
			require.EqualValues(t, 40, out.Wallet.Available())
			_, err = w.credits.Within(tx, Request{Tenant: tenant, Command: ledger.Command{Op: ledger.DoCharge, Amount: 41, IDs: [2]string{"two"}}})
			require.True(t, fault.Is(err, fault.ResourceExhausted), "credit reserved earlier in the transaction must not be available: %v", err)
			_, err = w.credits.Within(tx, Request{Tenant: tenant, Command: ledger.Command{Op: ledger.DoCharge, Amount: 40, IDs: [2]string{"three"}}})
			require.NoError(t, err)
			amount, err := w.credits.ReservedAt(tx, tenant, reserveCommand.Reservation, tx.Now())
			require.NoError(t, err)
			require.EqualValues(t, 60, amount)
			amount, err = w.credits.ReservedAt(tx, tenant, reserveCommand.Reservation, tx.Now()+10_000)
			require.NoError(t, err)
			require.Zero(t, amount, "an expired reservation must hold no credit")
			amount, err = w.credits.ReservedAt(tx, other, reserveCommand.Reservation, tx.Now())
			require.NoError(t, err)
			require.Zero(t, amount)
			return end
		})
		require.ErrorIs(t, err, end)
	}
	require.EqualValues(t, 1, w.quorum.Committed.Load()-before)
	require.EqualValues(t, 60, w.wallet().Reserved())
	require.EqualValues(t, 40, w.wallet().Consumed())
	require.Equal(t, 1, w.rows())
	w.clean()
	_, err := w.store.Update(t.Context(), func(tx *store.Tx) error {
		_, err := w.credits.Within(tx, Request{Tenant: tenant, Command: ledger.Command{Op: ledger.DoRelease, Reservation: "x"}})
		return err
	})
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
}

// TestSystemReservations checks that a reservation of another service of the control plane can be committed and
// released only by that service, and that it expires at its deadline.
func TestSystemReservations(t *testing.T) {
	w := funded(t, 100)
	c := reserveCommand
	c.By, c.Description = "system:billing", "VM web, its first hour"
	within := func(c ledger.Command) error {
		_, err := w.store.Update(t.Context(), func(tx *store.Tx) error {
			_, err := w.credits.Within(tx, Request{Tenant: tenant, Command: c})
			return err
		})
		return err
	}
	require.NoError(t, within(c))
	for _, op := range []ledger.Op{ledger.DoCommit, ledger.DoRelease} {
		_, err := w.execute("", ledger.Command{Op: op, Reservation: reserveCommand.Reservation})
		f, _ := fault.From(err)
		require.True(t, f != nil && f.Kind == fault.FailedPrecondition && f.Reason == "RESERVATION_IN_USE", "%v", err)
		require.Contains(t, f.Message, "is for VM web, its first hour")
	}
	require.EqualValues(t, 60, w.wallet().Reserved())
	require.NoError(t, within(ledger.Command{Op: ledger.DoRelease, By: "system:billing", Reservation: reserveCommand.Reservation, IDs: [2]string{"two"}}))
	require.Zero(t, w.wallet().Reserved())
	c.Reservation, c.IDs = "00000000-0000-7000-8000-000000000002", [2]string{"three"}
	require.NoError(t, within(c))
	w.clock.Advance(10 * time.Second)
	require.NoError(t, w.credits.Sweep(t.Context()))
	require.Zero(t, w.wallet().Reserved())
	w.clean()
}

// TestViolationsAreCounted checks that the metric counts each time that a request or an audit finds a wallet
// inconsistent.
func TestViolationsAreCounted(t *testing.T) {
	w := funded(t, 100)
	registry := prometheus.NewRegistry()
	w.credits.violations = violations(registry)
	count := func() float64 {
		found, err := registry.Gather()
		require.NoError(t, err)
		require.Len(t, found, 1)
		require.Equal(t, "trivet_credit_violations_total", found[0].GetName())
		return found[0].GetMetric()[0].GetCounter().GetValue()
	}
	_, err := w.execute("", ledger.Command{Op: ledger.DoReserve, Amount: 1000})
	require.Error(t, err)
	w.clean()
	require.Zero(t, count(), "a refused request must not count as a violation")
	_, err = w.store.Update(t.Context(), func(tx *store.Tx) error {
		broken, err := wallets.Get(tx, "web")
		broken.Accounts.Wallet++
		wallets.Put(tx, broken, "web")
		return err
	})
	require.NoError(t, err)
	_, err = w.execute("", ledger.Command{Op: ledger.DoTopUp, Amount: 1})
	require.Error(t, err)
	require.EqualValues(t, 1, count())
	require.NoError(t, w.credits.Audit(t.Context(), func(Finding) error { return nil }))
	require.EqualValues(t, 2, count())
	_, err = w.store.Update(t.Context(), func(tx *store.Tx) error {
		_, err := w.credits.Within(tx, Request{Tenant: tenant, Command: reserveCommand})
		return err
	})
	require.Error(t, err)
	require.EqualValues(t, 3, count())
}
