// Package books computes the sums that a ledger must hold after a known load, and compares them with those that the
// ledger reports. It is pure arithmetic, and independent of the ledger and of the load.
package books

import "fmt"

// Books holds the sums over all wallets of a ledger.
type Books struct {
	Wallets, Transactions, Reservations int64
	// Deposited, Consumed and Reserved are in units of credit; Balance is Deposited minus Consumed.
	Deposited, Consumed, Reserved, Balance int64
}

// After returns the sums of wallets that began with a deposit each, after pairs of a reservation and a commit of all of
// it. A deposit is one transaction, a pair two.
func After(wallets, deposit, pairs, amount int64) Books {
	return Books{
		Wallets: wallets, Transactions: wallets + 2*pairs, Reservations: pairs,
		Deposited: wallets * deposit, Consumed: pairs * amount, Balance: wallets*deposit - pairs*amount,
	}
}

// Compare returns an error that names the first sum that differs from must.
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
