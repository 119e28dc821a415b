// Package ledger defines all operations on a wallet as a pure function: Apply maps a command and the records it touches
// to the records to write, or to a refusal that changes nothing.
//
// The semantics are those of TigerBeetle's two-phase transfers: a reservation holds credit, a commit charges it, a
// release or its deadline frees it. Internally the books are double entry: a wallet has four accounts (funding, wallet,
// held, revenue), each transaction moves an amount from one to another, and the accounts always sum to zero. The
// externally visible values follow from them:
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
//	I4  folding the transactions gives the balance; sequence and balance_after have no gap
//	I5  a reservation leaves the status pending once
//	I6  amounts are positive, nothing overflows
//	I7  a repeated command has one effect (here: by reservation ID; idempotency keys are the caller's task)
//
// Decisions that the design leaves open:
//   - A suspended wallet accepts charges and refunds too, so that usage before the suspension is paid.
//   - A wallet with a balance may be closed. The balance remains visible.
//   - A refund names the charge that it is for. All refunds of one charge are at most the charge.
//   - DoReserve with an existing reservation ID and equal parameters returns that reservation, whatever its status.
//   - From its deadline on a reservation cannot be committed or released, but it counts as held until DoExpire.
//
// Package ledger does no I/O, reads no clock and draws no randomness: times and IDs are part of the command. It does
// not depend on records, callers or transport.
package ledger

import (
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Limits.
const (
	// DefaultTTL and MaxTTL are the default and the maximum TTL of a reservation, in seconds (part 8 of the wire
	// contract; design part 2).
	DefaultTTL = 300
	MaxTTL     = 30 * 24 * 3600
	// MaxPending is the maximum number of pending reservations of a wallet.
	MaxPending = 100_000
)

// WalletStatus is the status of a wallet. The numbers are those of the wire contract (part 3).
type WalletStatus uint8

const (
	Active WalletStatus = iota + 1
	Suspended
	Closed
)

func (s WalletStatus) String() string {
	return name(s, map[WalletStatus]string{Active: "active", Suspended: "suspended", Closed: "closed"})
}

// ReservationStatus is the status of a reservation. The numbers are those of the wire contract (part 3).
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

// Type is the type of a transaction. The numbers are those of the wire contract (part 3).
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

// Types returns every type of transaction.
func Types() []Type { return []Type{TopUp, Hold, Charge, Release, Refund, BillingCharge} }

func (t Type) String() string {
	return name(t, map[Type]string{
		TopUp: "top_up", Hold: "reservation", Charge: "charge", Release: "release", Refund: "refund", BillingCharge: "billing_charge",
	})
}

// name returns the wire contract's word for a value, and "unknown" for any other value.
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
	// Pending is the number of pending reservations.
	Pending uint64
	// Sequence is the sequence number of the last transaction; the first has 1.
	Sequence uint64
	// Totals sums all transactions, by type.
	Totals    Totals
	CreatedAt cloud.Time
	UpdatedAt cloud.Time
}

// Balance returns the amount deposited and not consumed, including held amounts.
func (w *Wallet) Balance() int64 { return w.Accounts.Wallet + w.Accounts.Held }

// Reserved returns the amount that pending reservations hold.
func (w *Wallet) Reserved() int64 { return w.Accounts.Held }

// Available returns the amount that can be reserved or charged.
func (w *Wallet) Available() int64 { return w.Accounts.Wallet }

// Deposited returns the sum of all deposits.
func (w *Wallet) Deposited() int64 { return -w.Accounts.Funding }

// Consumed returns the amount charged and not refunded.
func (w *Wallet) Consumed() int64 { return w.Accounts.Revenue }

// Reservation holds credit until it is committed, released, or expired at its deadline.
type Reservation struct {
	ID           string
	Project      cloud.ProjectID
	Amount       int64
	Status       ReservationStatus
	Description  string
	ResourceType string
	// ResourceID is set by the commit.
	ResourceID string
	// Charged is the amount that the commit charged.
	Charged   int64
	TTL       int64
	Deadline  cloud.Time
	CreatedAt cloud.Time
	CreatedBy string
	// EndedAt is when the reservation left the status pending.
	EndedAt cloud.Time
}

// Over reports whether the deadline has passed.
func (r *Reservation) Over(now cloud.Time) bool { return now >= r.Deadline }

// Transaction moves an amount between two accounts of a wallet. It is immutable.
type Transaction struct {
	ID       string
	Project  cloud.ProjectID
	Sequence uint64
	Type     Type
	Amount   int64
	// BalanceAfter is the wallet's balance after the transaction.
	BalanceAfter int64
	Description  string
	ResourceID   string
	// Reservation is the ID of the transaction's reservation, if any.
	Reservation string
	// Charge is the sequence number of the charge that a refund is for.
	Charge uint64
	At     cloud.Time
	By     string
	// Totals are the wallet's totals after the transaction.
	Totals Totals
}
