// Package ledger defines all operations on a wallet as a pure function: Apply maps a command and the records that it
// reads to the records to write, or to a refusal that changes nothing.
//
// The semantics are those of TigerBeetle's two-phase transfers: a reservation holds credit, a commit charges it, and a
// release or the reservation's deadline makes it available again. The bookkeeping is double-entry: a wallet has four
// accounts (funding, wallet, held, revenue), each transaction moves an amount from one to another, and the sum of the
// accounts is always zero. The externally visible values follow from them:
//
//	balance   = wallet + held       reserved = held          available = wallet
//	deposited = -funding            consumed = revenue
//
// After every command the changed wallet is checked in constant time, and an Audit recomputes everything from the
// transactions and reservations. The invariants are:
//
//	I1  available, reserved and balance are never negative
//	I2  reserved is the sum of the pending reservations
//	I3  balance = deposited - consumed
//	I4  the transactions add up to the balance; their sequence numbers have no gap, and each balance_after is right
//	I5  a reservation leaves the status pending at most once
//	I6  amounts are positive, nothing overflows
//	I7  a repeated command has one effect (here: by reservation ID; idempotency keys are the caller's task)
//
// Decisions that the design leaves open:
//   - A suspended wallet accepts charges and refunds too, so that usage before the suspension is paid.
//   - A wallet with a balance may be closed. The balance remains visible.
//   - A refund names the charge that it is for. The sum of all refunds of a charge is at most the charge.
//   - DoReserve with an existing reservation ID and equal parameters returns that reservation, whatever its status.
//   - From its deadline on a reservation cannot be committed or released, but it counts as held until DoExpire.
//
// Package ledger does no I/O, reads no clock and generates no random values: times and IDs are part of the command. It
// does not depend on the store, callers or transport.
package ledger

import (
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Limits on reservations.
const (
	// DefaultTTL and MaxTTL are the default and the maximum time from the creation of a reservation to its deadline, in
	// seconds (part 8 of the wire contract; design part 2).
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

// name returns the name of a status or type in the wire contract, which is names[value]. It returns "unknown" if there
// is none.
func name[T comparable](value T, names map[T]string) string {
	if s, ok := names[value]; ok {
		return s
	}
	return "unknown"
}

// Wallet is the record of the credit of a project: its balances and its status.
type Wallet struct {
	Org      cloud.OrgID
	Project  cloud.ProjectID
	Status   WalletStatus
	Accounts Accounts
	// Incarnation distinguishes the wallet's project from deleted projects that had the same ID. It is 0 for a project
	// that was created before incarnations were recorded.
	Incarnation cloud.Incarnation `cbor:",omitempty"`
	// Pending is the number of pending reservations.
	Pending uint64
	// Sequence is the sequence number of the last transaction; the first transaction has 1.
	Sequence uint64
	// Totals holds the sum of all transactions of each type.
	Totals    Totals
	CreatedAt cloud.Time
	UpdatedAt cloud.Time
}

// Balance returns the amount deposited and not consumed. It includes reserved amounts.
func (w *Wallet) Balance() int64 { return w.Accounts.Wallet + w.Accounts.Held }

// Reserved returns the sum of the pending reservations.
func (w *Wallet) Reserved() int64 { return w.Accounts.Held }

// Available returns the amount that can be reserved or charged.
func (w *Wallet) Available() int64 { return w.Accounts.Wallet }

// Deposited returns the sum of all deposits.
func (w *Wallet) Deposited() int64 { return -w.Accounts.Funding }

// Consumed returns the amount charged and not refunded.
func (w *Wallet) Consumed() int64 { return w.Accounts.Revenue }

// Reservation sets aside an amount of a wallet until the reservation is committed or released, or expires at its
// deadline.
type Reservation struct {
	ID           string
	Project      cloud.ProjectID
	Amount       int64
	Status       ReservationStatus
	Description  string
	ResourceType string
	// ResourceID is the ID of the resource for which the reservation was charged. It is empty before the commit.
	ResourceID string
	// Charged is the amount that the commit charged; it may be less than Amount.
	Charged   int64
	TTL       int64
	Deadline  cloud.Time
	CreatedAt cloud.Time
	CreatedBy string
	// EndedAt is when the reservation left the status pending.
	EndedAt cloud.Time
}

// Over reports whether the reservation's deadline has passed at the time now.
func (r *Reservation) Over(now cloud.Time) bool { return now >= r.Deadline }

// Transaction is the record of an amount moved between two accounts of a wallet. It never changes.
type Transaction struct {
	ID       string
	Project  cloud.ProjectID
	Sequence uint64
	Type     Type
	Amount   int64
	// BalanceAfter is the balance of the wallet after the transaction.
	BalanceAfter int64
	Description  string
	ResourceID   string
	// Reservation is the ID of the reservation that the transaction is for, if any.
	Reservation string
	// Charge is the sequence number of the charge that this transaction refunds. It is 0 if the transaction is not a
	// refund.
	Charge uint64
	At     cloud.Time
	By     string
	// Totals are the wallet's totals directly after the transaction.
	Totals Totals
}
