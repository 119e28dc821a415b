package history

import (
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger/ledgertest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Sweeper is the value of Transaction.By for transactions with which the control plane expires reservations.
const Sweeper = "system:expiry"

// effect describes the transactions that one call or one expiry appended to the journal. The fields from and to are the
// numbers of transactions in the journal before and after them. The field at is the time of these transactions, in Unix
// milliseconds.
type effect struct {
	kind     Kind
	name     string
	from, to int
	amount   int64
	at       cloud.Time
}

// fate is the history of a reservation. The fields made and ended are journal positions, that is, numbers of
// transactions: the reservation exists from made on, and is no longer pending from ended on. ended is 0 if it stays
// pending. status is its final status.
type fate struct {
	amount, charged int64
	made, ended     int
	status          ledger.ReservationStatus
	deadline        cloud.Time
}

// The method at returns the reservation's status at journal position n, or 0 if the reservation does not exist there.
func (f *fate) at(n int) ledger.ReservationStatus {
	switch {
	case f == nil || n < f.made:
		return 0
	case f.ended == 0 || n < f.ended:
		return ledger.Pending
	}
	return f.status
}

// book holds what is computed by executing the calls of a journal again: the wallet's figures at each journal position,
// and the effect of each call.
type book struct {
	// after holds the wallet's figures at each journal position, that is, after so many transactions.
	after   []Figures
	effects map[Kind]map[string]*effect
	fates   map[string]*fate
}

// open executes the journal's calls again with the ledger, in the order of the journal. It returns an error if the
// ledger does not produce equal transactions. The first transaction must be the one that creates the wallet with a
// balance.
func open(org cloud.OrgID, project cloud.ProjectID, journal []ledger.Transaction, ops []Op) (*book, error) {
	asked := map[string]*Op{}
	for i := range ops {
		if ops[i].Kind == Reserve {
			asked[ops[i].Name] = &ops[i]
		}
	}
	b := &book{after: make([]Figures, len(journal)+1), effects: map[Kind]map[string]*effect{}, fates: map[string]*fate{}}
	m := ledgertest.NewMemory()
	var last cloud.Time
	for n := 0; n < len(journal); {
		tx := &journal[n]
		if tx.At < last {
			return nil, fmt.Errorf("transaction %d is of %d, the one before it of %d", tx.Sequence, tx.At, last)
		}
		last = tx.At
		c, kind, err := again(tx, n == 0, asked)
		if err != nil {
			return nil, fmt.Errorf("transaction %d: %w", tx.Sequence, err)
		}
		c.Tenant = cloud.Tenant{Org: org, Project: project}
		if n+1 < len(journal) {
			c.IDs[1] = journal[n+1].ID
		}
		out, err := m.Do(project, c)
		if err != nil {
			return nil, fmt.Errorf("transaction %d, %s %s: the ledger refuses it: %w", tx.Sequence, kind, tx.Reservation, err)
		}
		if len(out.Transactions) == 0 {
			return nil, fmt.Errorf("transaction %d, %s %s at %d: the ledger would do nothing", tx.Sequence, kind, tx.Reservation, tx.At)
		}
		for i, want := range out.Transactions {
			if n+i >= len(journal) {
				return nil, fmt.Errorf("transaction %d is the last, the ledger would make %+v", tx.Sequence, want)
			}
			want.Totals = ledger.Totals{}
			if got := journal[n+i]; got != want {
				return nil, fmt.Errorf("transaction %d is %+v, the ledger would make %+v", got.Sequence, got, want)
			}
		}
		to := n + len(out.Transactions)
		if err := b.take(kind, c, &out, n, to); err != nil {
			return nil, err
		}
		n = to
	}
	if len(journal) == 0 {
		return nil, fmt.Errorf("the journal is empty")
	}
	return b, m.Audit()
}

// again returns the ledger command that must have produced the transaction tx (and the next one, if the command makes
// two). kind is the kind of the call that sent the command; it is 0 for the first transaction. asked holds the reserve
// calls by reservation id.
func again(tx *ledger.Transaction, first bool, asked map[string]*Op) (c ledger.Command, kind Kind, err error) {
	c = ledger.Command{
		At: tx.At, By: tx.By, IDs: [2]string{tx.ID}, Amount: tx.Amount, Description: tx.Description, Reservation: tx.Reservation, ResourceID: tx.ResourceID,
	}
	switch {
	case first:
		c.Op = ledger.DoCreate
	case tx.Type == ledger.TopUp:
		c.Op, kind = ledger.DoTopUp, TopUp
	case tx.Type == ledger.Hold:
		o := asked[tx.Reservation]
		if o == nil {
			return c, kind, fmt.Errorf("no call created reservation %s", tx.Reservation)
		}
		c.Op, c.TTL, kind = ledger.DoReserve, o.TTL, Reserve
	case tx.Type == ledger.Charge:
		c.Op, kind = ledger.DoCommit, Commit
	case tx.Type == ledger.Release && tx.By == Sweeper:
		c.Op, kind = ledger.DoExpire, expire
	case tx.Type == ledger.Release:
		c.Op, kind = ledger.DoRelease, Release
	default:
		return c, kind, fmt.Errorf("unexpected transaction type %s", tx.Type)
	}
	return c, kind, nil
}

// take adds the effect of a command to b. The arguments from and to are the journal positions before and after the
// command's transactions.
func (b *book) take(kind Kind, c ledger.Command, out *ledger.Outcome, from, to int) error {
	for i := from + 1; i <= to; i++ {
		b.after[i].Sequence = uint64(i) // only the last has figures: clients see no wallet inside of a command
	}
	b.after[to] = figuresOf(&out.Wallet)
	if kind == 0 {
		return nil
	}
	name := c.Reservation
	if kind == TopUp {
		name = c.Description
	}
	if b.effects[kind] == nil {
		b.effects[kind] = map[string]*effect{}
	}
	if was := b.effects[kind][name]; was != nil {
		return fmt.Errorf("transaction %d: %s %s was done before, by transaction %d", to, kind, name, was.to)
	}
	b.effects[kind][name] = &effect{kind: kind, name: name, from: from, to: to, amount: c.Amount, at: c.At}
	if r := out.Reservation; r != nil {
		f := b.fates[r.ID]
		if f == nil {
			f = &fate{amount: r.Amount, made: to, deadline: r.Deadline}
			b.fates[r.ID] = f
		}
		f.status, f.charged = r.Status, r.Charged
		if r.Status != ledger.Pending {
			f.ended = to
		}
	}
	return nil
}
