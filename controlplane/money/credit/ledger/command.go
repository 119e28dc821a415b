package ledger

import (
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Op is the operation of a command on a wallet.
type Op uint8

const (
	DoCreate Op = iota + 1
	DoTopUp
	DoReserve
	DoCommit
	DoRelease
	DoExpire
	DoRefund
	DoCharge
	DoSuspend
	DoResume
	DoClose
)

// Command is an operation on one wallet. Fields that the operation does not use are zero.
type Command struct {
	Op Op
	// At is the time of the command, and By the name of the user or service that sent it.
	At cloud.Time
	By string
	// IDs are the IDs for the transactions that the command makes, which are at most two.
	IDs [2]string
	// Tenant is the owner of the new wallet. Only DoCreate uses it.
	Tenant cloud.Tenant
	// Amount is in units of credit. DoCreate uses it as the initial balance, which may be 0. In DoCommit, 0 means the
	// full reserved amount.
	Amount      int64
	Description string
	// Reservation is the ID of the reservation to make, commit, release or expire.
	Reservation string
	// TTL is the time until the deadline of a new reservation, in seconds; 0 means DefaultTTL.
	TTL          int64
	ResourceType string
	ResourceID   string
	// Charge is the sequence number of the charge to refund.
	Charge uint64
}

// Touched holds the records that a command reads, as they are before the command. A nil field means that the record
// does not exist.
type Touched struct {
	Wallet *Wallet
	// Reservation is the reservation whose ID is in the command.
	Reservation *Reservation
	// Charge is the transaction whose sequence number is in the command. Refunded is the amount of that charge that has
	// been refunded so far.
	Charge   *Transaction
	Refunded int64
}

// Outcome holds the records that must be written after a command.
type Outcome struct {
	Wallet Wallet
	// Reservation is the new state of the reservation whose ID is in the command.
	Reservation *Reservation
	// Transactions are the new transactions, in the order of their sequence numbers.
	Transactions []Transaction
	// Refunded is the total amount refunded, after this command, of the charge whose sequence number is in the command.
	Refunded int64
	// Released is set by DoRelease. It is true if the reservation is now released, by this command or an earlier one.
	Released bool
	// Changed is false if there is nothing to write, because the command was executed before or has no effect.
	Changed bool
}

// step is the state of one call of Apply: the command, the records that the command reads, and the outcome so far. Its
// methods modify only copies of the records.
type step struct {
	c   Command
	t   Touched
	out *Outcome
}

// rule holds the preconditions and the implementation of an operation.
type rule struct {
	// makes is true if the operation creates the wallet. Such an operation fails with AlreadyExists if the wallet
	// exists.
	makes bool
	// refused lists the statuses of the wallet in which the operation is refused. Repeating a command that was already
	// executed succeeds in any status.
	refused []WalletStatus
	do      func(*step) error
}

// rules contains the rule of each operation. A closed wallet cannot be changed, and a suspended one accepts no new
// reservations.
var rules = map[Op]rule{
	DoCreate:  {makes: true, do: (*step).create},
	DoTopUp:   {refused: []WalletStatus{Closed}, do: (*step).topUp},
	DoReserve: {refused: []WalletStatus{Suspended, Closed}, do: (*step).reserve},
	DoCommit:  {refused: []WalletStatus{Closed}, do: (*step).commit},
	DoRelease: {refused: []WalletStatus{Closed}, do: (*step).release},
	DoExpire:  {refused: []WalletStatus{Closed}, do: (*step).expire},
	DoRefund:  {refused: []WalletStatus{Closed}, do: (*step).refund},
	DoCharge:  {refused: []WalletStatus{Closed}, do: (*step).charge},
	DoSuspend: {refused: []WalletStatus{Closed}, do: (*step).suspend},
	DoResume:  {refused: []WalletStatus{Closed}, do: (*step).resume},
	DoClose:   {do: (*step).close},
}

// NoWallet returns the NotFound error for a wallet that does not exist. Part 4.7 of the wire contract prescribes its
// text.
func NoWallet() *fault.Fault { return fault.New(fault.NotFound, "Wallet not found") }

// Apply executes the command c on the records t and returns the records to write. A *fault.Fault means that the command
// is refused. Any other error is a *Violation. After an error, the caller must write nothing. Apply does not modify its
// arguments.
func Apply(t Touched, c Command) (Outcome, error) {
	r, ok := rules[c.Op]
	if !ok {
		return Outcome{}, fault.New(fault.InvalidArgument, "no operation %d", c.Op)
	}
	s := &step{c: c, t: t, out: &Outcome{Refunded: t.Refunded}}
	switch {
	case r.makes && t.Wallet != nil:
		return Outcome{}, fault.New(fault.AlreadyExists, "project %s has a wallet", t.Wallet.Project)
	case r.makes:
	case t.Wallet == nil:
		return Outcome{}, NoWallet()
	default:
		if err := t.Wallet.Check(); err != nil {
			return Outcome{}, err
		}
		s.out.Wallet = *t.Wallet
	}
	if t.Reservation != nil {
		held := *t.Reservation
		s.out.Reservation = &held
	}
	if done, err := s.repeated(); done {
		return *s.out, err
	}
	for _, status := range r.refused {
		if s.out.Wallet.Status == status {
			return Outcome{}, fault.New(fault.FailedPrecondition, "the wallet is %s", status).WithReason(reasonOf[status])
		}
	}
	if err := r.do(s); err != nil {
		return Outcome{}, err
	}
	if s.out.Changed {
		s.out.Wallet.UpdatedAt = c.At
	}
	return *s.out, checkStep(t, s.out)
}

var reasonOf = map[WalletStatus]string{Suspended: "WALLET_SUSPENDED", Closed: "WALLET_CLOSED"}

// post adds a transaction of type t to the outcome and changes the wallet's accounts. The parameter more contains the
// description of the transaction and its references to other records.
func (s *step) post(t Type, amount int64, more Transaction) error {
	w := &s.out.Wallet
	if err := w.Accounts.post(t, amount); err != nil {
		return &Violation{Project: w.Project, Says: err.Error()}
	}
	w.Sequence++
	w.Totals.add(t, amount)
	tx := more
	tx.ID, tx.Project, tx.Sequence, tx.Type, tx.Amount = s.c.IDs[len(s.out.Transactions)], w.Project, w.Sequence, t, amount
	tx.BalanceAfter, tx.At, tx.By, tx.Totals = w.Balance(), s.c.At, s.c.By, w.Totals
	s.out.Transactions = append(s.out.Transactions, tx)
	s.out.Changed = true
	return nil
}

// spend adds a transaction of the command's amount, which is taken from the available amount of the wallet. It returns
// ResourceExhausted if the available amount is too small.
func (s *step) spend(t Type, more Transaction) error {
	free := s.out.Wallet.Available()
	if mutant.On(mutant.IgnoreHolds) {
		free = s.out.Wallet.Balance()
	}
	if s.c.Amount > free {
		return fault.New(fault.ResourceExhausted, "%d is wanted, %d is available", s.c.Amount, s.out.Wallet.Available()).
			WithReason("INSUFFICIENT_CREDIT").With("available", s.out.Wallet.Available())
	}
	return s.post(t, s.c.Amount, more)
}

func (s *step) positive() error {
	if s.c.Amount <= 0 {
		return fault.Invalid("amount", "must be 1 or more, got %d", s.c.Amount)
	}
	return nil
}
