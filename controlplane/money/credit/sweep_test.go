package credit

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestSweep checks that a reservation expires once, even if several members sweep at the same time, and that a
// reservation that was committed in time does not expire.
func TestSweep(t *testing.T) {
	w := funded(t, 1000)
	_, err := w.credits.Execute(w.as("eve", ""), Request{Tenant: other, Command: ledger.Command{Op: ledger.DoCreate, Amount: 50}})
	require.NoError(t, err)
	_, err = w.credits.Execute(w.as("eve", ""), Request{Tenant: other, Command: ledger.Command{Op: ledger.DoReserve, Amount: 50, TTL: 5}})
	require.NoError(t, err)
	for n := range 30 {
		w.must(ledger.Command{Op: ledger.DoReserve, Amount: 10, TTL: 10 + int64(n%2)})
	}
	kept := w.must(ledger.Command{Op: ledger.DoReserve, Amount: 100, TTL: 10}).Reservation.ID
	w.must(ledger.Command{Op: ledger.DoCommit, Reservation: kept})
	require.Equal(t, 31, w.rows())
	require.NoError(t, w.credits.Sweep(t.Context()))
	require.EqualValues(t, 300, w.wallet().Reserved(), "no reservation may expire before its deadline")

	w.clock.Advance(10 * time.Second)
	var wg sync.WaitGroup
	for range 3 { // as if two former leaders did not know yet that they have been replaced
		wg.Go(func() {
			if err := w.credits.Sweep(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 150, w.wallet().Reserved(), "half of the reservations must stay until their later deadline")
	w.clock.Advance(time.Second)
	require.NoError(t, w.credits.Sweep(t.Context()))
	found := w.wallet()
	require.Zero(t, found.Reserved())
	require.EqualValues(t, 900, found.Available())
	require.EqualValues(t, 1+30+2+30, found.Sequence, "each reservation must be released once")
	require.Zero(t, w.rows())
	released, _, err := w.credits.Transactions(t.Context(), tenant, Filter{Types: []ledger.Type{ledger.Release}}, 1000, "")
	require.NoError(t, err)
	require.Len(t, released, 30)
	require.Equal(t, "expired", released[0].Description)
	require.Equal(t, sweeper, released[0].By)
	w.clean()
}

// TestInconsistentWallet makes the records of a wallet inconsistent. The wallet must refuse all requests, the audit
// must find it, and the reservations of other wallets must still expire.
func TestInconsistentWallet(t *testing.T) {
	w := funded(t, 100)
	w.must(ledger.Command{Op: ledger.DoReserve, Amount: 10, TTL: 1})
	_, err := w.credits.Execute(w.as("eve", ""), Request{Tenant: other, Command: ledger.Command{Op: ledger.DoCreate, Amount: 50}})
	require.NoError(t, err)
	_, err = w.credits.Execute(w.as("eve", ""), Request{Tenant: other, Command: ledger.Command{Op: ledger.DoReserve, Amount: 50, TTL: 1}})
	require.NoError(t, err)
	_, err = w.store.Update(t.Context(), func(tx *store.Tx) error {
		broken, err := wallets.Get(tx, "web")
		broken.Accounts.Wallet += 1000
		wallets.Put(tx, broken, "web")
		return err
	})
	require.NoError(t, err)
	_, err = w.execute("", ledger.Command{Op: ledger.DoTopUp, Amount: 1})
	var v *ledger.Violation
	require.ErrorAs(t, err, &v)
	_, refused := fault.From(err)
	require.False(t, refused, "an inconsistent wallet must cause an internal error, not a refusal")
	w.clock.Advance(2 * time.Second)
	require.ErrorContains(t, w.credits.Sweep(t.Context()), "web")
	sound, err := w.credits.Wallet(t.Context(), other)
	require.NoError(t, err)
	require.Zero(t, sound.Reserved())
	var found []Finding
	require.NoError(t, w.credits.Audit(t.Context(), func(f Finding) error { found = append(found, f); return nil }))
	require.Len(t, found, 2)
	require.Equal(t, Finding{Project: "lair", Transactions: 3, Reservations: 1}, found[0])
	require.Equal(t, cloud.ProjectID("web"), found[1].Project)
	require.NotEmpty(t, found[1].Problem)
}

// TestAuditFindsLostDeadlines checks that the audit finds a pending reservation without a record in due, and a record
// in due of a reservation that is not pending.
func TestAuditFindsLostDeadlines(t *testing.T) {
	for name, spoil := range map[string]func(tx *store.Tx, row ...string){
		"pending reservation without a record in due": func(tx *store.Tx, row ...string) { due.Delete(tx, row...) },
		"ended reservation with a record in due":      func(tx *store.Tx, row ...string) { due.Put(tx, &struct{}{}, row...) },
	} {
		t.Run(name, func(t *testing.T) {
			w := funded(t, 100)
			r := w.must(ledger.Command{Op: ledger.DoReserve, Amount: 10}).Reservation
			if name == "ended reservation with a record in due" {
				w.must(ledger.Command{Op: ledger.DoCommit, Reservation: r.ID})
			}
			w.clean()
			_, err := w.store.Update(t.Context(), func(tx *store.Tx) error {
				spoil(tx, number(r.Deadline), "web", r.ID)
				return nil
			})
			require.NoError(t, err)
			require.NoError(t, w.credits.Audit(t.Context(), func(f Finding) error {
				require.Contains(t, f.Problem, r.ID)
				return nil
			}))
		})
	}
}

// TestSweepContinues checks that one sweep expires more reservations than a page has, in one wallet and in many.
func TestSweepContinues(t *testing.T) {
	w := funded(t, 100_000)
	for range sweepPage + 30 {
		w.must(ledger.Command{Op: ledger.DoReserve, Amount: 1, TTL: 1})
	}
	for n := range 40 {
		many := cloud.Tenant{Org: "o", Project: cloud.ProjectID(fmt.Sprint("p", n))}
		w.projects[many.Project] = Project{Exists: true, Org: many.Org, Incarnation: cloud.Incarnation(n)}
		for _, c := range []ledger.Command{{Op: ledger.DoCreate, Amount: 10}, {Op: ledger.DoReserve, Amount: 10, TTL: 1}} {
			_, err := w.credits.Execute(w.as("ada", ""), Request{Tenant: many, Command: c})
			require.NoError(t, err)
		}
	}
	w.clock.Advance(time.Second)
	require.NoError(t, w.credits.Sweep(t.Context()))
	require.Zero(t, w.rows())
	require.EqualValues(t, 100_000, w.wallet().Available())
	w.clean()
}
