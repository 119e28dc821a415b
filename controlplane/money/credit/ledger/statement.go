package ledger

import "github.com/trivet-cloud/trivet/shared/fault"

// Statement is what happened to a wallet in some time.
type Statement struct {
	// Opening and Closing are the balances before and after.
	Opening, Closing int64
	// Moved are the amounts by type, in the order of the types.
	Moved [endOfTypes - 1]int64
	// Transactions counts them.
	Transactions uint64
}

// Of is the amount of one type.
func (s *Statement) Of(t Type) int64 { return s.Moved[t-1] }

// Between is the statement from after one transaction to another, both of one wallet; nil stands for the time before the
// first. A transaction carries its wallet's totals, so none of those between need be read. OutOfRange when more was moved
// than a number can say.
func Between(before, last *Transaction) (s Statement, err error) {
	if before == nil {
		before = &Transaction{}
	}
	if last == nil {
		last = &Transaction{}
	}
	s = Statement{Opening: before.BalanceAfter, Closing: last.BalanceAfter, Transactions: last.Sequence - before.Sequence}
	for _, t := range Types() {
		amount, ok := last.Totals.Moved(t, &before.Totals)
		if !ok {
			return s, fault.New(fault.OutOfRange, "more was moved by %s than can be told in one number: ask for a shorter time", t)
		}
		s.Moved[t-1] = amount
	}
	return s, nil
}
