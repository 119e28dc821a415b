package ledger

import (
	"fmt"
	"math"
	"math/bits"
)

// Accounts are the balances of the four accounts of a wallet. Their sum is always zero.
type Accounts struct {
	// Funding is minus the sum of all deposits.
	Funding int64
	// Wallet is the amount that can be reserved or charged.
	Wallet int64
	// Held is the sum of the pending reservations.
	Held int64
	// Revenue is the amount charged and not refunded.
	Revenue int64
}

type account uint8

const (
	funding account = iota
	wallet
	held
	revenue
)

func (a *Accounts) of(which account) *int64 {
	return [...]*int64{&a.Funding, &a.Wallet, &a.Held, &a.Revenue}[which]
}

// flows contains, for each type of transaction, the account from which it takes its amount and the account to which it
// adds it.
var flows = map[Type]struct{ from, to account }{
	TopUp:         {funding, wallet},
	Hold:          {wallet, held},
	Charge:        {held, revenue},
	Release:       {held, wallet},
	Refund:        {revenue, wallet},
	BillingCharge: {wallet, revenue},
}

// post moves an amount between the two accounts that flows lists for the type t. An error means that an invariant is
// broken, because callers check beforehand that the amount is available.
func (a *Accounts) post(t Type, amount int64) error {
	flow, ok := flows[t]
	if !ok || amount <= 0 {
		return fmt.Errorf("I6: %s of %d", t, amount)
	}
	from, to := a.of(flow.from), a.of(flow.to)
	if *from < math.MinInt64+amount || *to > math.MaxInt64-amount {
		return fmt.Errorf("I6: %s of %d overflows %+v", t, amount, *a)
	}
	*from -= amount
	*to += amount
	return nil
}

// Sum is a 128-bit sum of amounts. It cannot overflow in practice.
type Sum struct {
	_      struct{} `cbor:",toarray"`
	Hi, Lo uint64
}

// plus returns s + amount. amount must not be negative.
func (s Sum) plus(amount int64) Sum {
	lo, carry := bits.Add64(s.Lo, uint64(amount), 0)
	return Sum{Hi: s.Hi + carry, Lo: lo}
}

// minus returns the difference of two sums, of which s is the later one. ok is false if the difference does not fit an
// int64.
func (s Sum) minus(earlier Sum) (amount int64, ok bool) {
	lo, borrow := bits.Sub64(s.Lo, earlier.Lo, 0)
	if s.Hi-earlier.Hi-borrow != 0 || lo > math.MaxInt64 {
		return 0, false
	}
	return int64(lo), true
}

// Totals holds the sum of a wallet's transactions of each type, in the order of Types.
type Totals [endOfTypes - 1]Sum

// Of returns the sum of the transactions of a type.
func (t *Totals) Of(which Type) Sum { return t[which-1] }

func (t *Totals) add(which Type, amount int64) { t[which-1] = t[which-1].plus(amount) }

// Moved returns how much the sum of the transactions of a type grew between two totals of a wallet, of which t are the
// later ones. ok is false if the result does not fit an int64.
func (t *Totals) Moved(which Type, since *Totals) (amount int64, ok bool) {
	return t.Of(which).minus(since.Of(which))
}
