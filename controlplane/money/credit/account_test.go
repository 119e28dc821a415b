package credit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestWalletBelongsToOneIncarnation creates a project under the ID of a deleted one. No call for the ID may show or
// change the wallet of the deleted project: its balance, transactions, reservations and charges. That wallet must stay
// readable for audits.
func TestWalletBelongsToOneIncarnation(t *testing.T) {
	for name, first := range map[string]cloud.Incarnation{"a deleted project with an incarnation": 1000, "a deleted project of a version without incarnations": 0} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			lives := func(i cloud.Incarnation, exists bool) {
				w.projects["web"] = Project{Exists: exists, Org: "acme", Incarnation: i}
			}
			held := func() error {
				return w.store.View(t.Context(), func(v *store.View) error { return Holds(w.credits.lookUp)(v, tenant) })
			}
			lives(first, true)
			w.must(ledger.Command{Op: ledger.DoCreate, Amount: 100})
			charge := w.must(ledger.Command{Op: ledger.DoCharge, Amount: 5}).Transactions[0]
			r := w.must(ledger.Command{Op: ledger.DoReserve, Amount: 10, TTL: 60}).Reservation
			require.True(t, fault.Is(held(), fault.FailedPrecondition), "%v", held())
			w.must(ledger.Command{Op: ledger.DoRelease, Reservation: r.ID})
			w.must(ledger.Command{Op: ledger.DoClose})
			require.NoError(t, held())
			lives(first, false)
			require.EqualValues(t, 95, w.wallet().Balance(), "the wallet must be readable while the project's ID is reserved")

			lives(2000, true)
			_, err := w.credits.Wallet(t.Context(), tenant)
			require.True(t, fault.Is(err, fault.NotFound), "%v", err)
			for _, c := range []ledger.Command{
				{Op: ledger.DoTopUp, Amount: 1}, {Op: ledger.DoReserve, Amount: 1}, {Op: ledger.DoResume},
				{Op: ledger.DoRefund, Charge: charge.Sequence, Amount: 1}, {Op: ledger.DoCommit, Reservation: r.ID},
			} {
				_, err := w.execute("", c)
				require.True(t, fault.Is(err, fault.NotFound), "%+v: %v", c, err)
			}
			w.must(ledger.Command{Op: ledger.DoCreate, Amount: 7})
			require.EqualValues(t, 7, w.wallet().Balance())
			_, err = w.execute("", ledger.Command{Op: ledger.DoRefund, Charge: charge.Sequence, Amount: 1})
			require.Error(t, err)
			_, err = w.credits.Reservation(t.Context(), tenant, r.ID)
			require.True(t, fault.Is(err, fault.NotFound), "%v", err)
			list, _, err := w.credits.Transactions(t.Context(), tenant, Filter{}, 0, "")
			require.NoError(t, err)
			require.Len(t, list, 1)
			all, _, err := w.credits.Reservations(t.Context(), tenant, 0, 0, "")
			require.NoError(t, err)
			require.Empty(t, all)
			s, _, err := w.credits.Statement(t.Context(), tenant, Period{})
			require.NoError(t, err)
			require.EqualValues(t, 7, s.Closing)

			// The records of both wallets must be kept for audits.
			old, _, err := w.credits.Transactions(t.Context(), tenant, Filter{Of: &first}, 0, "")
			require.NoError(t, err)
			require.Len(t, old, 4)
			found := map[cloud.Incarnation]uint64{}
			require.NoError(t, w.credits.Audit(t.Context(), func(f Finding) error {
				require.Empty(t, f.Problem)
				require.Equal(t, tenant.Project, f.Project)
				found[f.Incarnation] = f.Transactions
				return nil
			}))
			require.Equal(t, map[cloud.Incarnation]uint64{first: 4, 2000: 1}, found)
			wallets, _, err := w.credits.Wallets(t.Context(), "acme", 0, "")
			require.NoError(t, err)
			require.Len(t, wallets, 2)

			// Reservations of the new wallet must expire, too.
			w.must(ledger.Command{Op: ledger.DoReserve, Amount: 7, TTL: 1})
			w.clock.Advance(time.Second)
			require.NoError(t, w.credits.Sweep(t.Context()))
			require.Zero(t, w.rows())
			require.EqualValues(t, 7, w.wallet().Available())
			w.clean()
		})
	}
}

// TestWalletWithoutAProject checks that a wallet without a project, which earlier versions allowed, can be read and
// closed. A project of its ID may be created only after that.
func TestWalletWithoutAProject(t *testing.T) {
	w := newWorld(t)
	w.projects["web"] = Project{Exists: true, Org: "acme"}
	w.must(ledger.Command{Op: ledger.DoCreate, Amount: 100})
	delete(w.projects, "web")
	vacant := func() error {
		return w.store.View(t.Context(), func(v *store.View) error { return Vacant(v, tenant.Project) })
	}
	require.EqualValues(t, 100, w.wallet().Balance())
	require.ErrorContains(t, vacant(), "have a billing:admin close it first")
	w.must(ledger.Command{Op: ledger.DoClose})
	require.NoError(t, vacant())
	_, err := w.execute("", ledger.Command{Op: ledger.DoCreate})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	require.ErrorContains(t, err, "no project web: create the project before its wallet")
}
