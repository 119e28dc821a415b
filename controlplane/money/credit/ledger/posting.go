package ledger

import (
	"fmt"
	"math"
	"math/bits"
)

// Accounts are the balances of a wallet's four accounts. Their sum is always zero.
type Accounts struct {
	// Funding is where deposits come from: never positive.
	Funding int64
	// Wallet is what is free to use.
	Wallet int64
	// Held is what reservations hold.
	Held int64
	// Revenue is what was charged.
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

// flows says between which accounts a type of transaction moves its amount.
var flows = map[Type]struct{ from, to account }{
	TopUp:         {funding, wallet},
	Hold:          {wallet, held},
	Charge:        {held, revenue},
	Release:       {held, wallet},
	Refund:        {revenue, wallet},
	BillingCharge: {wallet, revenue},
}

// post moves an amount. An error is a violation: who asks has made sure that it fits.
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

// Sum is a sum of amounts that cannot overflow.
type Sum struct {
	_      struct{} `cbor:",toarray"`
	Hi, Lo uint64
}

// plus adds an amount, which is not negative.
func (s Sum) plus(amount int64) Sum {
	lo, carry := bits.Add64(s.Lo, uint64(amount), 0)
	return Sum{Hi: s.Hi + carry, Lo: lo}
}

// minus is the difference to an earlier sum; ok is false when it is larger than an int64.
func (s Sum) minus(earlier Sum) (amount int64, ok bool) {
	lo, borrow := bits.Sub64(s.Lo, earlier.Lo, 0)
	if s.Hi-earlier.Hi-borrow != 0 || lo > math.MaxInt64 {
		return 0, false
	}
	return int64(lo), true
}

// Totals are the sums of a wallet's transactions by type, in the order of the types.
type Totals [endOfTypes - 1]Sum

// Of is the sum of one type.
func (t *Totals) Of(which Type) Sum { return t[which-1] }

func (t *Totals) add(which Type, amount int64) { t[which-1] = t[which-1].plus(amount) }

// Moved is the amount by which a type's total grew since an earlier one; ok is false when it is larger than an int64.
func (t *Totals) Moved(which Type, since *Totals) (amount int64, ok bool) {
	return t.Of(which).minus(since.Of(which))
}
