package ledger

import "fmt"

// Audit recomputes a wallet from its records and compares the result with the stored wallet. Call Transaction for all
// transactions in order, Reservation for all reservations, Refunded for all refunded charges, and then Done. Audit
// keeps only sums in memory, not the records.
type Audit struct {
	wallet Wallet
	// now is the wallet as recomputed from the transactions added so far.
	now Wallet
	// at is the time of the last transaction added.
	at int64
	// transactions and reservations are the numbers of records added so far.
	transactions, reservations uint64
	// pending is the number of pending reservations added so far. The other fields are sums of amounts of the
	// reservations and refunds added so far.
	pending                                     uint64
	held, reserved, charged, released, refunded Sum
	// first is the first inconsistency found, or nil.
	first error
}

// NewAudit returns an Audit of the stored wallet w.
func NewAudit(w Wallet) *Audit { return &Audit{wallet: w, first: w.Check()} }

func (a *Audit) fail(format string, args ...any) {
	if a.first == nil {
		a.first = violation(a.wallet.Project, format, args...)
	}
}

// Transaction adds the wallet's next transaction.
func (a *Audit) Transaction(tx *Transaction) {
	a.transactions++
	if err := a.now.Accounts.post(tx.Type, tx.Amount); err != nil {
		a.fail("transaction %d: %v", tx.Sequence, err)
		return
	}
	a.now.Totals.add(tx.Type, tx.Amount)
	acc := a.now.Accounts
	switch {
	case tx.Sequence != a.transactions:
		a.fail("I4: transaction %d stands at %d", tx.Sequence, a.transactions)
	case tx.Project != a.wallet.Project:
		a.fail("transaction %d is of %s", tx.Sequence, tx.Project)
	case tx.BalanceAfter != a.now.Balance():
		a.fail("I4: transaction %d leaves %d, not %d", tx.Sequence, a.now.Balance(), tx.BalanceAfter)
	case tx.Totals != a.now.Totals:
		a.fail("I4: transaction %d has totals %v, not %v", tx.Sequence, tx.Totals, a.now.Totals)
	case acc.Wallet < 0 || acc.Held < 0 || acc.Revenue < 0:
		a.fail("I1: after transaction %d: %+v", tx.Sequence, acc)
	case tx.At < a.at:
		a.fail("transaction %d is older than the one before", tx.Sequence)
	}
	a.at = tx.At
}

// Reservation adds a reservation of the wallet. The order does not matter.
func (a *Audit) Reservation(r *Reservation) {
	a.reservations++
	if err := r.Check(); err != nil {
		a.fail("%v", err)
		return
	}
	a.reserved = a.reserved.plus(r.Amount)
	a.charged = a.charged.plus(r.Charged)
	if r.Status == Pending {
		a.pending++
		a.held = a.held.plus(r.Amount)
		return
	}
	a.released = a.released.plus(r.Amount - r.Charged)
}

// Refunded adds a charge that was refunded, with the total amount of its refunds.
func (a *Audit) Refunded(charge *Transaction, amount int64) {
	if amount < 0 || amount > charge.Amount || charge.Type != Charge && charge.Type != BillingCharge {
		a.fail("I3: %d refunded of transaction %d, a %s of %d", amount, charge.Sequence, charge.Type, charge.Amount)
		return
	}
	a.refunded = a.refunded.plus(amount)
}

// Transactions returns the number of transactions added.
func (a *Audit) Transactions() uint64 { return a.transactions }

// Reservations returns the number of reservations added.
func (a *Audit) Reservations() uint64 { return a.reservations }

// Done returns nil if the stored wallet equals the recomputed one. Otherwise it returns a *Violation that describes the
// first inconsistency.
func (a *Audit) Done() error {
	if a.first != nil {
		return a.first
	}
	w := &a.wallet
	for _, c := range []struct {
		what      string
		kept, got any
	}{
		{"I4: accounts", w.Accounts, a.now.Accounts},
		{"I4: transactions", w.Sequence, a.transactions},
		{"I4: totals", w.Totals, a.now.Totals},
		{"I2: pending reservations", w.Pending, a.pending},
		{"I2: reserved", Sum{Lo: uint64(w.Reserved())}, a.held},
		{"I5: reservations made", w.Totals.Of(Hold), a.reserved},
		{"I5: reservations charged", w.Totals.Of(Charge), a.charged},
		{"I5: reservations freed", w.Totals.Of(Release), a.released},
		{"I3: refunds", w.Totals.Of(Refund), a.refunded},
	} {
		if fmt.Sprint(c.kept) != fmt.Sprint(c.got) {
			a.fail("%s: kept %v, recomputed %v", c.what, c.kept, c.got)
		}
	}
	return a.first
}
