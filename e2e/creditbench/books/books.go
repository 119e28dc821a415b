// Package books computes the sums that a ledger must have after a known load, and compares them with the sums that the
// ledger reports.
package books

import "fmt"

// Books holds the sums over all wallets of a ledger.
type Books struct {
	Wallets, Transactions, Reservations int64
	// Deposited, Consumed, Reserved and Balance are in units of credit. Balance is Deposited minus Consumed.
	Deposited, Consumed, Reserved, Balance int64
}

// After returns the sums that a ledger must have after a load of two parts. First, wallets are created with a deposit
// each, which makes one transaction per wallet. Then pairs of calls are made: each pair reserves an amount and commits
// the complete reservation, which makes two transactions.
func After(wallets, deposit, pairs, amount int64) Books {
	return Books{
		Wallets: wallets, Transactions: wallets + 2*pairs, Reservations: pairs,
		Deposited: wallets * deposit, Consumed: pairs * amount, Balance: wallets*deposit - pairs*amount,
	}
}

// Compare returns an error that names the first sum that differs between b and the expected sums in must, or nil if all
// are equal.
func (b Books) Compare(must Books) error {
	for _, sum := range []struct {
		name      string
		got, must int64
	}{
		{"wallets", b.Wallets, must.Wallets}, {"transactions", b.Transactions, must.Transactions},
		{"reservations", b.Reservations, must.Reservations}, {"credit deposited", b.Deposited, must.Deposited},
		{"credit consumed", b.Consumed, must.Consumed}, {"credit reserved", b.Reserved, must.Reserved}, {"balance", b.Balance, must.Balance},
	} {
		if sum.got != sum.must {
			return fmt.Errorf("the books do not add up: %s: %d, must be %d", sum.name, sum.got, sum.must)
		}
	}
	return nil
}
