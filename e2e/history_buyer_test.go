package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/google/uuid"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/e2e/history"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

// patience is the timeout of a buyer's call. lastNames is the number of the most recent reservations of a wallet among
// which calls choose.
const (
	patience  = 3 * time.Second
	lastNames = 30
)

// buyer is a client that makes random credit calls to one member, one call after the other. After a call without a
// response it uses the next member. If loyal is true, the buyer only reads and never changes its member, so that it
// also reads from members that are partitioned from the others.
type buyer struct {
	s     *saga
	n     int
	r     *rand.Rand
	at    int
	loyal bool
	// again is a call that had no response and will be repeated under the same name. Its field Name is "" if there is
	// no such call.
	again  history.Op
	wallet string
}

func (s *saga) newBuyer(n int) *buyer {
	return &buyer{s: s, n: n, r: rand.New(rand.NewPCG(s.seed, uint64(n)+100)), at: n%3 + 1, loyal: n < loyal}
}

func (b *buyer) run(ctx context.Context, permits <-chan struct{}) {
	for range permits {
		o := b.again
		b.again = history.Op{}
		if o.Name == "" {
			o = b.draw()
		}
		b.call(ctx, o)
	}
}

// draw chooses a random wallet, and returns a random call on it that has not been made yet.
func (b *buyer) draw() history.Op {
	b.wallet = walletNames[b.r.IntN(len(walletNames))]
	o := history.Op{Client: b.n, Amount: 1 + b.r.Int64N(300)}
	if b.loyal {
		o.Kind = history.ReadWallet
		return o
	}
	switch dice := b.r.IntN(100); {
	case dice < 33:
		o.Kind, o.Name, o.TTL = history.Reserve, uuid.NewString(), []int64{1, 2, 3, 10}[b.r.IntN(4)]
	case dice < 46:
		o.Kind, o.Name, o.Amount = history.TopUp, "top-up "+uuid.NewString(), 150
	case dice < 70:
		o.Kind = history.Commit
	case dice < 80:
		o.Kind = history.Release
	case dice < 90:
		o.Kind = history.ReadReservation
	default:
		o.Kind = history.ReadWallet
	}
	if o.Name == "" && o.Kind != history.ReadWallet {
		if o.Name = b.s.recent(b.wallet, b.r); o.Name == "" {
			o.Kind = history.ReadWallet
		}
	}
	if o.Kind == history.Reserve {
		b.s.remember(b.wallet, o.Name)
	}
	return o
}

// remember adds the ID of a reservation to those that buyers choose from. It is called before the reservation is made.
func (s *saga) remember(wallet, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := append(s.names[wallet], id)
	s.names[wallet] = names[max(0, len(names)-lastNames):]
}

func (s *saga) recent(wallet string, r *rand.Rand) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := s.names[wallet]
	if len(names) == 0 {
		return ""
	}
	return names[r.IntN(len(names))]
}

func (s *saga) note(wallet string, o history.Op) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ops[wallet] = append(s.ops[wallet], o)
}

// call makes a call and adds it, with its times and its response, to the history of the wallet.
func (b *buyer) call(ctx context.Context, o history.Op) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	asked := o
	o.Call = time.Since(b.s.began)
	err := b.send(ctx, &o)
	o.Return = time.Since(b.s.began)
	if err != nil && !refusal(err, &o) {
		b.s.mu.Lock()
		b.s.lost[fmt.Sprintf("%s %s", status.Code(err), reasonOf(err).GetReason())]++
		b.s.mu.Unlock()
		o.Return = history.Never
		if !b.loyal {
			b.at = b.at%3 + 1
		}
		if b.r.IntN(2) == 0 {
			b.again = asked
		}
		// Pause, because a buyer whose calls fail at once would otherwise use up the total number of calls.
		hold(ctx, b.r, 50*time.Millisecond, 150*time.Millisecond)
	}
	b.s.note(b.wallet, o)
}

func (b *buyer) send(ctx context.Context, o *history.Op) error {
	c := b.s.credits[b.at]
	if b.loyal { // it waits until its member can be reached
		w, err := c.GetWallet(ctx, &creditv1.GetWalletRequest{OrgId: sagaOrg, ProjectId: b.wallet}, grpc.WaitForReady(true))
		if err == nil {
			o.Wallet = figures(w)
		}
		return err
	}
	var w *creditv1.Wallet
	var r *creditv1.Reservation
	var err error
	switch o.Kind {
	case history.TopUp:
		var out *creditv1.TransactionResponse
		out, err = c.TopUpWallet(lab.WithKey(ctx, o.Name), &creditv1.TopUpWalletRequest{OrgId: sagaOrg, ProjectId: b.wallet, Amount: o.Amount, Description: o.Name})
		w = out.GetWallet()
	case history.Reserve:
		r, err = c.CreateReservation(ctx, &creditv1.CreateReservationRequest{
			OrgId: sagaOrg, ProjectId: b.wallet, ReservationId: o.Name, Amount: o.Amount, TtlSeconds: o.TTL,
		})
	case history.Commit:
		var out *creditv1.CommitReservationResponse
		out, err = c.CommitReservation(ctx, &creditv1.CommitReservationRequest{OrgId: sagaOrg, ProjectId: b.wallet, ReservationId: o.Name, ActualAmount: o.Amount})
		w, r = out.GetWallet(), out.GetReservation()
	case history.Release:
		var out *creditv1.ReleaseReservationResponse
		out, err = c.ReleaseReservation(ctx, &creditv1.ReleaseReservationRequest{OrgId: sagaOrg, ProjectId: b.wallet, ReservationId: o.Name})
		w, r, o.Released = out.GetWallet(), out.GetReservation(), out.GetReleased()
	case history.ReadReservation:
		r, err = c.GetReservation(ctx, &creditv1.GetReservationRequest{OrgId: sagaOrg, ProjectId: b.wallet, ReservationId: o.Name})
	default:
		w, err = c.GetWallet(ctx, &creditv1.GetWalletRequest{OrgId: sagaOrg, ProjectId: b.wallet})
	}
	if err != nil {
		return err
	}
	if w != nil {
		o.Wallet = figures(w)
	}
	if r != nil {
		o.Status, o.Charged = ledger.ReservationStatus(r.GetStatus()), r.GetCharged()
	}
	return nil
}

func figures(w *creditv1.Wallet) *history.Figures {
	return &history.Figures{
		Sequence: w.GetSequence(), Balance: w.GetBalance(), Reserved: w.GetReserved(), Available: w.GetAvailable(),
		Deposited: w.GetTotalDeposited(), Consumed: w.GetTotalConsumed(),
	}
}

func reasonOf(err error) *errdetails.ErrorInfo {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil
}

// refusal stores the reason in o if err is a refusal by the ledger. It returns false for any other error, after which
// the outcome of the call is unknown.
func refusal(err error, o *history.Op) bool {
	info := reasonOf(err)
	switch reason := info.GetReason(); reason {
	case history.Insufficient:
		n, err := strconv.ParseInt(info.GetMetadata()["available"], 10, 64)
		o.Refused, o.Available = reason, n
		return err == nil
	case history.WasCommitted, history.WasReleased, history.WasExpired, history.TooMuch:
		o.Refused = reason
		return true
	}
	if status.Code(err) == codes.NotFound {
		o.Refused = history.NotFound
		return true
	}
	return false
}
