package ledger

import "github.com/trivet-cloud/trivet/shared/fault"

// Statement summarizes a wallet's transactions in a period.
type Statement struct {
	// Opening and Closing are the balances at the start and the end of the period.
	Opening, Closing int64
	// Moved holds the sum of the transactions of each type, in the order of Types.
	Moved [endOfTypes - 1]int64
	// Transactions is the number of transactions in the period.
	Transactions uint64
}

// Of returns the sum of the transactions of type t.
func (s *Statement) Of(t Type) int64 { return s.Moved[t-1] }

// Between returns the statement of one wallet for a period. Its arguments are the last transaction before the start of
// the period and the last one before its end; nil means that there is none. Each transaction contains the wallet's
// totals, so the transactions in between need not be read. Between returns OutOfRange if a sum does not fit an int64.
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
