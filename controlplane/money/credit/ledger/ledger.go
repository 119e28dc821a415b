// Package ledger is the whole of what may happen to a wallet: a pure function from what a command touches and the
// command to what is written, or to a refusal that changes nothing.
//
// The semantics are those of TigerBeetle's two-phase transfers: a reservation holds credit, a commit charges it, a release
// or its deadline frees it. Inside, the books are double entry: a wallet has four accounts (funding, wallet, held,
// revenue), each transaction moves an amount from one to another, and the accounts always sum to zero. What the world sees
// follows from them:
//
//	balance   = wallet + held       reserved = held          available = wallet
//	deposited = -funding            consumed = revenue
//
// After every command the touched wallet is checked in constant time, and an Audit recomputes everything from the
// transactions and reservations:
//
//	I1  available, reserved and balance are never negative
//	I2  reserved is the sum of the pending reservations
//	I3  balance = deposited - consumed
//	I4  the fold of the transactions is the balance; sequence and balance_after have no gap
//	I5  a reservation leaves pending once
//	I6  amounts are positive, nothing overflows
//	I7  the same thing asked twice happens once (here: by a reservation's id; idempotency keys are the caller's business)
//
// Decisions where the design is silent:
//   - A suspended wallet takes charges and refunds too: what ran is paid for.
//   - A wallet may be closed with a balance; it stays there to be seen.
//   - A refund names the charge that it is for, and all refunds of one charge are at most the charge.
//   - A reservation under an id that is there already, in the same words, is that reservation, whatever became of it.
//   - At its deadline a reservation cannot be committed or released any more, though it counts as held until Expire.
//
// It does no I/O, reads no clock and draws no randomness: times and ids come with the command. It knows no records, no
// callers and no transport.
package ledger

import (
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Limits.
const (
	// DefaultTTL and MaxTTL are those of a reservation, in seconds (the spec's part 8; design part 2).
	DefaultTTL = 300
	MaxTTL     = 30 * 24 * 3600
	// MaxPending reservations of a wallet at a time.
	MaxPending = 100_000
)

// WalletStatus numbers are the spec's (part 3).
type WalletStatus uint8

const (
	Active WalletStatus = iota + 1
	Suspended
	Closed
)

func (s WalletStatus) String() string {
	return name(s, map[WalletStatus]string{Active: "active", Suspended: "suspended", Closed: "closed"})
}

// ReservationStatus numbers are the spec's (part 3).
type ReservationStatus uint8

const (
	Pending ReservationStatus = iota + 1
	Committed
	Released
	Expired
)

func (s ReservationStatus) String() string {
	return name(s, map[ReservationStatus]string{Pending: "pending", Committed: "committed", Released: "released", Expired: "expired"})
}

// Type of a transaction; the numbers are the spec's (part 3).
type Type uint8

const (
	TopUp Type = iota + 1
	Hold
	Charge
	Release
	Refund
	BillingCharge
	endOfTypes
)

// Types lists every type of transaction.
func Types() []Type { return []Type{TopUp, Hold, Charge, Release, Refund, BillingCharge} }

func (t Type) String() string {
	return name(t, map[Type]string{
		TopUp: "top_up", Hold: "reservation", Charge: "charge", Release: "release", Refund: "refund", BillingCharge: "billing_charge",
	})
}

// name is the spec's word for a value, and for any other its word "unknown".
func name[T comparable](value T, names map[T]string) string {
	if s, ok := names[value]; ok {
		return s
	}
	return "unknown"
}

// Wallet is a project's credit.
type Wallet struct {
	Org      cloud.OrgID
	Project  cloud.ProjectID
	Status   WalletStatus
	Accounts Accounts
	// Incarnation is the incarnation of the wallet's project.
	Incarnation cloud.Incarnation `cbor:",omitempty"`
	// Pending counts the pending reservations.
	Pending uint64
	// Sequence is that of its last transaction; the first has 1.
	Sequence uint64
	// Totals are those of all its transactions.
	Totals    Totals
	CreatedAt cloud.Time
	UpdatedAt cloud.Time
}

// Balance is what was deposited and not consumed, held or not.
func (w *Wallet) Balance() int64 { return w.Accounts.Wallet + w.Accounts.Held }

// Reserved is what pending reservations hold.
func (w *Wallet) Reserved() int64 { return w.Accounts.Held }

// Available is what can be reserved.
func (w *Wallet) Available() int64 { return w.Accounts.Wallet }

// Deposited is all that was ever put in.
func (w *Wallet) Deposited() int64 { return -w.Accounts.Funding }

// Consumed is all that was charged and not refunded.
func (w *Wallet) Consumed() int64 { return w.Accounts.Revenue }

// Reservation holds credit until it is committed, released or past its deadline.
type Reservation struct {
	ID           string
	Project      cloud.ProjectID
	Amount       int64
	Status       ReservationStatus
	Description  string
	ResourceType string
	// ResourceID is the commit's.
	ResourceID string
	// Charged is what the commit took.
	Charged   int64
	TTL       int64
	Deadline  cloud.Time
	CreatedAt cloud.Time
	CreatedBy string
	// EndedAt is when it left pending.
	EndedAt cloud.Time
}

// Over reports whether the deadline has come.
func (r *Reservation) Over(now cloud.Time) bool { return now >= r.Deadline }

// Transaction is one move between two accounts of a wallet. It is never changed.
type Transaction struct {
	ID       string
	Project  cloud.ProjectID
	Sequence uint64
	Type     Type
	Amount   int64
	// BalanceAfter is the wallet's balance after it.
	BalanceAfter int64
	Description  string
	ResourceID   string
	// Reservation is what it belongs to, if any.
	Reservation string
	// Charge is the sequence of what a refund is for.
	Charge uint64
	At     cloud.Time
	By     string
	// Totals are the wallet's after it.
	Totals Totals
}
