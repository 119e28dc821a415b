// Package history judges what clients saw of one wallet: is there an order of all their calls that the ledger allows, in
// which no call comes before another that had ended when it began?
//
// The wallet's own journal makes that cheap to answer. It numbers every transaction, so it says in which order the calls
// took effect that did, and also which of those took effect whose answer was lost. Two questions remain, and each can be
// answered with no:
//
//   - Is the journal what the ledger does? The calls are carried out again, in the order of the journal and at its times,
//     by the pure ledger; every transaction must come out as it is written (book.go).
//   - Is that order what the clients saw? The model is then no more than how far the journal has come: a call that took
//     effect leads from one number to the next, a read or a refusal must be true at the number where it is put, an expiry
//     is a step of nobody's that may come at any time after its reservation. Porcupine looks for the order (check.go).
//
// A call whose outcome is not known may have taken effect at any time after it began, once or never; one that was said again
// under the same name, by idempotency key or id, took effect once at most, whichever of the two did it.
//
// It knows no transport and no cluster: what it is given can come from anywhere.
package history

import (
	"fmt"
	"math"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
)

// Kind of a call.
type Kind uint8

const (
	TopUp Kind = iota + 1
	Reserve
	Commit
	Release
	// ReadWallet and ReadReservation change nothing.
	ReadWallet
	ReadReservation
	// expire is the step of the sweep, which nobody calls.
	expire
)

func (k Kind) String() string {
	names := [...]string{"?", "top-up", "reserve", "commit", "release", "read wallet", "read reservation", "expire"}
	return names[min(int(k), len(names)-1)]
}

// Never is the return of a call whose outcome is not known.
const Never = time.Duration(math.MaxInt64)

// Why a call was refused, as the service says it.
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
	// Name is the description of a top-up, unique in the wallet but for the same said again; else the reservation's id.
	Name string
	// Amount of a top-up or reservation; of a commit, which is never 0 here.
	Amount int64
	// TTL of a reservation in seconds.
	TTL int64
	// Call and Return are on one clock that goes forward only; Return is Never when the outcome is not known, and then the
	// rest says nothing.
	Call, Return time.Duration
	// Refused is one of the reasons above, Done for a call that was carried out.
	Refused string
	// Available is what a refusal for want of credit says.
	Available int64
	// Wallet is what was answered, if a wallet was.
	Wallet *Figures
	// Status and Charged are what was answered of a reservation; Released is the answer of a release.
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

// Figures are a wallet as clients see it.
type Figures struct {
	Sequence                                          uint64
	Balance, Reserved, Available, Deposited, Consumed int64
}

// figuresOf are those of a wallet.
func figuresOf(w *ledger.Wallet) Figures {
	return Figures{w.Sequence, w.Balance(), w.Reserved(), w.Available(), w.Deposited(), w.Consumed()}
}
