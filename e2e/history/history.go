// Package history checks whether the calls of clients on one wallet are linearizable: there must be an order of all
// calls that agrees with their responses and with the rules of the ledger, and in which a call that ended before
// another began precedes it.
//
// The wallet's own journal makes the check cheap. It numbers every transaction. It therefore gives the order in which
// calls took effect, and shows which calls took effect although their response was lost. Two conditions remain to be
// checked:
//
//   - The journal must follow the rules of the ledger. Package ledger executes the calls again in memory, in the order
//     and at the times of the journal; it must produce equal transactions (book.go).
//   - The order must agree with the responses. The state of the model is only a position in the journal. A call that
//     took effect leads from one position to a later one. A read or a refusal must be correct at the position where it
//     is placed. An expiry may happen at any time after its reservation was created. The library porcupine searches for
//     the order (check.go).
//
// A call whose outcome is unknown may have taken effect at any time after it began, once or never. Calls that are
// repeated under the same name (idempotency key or id) took effect at most once, no matter which of them did.
//
// The calls and the journal may come from any source: the package does not need a cluster.
package history

import (
	"fmt"
	"math"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
)

// Kind is the kind of a call on a wallet.
type Kind uint8

const (
	TopUp Kind = iota + 1
	Reserve
	Commit
	Release
	// ReadWallet and ReadReservation are calls that change nothing.
	ReadWallet
	ReadReservation
	// expire is not a call of a client: the control plane ends a reservation whose deadline has passed.
	expire
)

func (k Kind) String() string {
	names := [...]string{"?", "top-up", "reserve", "commit", "release", "read wallet", "read reservation", "expire"}
	return names[min(int(k), len(names)-1)]
}

// Never is the value of Op.Return for a call whose outcome is unknown.
const Never = time.Duration(math.MaxInt64)

// Values of Op.Refused: Done for a call that succeeded, or the credit service's error code for a refusal.
const (
	Done         = ""
	Insufficient = "INSUFFICIENT_CREDIT"
	NotFound     = "NOT_FOUND"
	WasCommitted = "RESERVATION_COMMITTED"
	WasReleased  = "RESERVATION_RELEASED"
	WasExpired   = "RESERVATION_EXPIRED"
	TooMuch      = "AMOUNT_EXCEEDS_RESERVATION"
)

// Op is one call of one client, with its times and its response.
type Op struct {
	Client int
	Kind   Kind
	// Name is the id of the reservation or, for a top-up, its description, which must be unique in the wallet except
	// for repetitions of the same call.
	Name string
	// Amount is the amount of a top-up, reservation or commit. A commit must name an amount other than 0.
	Amount int64
	// TTL is the time in seconds after which the reservation expires, for the kind Reserve.
	TTL int64
	// Call and Return are the times, by one monotonic clock, when the call began and when its response arrived. Return
	// is Never if the outcome is unknown; the fields below then have no meaning.
	Call, Return time.Duration
	// Refused is the reason for a refusal, such as Insufficient, or Done for a call that succeeded.
	Refused string
	// Available is the available amount in the response, if Refused is Insufficient.
	Available int64
	// Wallet holds the wallet's figures in the response; it is nil if the response has none.
	Wallet *Figures
	// Status and Charged are the values of the reservation in the response. Released is the field of that name in the
	// response to a release: whether the reservation is released.
	Status   ledger.ReservationStatus
	Charged  int64
	Released bool
}

func (o *Op) String() string {
	end := "outcome unknown"
	if o.Return != Never {
		end = fmt.Sprintf("until %s: %q", o.Return.Round(time.Millisecond), o.Refused)
		if o.Wallet != nil {
			end += fmt.Sprintf(" %+v", *o.Wallet)
		}
		if o.Status != 0 {
			end += fmt.Sprintf(" %s charged %d released %v", o.Status, o.Charged, o.Released)
		}
	}
	return fmt.Sprintf("client %d, %s %s of %d, from %s %s", o.Client, o.Kind, o.Name, o.Amount, o.Call.Round(time.Millisecond), end)
}

// Figures holds the numbers of a wallet that responses contain.
type Figures struct {
	Sequence                                          uint64
	Balance, Reserved, Available, Deposited, Consumed int64
}

func figuresOf(w *ledger.Wallet) Figures {
	return Figures{w.Sequence, w.Balance(), w.Reserved(), w.Available(), w.Deposited(), w.Consumed()}
}
