package ledger

import (
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Op is what a command does.
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

// Command is something to do to one wallet. Fields that an operation does not speak of are zero.
type Command struct {
	Op Op
	// At is when, and By who.
	At cloud.Time
	By string
	// IDs are those of the transactions that it may make.
	IDs [2]string
	// Tenant is whose the wallet is; for DoCreate.
	Tenant cloud.Tenant
	// Amount in units of credit. For DoCreate the balance to begin with, which may be 0; for DoCommit 0 is all that was
	// reserved.
	Amount      int64
	Description string
	// Reservation is the id of the one to make, commit, release or expire.
	Reservation string
	// TTL in seconds; 0 is DefaultTTL.
	TTL          int64
	ResourceType string
	ResourceID   string
	// Charge is the sequence of the charge to refund.
	Charge uint64
}

// Touched is what a command is about, as it is; nil where there is none.
type Touched struct {
	Wallet *Wallet
	// Reservation is the one that the command names.
	Reservation *Reservation
	// Charge is the transaction that the command names, and Refunded what of it was refunded.
	Charge   *Transaction
	Refunded int64
}

// Outcome is what to write.
type Outcome struct {
	Wallet Wallet
	// Reservation is the one that the command named, as it is now.
	Reservation *Reservation
	// Transactions are new, in order.
	Transactions []Transaction
	// Refunded is now the refunded part of the charge that the command named.
	Refunded int64
	// Released is the answer of DoRelease.
	Released bool
	// Changed is false when there is nothing to write: it was done before, or there was nothing to do.
	Changed bool
}

// step is a command being carried out on copies.
type step struct {
	c   Command
	t   Touched
	out *Outcome
}

// rule is what an operation needs of the wallet, and what it does.
type rule struct {
	// makes is set for the operation that needs a wallet not to be.
	makes bool
	// refused are the statuses in which it is; a command that was done before is answered in any of them.
	refused []WalletStatus
	do      func(*step) error
}

// rules is the table of all operations. A closed wallet is read-only, a suspended one reserves nothing.
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

// NoWallet is what is said of a wallet that is not there (the spec's part 4.7).
func NoWallet() *fault.Fault { return fault.New(fault.NotFound, "Wallet not found") }

// Apply carries a command out. An error that is a *fault.Fault is a refusal; any other is a *Violation, and then nothing
// may be written. What it is given stays as it was.
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

// post books a transaction.
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

// spend takes from what is available, or says that there is not enough.
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
