package ledger

import (
	"fmt"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Violation is the error for a broken invariant of a wallet. The cause is a bug or corrupt data. The caller must not
// write any records then.
type Violation struct {
	Project cloud.ProjectID
	Says    string
}

func (v *Violation) Error() string {
	return fmt.Sprintf("the wallet of %s does not add up: %s", v.Project, v.Says)
}

func violation(p cloud.ProjectID, format string, args ...any) error {
	return &Violation{p, fmt.Sprintf(format, args...)}
}

// Check returns a *Violation if the fields of the wallet contradict each other (invariants I1 to I3 of the package
// comment).
func (w *Wallet) Check() error {
	a := w.Accounts
	switch {
	case a.Wallet < 0 || a.Held < 0 || a.Wallet+a.Held < 0:
		return violation(w.Project, "I1: available %d, reserved %d", a.Wallet, a.Held)
	case (a.Held == 0) != (w.Pending == 0) || w.Pending > MaxPending || uint64(a.Held) < w.Pending:
		return violation(w.Project, "I2: %d held by %d reservations", a.Held, w.Pending)
	case a.Funding > 0 || a.Revenue < 0 || a.Wallet+a.Held+a.Revenue != -a.Funding:
		return violation(w.Project, "I3: %+v", a)
	case w.Status < Active || w.Status > Closed || w.Status == Closed && a.Held != 0:
		return violation(w.Project, "status %d, %d held", w.Status, a.Held)
	}
	return nil
}

// Check returns a *Violation if the fields of the reservation contradict its status (invariant I5 of the package
// comment).
func (r *Reservation) Check() error {
	good := r.Amount > 0
	switch r.Status {
	case Pending:
		good = good && r.Charged == 0 && r.EndedAt == 0
	case Committed:
		good = good && r.Charged > 0 && r.Charged <= r.Amount && r.EndedAt != 0
	case Released, Expired:
		good = good && r.Charged == 0 && r.EndedAt != 0
	default:
		good = false
	}
	if !good {
		return violation(r.Project, "I5: reservation %s is %s, of %d, charged %d", r.ID, r.Status, r.Amount, r.Charged)
	}
	return nil
}

// pending returns what the reservation adds to the fields Pending and Held of its wallet. That is 1 and its amount if
// it is pending, and otherwise 0 and 0. r may be nil.
func (r *Reservation) pending() (count uint64, amount int64) {
	if r == nil || r.Status != Pending {
		return 0, 0
	}
	return 1, r.Amount
}

// checkStep returns a *Violation if a command has broken an invariant. t contains the records before the command, and
// out those after it. The check takes constant time.
func checkStep(t Touched, out *Outcome) error {
	w := &out.Wallet
	if err := w.Check(); err != nil {
		return err
	}
	var before Wallet
	if t.Wallet != nil {
		before = *t.Wallet
	}
	accounts := before.Accounts
	for i, tx := range out.Transactions {
		if err := accounts.post(tx.Type, tx.Amount); err != nil {
			return violation(w.Project, "%v", err)
		}
		balance := accounts.Wallet + accounts.Held
		if tx.Sequence != before.Sequence+uint64(i)+1 || tx.BalanceAfter != balance || tx.ID == "" {
			return violation(w.Project, "I4: transaction %d %q after %d says balance %d, it is %d", tx.Sequence, tx.ID, before.Sequence, tx.BalanceAfter, balance)
		}
	}
	if accounts != w.Accounts || w.Sequence != before.Sequence+uint64(len(out.Transactions)) {
		return violation(w.Project, "I4: %+v and %d transactions make %+v, not %+v", before.Accounts, len(out.Transactions), accounts, w.Accounts)
	}
	if err := checkReservation(t.Reservation, out); err != nil {
		return err
	}
	counted, amount := out.Reservation.pending()
	was, wasAmount := t.Reservation.pending()
	if w.Pending != before.Pending+counted-was || w.Reserved() != before.Reserved()+amount-wasAmount {
		return violation(w.Project, "I2: %d held by %d, before %d by %d", w.Reserved(), w.Pending, before.Reserved(), before.Pending)
	}
	if t.Charge != nil && (out.Refunded < t.Refunded || out.Refunded > t.Charge.Amount) {
		return violation(w.Project, "I3: %d refunded of a charge of %d", out.Refunded, t.Charge.Amount)
	}
	return nil
}

// checkReservation returns a *Violation if a new reservation is not pending, or if a reservation that was not pending
// has changed.
func checkReservation(before *Reservation, out *Outcome) error {
	now := out.Reservation
	switch {
	case now == nil && before == nil:
		return nil
	case now == nil:
		return violation(out.Wallet.Project, "I5: reservation %s is gone", before.ID)
	case before == nil && now.Status != Pending:
		return violation(out.Wallet.Project, "I5: reservation %s began as %s", now.ID, now.Status)
	case before != nil && before.Status != Pending && *before != *now:
		return violation(out.Wallet.Project, "I5: reservation %s was %s and is %s", now.ID, before.Status, now.Status)
	}
	return now.Check()
}
