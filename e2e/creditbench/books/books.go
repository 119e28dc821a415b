// Package books is what a ledger must hold after a load that is known: the sums that whoever measures compares with what
// the ledger says. It is pure arithmetic, and knows neither ledger nor load.
package books

import "fmt"

// Books are the sums over all wallets of a ledger.
type Books struct {
	Wallets, Transactions, Reservations int64
	// Deposited, Consumed and Reserved are units of credit; Balance is what was deposited and not consumed.
	Deposited, Consumed, Reserved, Balance int64
}

// After is what stands in the books of wallets that began with a deposit each, after pairs of a reservation and the
// commit of all of it. The deposit is a transaction, each half of a pair is one.
func After(wallets, deposit, pairs, amount int64) Books {
	return Books{
		Wallets: wallets, Transactions: wallets + 2*pairs, Reservations: pairs,
		Deposited: wallets * deposit, Consumed: pairs * amount, Balance: wallets*deposit - pairs*amount,
	}
}

// Compare says in which sum the books are not what they must be.
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
