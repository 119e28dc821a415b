// Package history checks what clients observed of one wallet for linearizability: there must be an order of all their
// calls that the ledger allows and in which no call comes before another that had ended when it began.
//
// The wallet's own journal makes the check cheap. It numbers every transaction. It therefore gives the order in which
// calls took effect, and shows which calls took effect although their response was lost. Two conditions remain to be
// checked:
//
//   - The journal must be what the ledger does. The calls are executed again by the pure ledger, in the order and at
//     the times of the journal; every transaction must be equal to the recorded one (book.go).
//   - The order must agree with what the clients saw. The state of the model is only a position in the journal. A call
//     that took effect leads from one position to the next. A read or a refusal must be true at the position where it
//     is placed. An expiry is a step of the sweep, at any time after its reservation. Porcupine searches for the order
//     (check.go).
//
// A call whose outcome is unknown may have taken effect at any time after it began, once or never. Calls that are
// repeated under the same name (idempotency key or id) took effect at most once, no matter which of them did.
//
// The package does not depend on a transport or a cluster: the calls and the journal may come from any source.
package history

import (
	"fmt"
	"math"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
)

// Kind is the kind of a call.
type Kind uint8

const (
	TopUp Kind = iota + 1
	Reserve
	Commit
	Release
	// ReadWallet and ReadReservation change nothing.
	ReadWallet
	ReadReservation
	// expire is a step of the expiry sweep, not a call of a client.
	expire
)

func (k Kind) String() string {
	names := [...]string{"?", "top-up", "reserve", "commit", "release", "read wallet", "read reservation", "expire"}
	return names[min(int(k), len(names)-1)]
}

// Never is the Return of a call whose outcome is unknown.
const Never = time.Duration(math.MaxInt64)

// Reasons for a refusal, with the error codes of the service.
const (
	Done         = ""
	Insufficient = "INSUFFICIENT_CREDIT"
	NotFound     = "NOT_FOUND"
	WasCommitted = "RESERVATION_COMMITTED"
	WasReleased  = "RESERVATION_RELEASED"
	WasExpired   = "RESERVATION_EXPIRED"
	TooMuch      = "AMOUNT_EXCEEDS_RESERVATION"
)

// Op is one call of one client.
type Op struct {
	Client int
	Kind   Kind
	// Name is the description of a top-up, unique in the wallet except for repeats of the call; otherwise the id of the
	// reservation.
	Name string
	// Amount is that of a top-up, reservation or commit; that of a commit is never 0 here.
	Amount int64
	// TTL is the lifetime of a reservation in seconds.
	TTL int64
	// Call and Return are the start and end times on one monotonic clock. Return is Never when the outcome is unknown;
	// the fields below are then meaningless.
	Call, Return time.Duration
	// Refused is one of the reasons above, or Done for a call that succeeded.
	Refused string
	// Available is the available amount that an Insufficient refusal reports.
	Available int64
	// Wallet holds the wallet in the response, or nil.
	Wallet *Figures
	// Status and Charged are those of the reservation in the response; Released is the result of a release.
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

// Figures holds the numbers of a wallet that clients see.
type Figures struct {
	Sequence                                          uint64
	Balance, Reserved, Available, Deposited, Consumed int64
}

// figuresOf returns the figures of a wallet.
func figuresOf(w *ledger.Wallet) Figures {
	return Figures{w.Sequence, w.Balance(), w.Reserved(), w.Available(), w.Deposited(), w.Consumed()}
}
