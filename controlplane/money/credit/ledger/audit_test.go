package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// records holds all records of one wallet.
type records struct {
	wallet       ledger.Wallet
	transactions []ledger.Transaction
	reservations []ledger.Reservation
	refunded     int64
}

// someRecords returns the records of a wallet after these commands: deposit 100, reserve 40, commit 30 of it, reserve
// 20, and refund 5 of the commit.
func someRecords(t *testing.T) *records {
	d, r := newTestLedger(), &records{}
	for n, c := range []ledger.Command{
		{Op: ledger.DoCreate, Amount: 100}, {Op: ledger.DoReserve, Reservation: "r", Amount: 40}, {Op: ledger.DoCommit, Reservation: "r", Amount: 30},
		{Op: ledger.DoReserve, Reservation: "s", Amount: 20}, {Op: ledger.DoRefund, Charge: 3, Amount: 5},
	} {
		out := d.must(t, int64(n), c)
		r.wallet = out.Wallet
		r.transactions = append(r.transactions, out.Transactions...)
		r.refunded = out.Refunded
	}
	r.reservations = []ledger.Reservation{*d.Reservation(project, "r"), *d.Reservation(project, "s")}
	return r
}

func (r *records) audit() error {
	a := ledger.NewAudit(r.wallet)
	for i := range r.transactions {
		a.Transaction(&r.transactions[i])
	}
	for i := range r.reservations {
		a.Reservation(&r.reservations[i])
	}
	a.Refunded(&r.transactions[2], r.refunded)
	return a.Done()
}

// TestAuditFindsChanges checks that an audit finds each single change of the stored records.
func TestAuditFindsChanges(t *testing.T) {
	require.NoError(t, someRecords(t).audit())
	for name, spoil := range map[string]func(*records){
		"more credit in the account wallet":                  func(r *records) { r.wallet.Accounts.Wallet++ },
		"more credit in the wallet and less in funding":      func(r *records) { r.wallet.Accounts.Wallet++; r.wallet.Accounts.Funding-- },
		"a negative account":                                 func(r *records) { r.wallet.Accounts.Wallet -= 100; r.wallet.Accounts.Revenue += 100 },
		"reserved credit without a reservation":              func(r *records) { r.wallet.Accounts.Wallet--; r.wallet.Accounts.Held++ },
		"one more pending reservation in the wallet's count": func(r *records) { r.wallet.Pending++ },
		"no pending reservation in the wallet's count":       func(r *records) { r.wallet.Pending = 0 },
		"an unknown wallet status":                           func(r *records) { r.wallet.Status = 9 },
		"a closed wallet with a pending reservation":         func(r *records) { r.wallet.Status = ledger.Closed },
		"another total of movements":                         func(r *records) { r.wallet.Totals[0].Lo++ },
		"a missing transaction":                              func(r *records) { r.transactions = r.transactions[:5] },
		"a transaction twice":                                func(r *records) { r.transactions = append(r.transactions, r.transactions[5]) },
		"a wrong sequence number of a transaction":           func(r *records) { r.transactions[1].Sequence = 7 },
		"another amount of a transaction":                    func(r *records) { r.transactions[0].Amount++ },
		"another type of a transaction":                      func(r *records) { r.transactions[3].Type = ledger.Charge },
		"an unknown transaction type":                        func(r *records) { r.transactions[3].Type = 77 },
		"another balance after a transaction":                func(r *records) { r.transactions[4].BalanceAfter-- },
		"another project's transaction":                      func(r *records) { r.transactions[4].Project = "x" },
		"a transaction older than the previous one":          func(r *records) { r.transactions[4].At = cloud.Time(1) },
		"a missing reservation":                              func(r *records) { r.reservations = r.reservations[1:] },
		"a committed reservation that is pending":            func(r *records) { r.reservations[0].Status = ledger.Pending },
		"a pending reservation that is released":             func(r *records) { r.reservations[1].Status, r.reservations[1].EndedAt = ledger.Released, 1 },
		"a reservation with a larger charge":                 func(r *records) { r.reservations[0].Charged++ },
		"a reservation of another amount":                    func(r *records) { r.reservations[1].Amount++ },
		"an unknown reservation status":                      func(r *records) { r.reservations[1].Status = 8 },
		"no refunded amount in spite of a refund":            func(r *records) { r.refunded = 0 },
		"a refund of more than the charge":                   func(r *records) { r.refunded = 31 },
		"missing transactions and a missing reservation":     func(r *records) { r.transactions = r.transactions[:3]; r.reservations = r.reservations[:1] },
	} {
		t.Run(name, func(t *testing.T) {
			r := someRecords(t)
			spoil(r)
			var v *ledger.Violation
			require.ErrorAs(t, r.audit(), &v)
			require.Equal(t, project, v.Project)
		})
	}
}

// TestInconsistentWalletIsRefused checks that Apply returns a Violation for a command on a wallet whose fields are
// inconsistent.
func TestInconsistentWalletIsRefused(t *testing.T) {
	r := someRecords(t)
	r.wallet.Accounts.Held -= 3
	_, err := ledger.Apply(ledger.Touched{Wallet: &r.wallet}, ledger.Command{Op: ledger.DoTopUp, Amount: 1, IDs: [2]string{"a"}})
	var v *ledger.Violation
	require.ErrorAs(t, err, &v)
	require.ErrorContains(t, err, "does not add up")
}

func TestNames(t *testing.T) {
	require.Equal(t, "unknown", ledger.WalletStatus(4).String())
	require.Equal(t, "unknown", ledger.ReservationStatus(0).String())
	require.Equal(t, "unknown", ledger.Type(7).String())
	require.Len(t, ledger.Types(), 6)
}
