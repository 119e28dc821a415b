package history

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger/ledgertest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const project = cloud.ProjectID("p")

// scribe generates a random linearizable history: it executes each call with a ledger in memory, at one time within the
// call's duration.
type scribe struct {
	r     *rand.Rand
	book  *ledgertest.Memory
	now   time.Duration
	made  int
	began time.Time
	w     Wallet
}

func newScribe(seed uint64) *scribe {
	s := &scribe{r: rand.New(rand.NewPCG(seed, 0)), book: ledgertest.NewMemory(), began: time.UnixMilli(1_800_000_000_000)}
	s.w = Wallet{Org: "o", Project: project, Began: s.began, Tolerance: time.Second}
	s.do(ledger.Command{Op: ledger.DoCreate, Amount: 1000, Tenant: cloud.Tenant{Org: "o", Project: project}})
	return s
}

func (s *scribe) id() string {
	s.made++
	return fmt.Sprintf("00000000-0000-7000-8000-%012d", s.made)
}

// do executes a command at the time s.now, appends its transactions to the journal, and returns the reason for a
// refusal or Done.
func (s *scribe) do(c ledger.Command) (ledger.Outcome, string) {
	c.At, c.IDs = s.began.Add(s.now).UnixMilli(), [2]string{s.id(), s.id()}
	if c.By == "" {
		c.By = "admin"
	}
	out, err := s.book.Do(project, c)
	if f := (*fault.Fault)(nil); errors.As(err, &f) {
		if f.Reason == "" {
			return out, NotFound
		}
		return out, f.Reason
	}
	for _, tx := range out.Transactions {
		tx.Totals = ledger.Totals{}
		s.w.Journal = append(s.w.Journal, tx)
	}
	return out, Done
}

// write makes n calls, some of which get no response. Now and then it first expires the reservations whose deadline has
// passed.
func (s *scribe) write(n int) {
	var ids []string
	for range n {
		s.now += time.Duration(s.r.IntN(50)) * time.Millisecond
		if s.r.IntN(4) == 0 {
			for _, id := range ids {
				if f := s.book.Reservation(project, id); f != nil && f.Status == ledger.Pending && f.Over(s.began.Add(s.now).UnixMilli()) {
					s.do(ledger.Command{Op: ledger.DoExpire, Reservation: id, By: Sweeper})
				}
			}
		}
		s.call(&ids)
	}
}

func (s *scribe) call(ids *[]string) {
	width := func() time.Duration { return time.Duration(s.r.IntN(120)) * time.Millisecond }
	o := Op{Client: s.r.IntN(8), Kind: Kind(1 + s.r.IntN(6)), Call: max(s.now-width(), 0), Return: s.now + width(), Amount: 1 + s.r.Int64N(60)}
	switch {
	case o.Kind == Reserve:
		*ids = append(*ids, s.id())
		o.TTL, o.Name = 1+s.r.Int64N(2), (*ids)[len(*ids)-1]
	case o.Kind == TopUp:
		o.Name, o.Amount = s.id(), 20
	case len(*ids) > 0:
		o.Name = (*ids)[max(0, len(*ids)-1-s.r.IntN(6))]
	default:
		o.Kind = ReadWallet
	}
	lost := s.r.IntN(15) == 0
	if lost && s.r.IntN(2) == 0 { // the call is lost before it takes effect
		o.Return = Never
		s.w.Ops = append(s.w.Ops, o)
		return
	}
	s.answer(&o)
	if lost {
		o = Op{Client: o.Client, Kind: o.Kind, Name: o.Name, Amount: o.Amount, TTL: o.TTL, Call: o.Call, Return: Never}
	}
	s.w.Ops = append(s.w.Ops, o)
}

// answer executes a call at the time s.now and stores its response in o.
func (s *scribe) answer(o *Op) {
	var out ledger.Outcome
	ops := map[Kind]ledger.Op{TopUp: ledger.DoTopUp, Reserve: ledger.DoReserve, Commit: ledger.DoCommit, Release: ledger.DoRelease}
	if op, ok := ops[o.Kind]; ok {
		c := ledger.Command{Op: op, Amount: o.Amount, TTL: o.TTL}
		if o.Kind == TopUp {
			c.Description = o.Name
		} else {
			c.Reservation = o.Name
		}
		if out, o.Refused = s.do(c); o.Refused == Insufficient {
			w, _ := s.book.Wallet(project)
			o.Available = w.Available()
		}
	}
	switch r := s.book.Reservation(project, o.Name); {
	case o.Refused != Done:
		return
	case o.Kind == ReadReservation && r == nil:
		o.Refused = NotFound
		return
	case r != nil:
		o.Status, o.Charged, o.Released = r.Status, r.Charged, out.Released
	}
	if o.Kind != Reserve && o.Kind != ReadReservation {
		w, _ := s.book.Wallet(project)
		figures := figuresOf(w)
		o.Wallet = &figures
	}
}

// find returns the first call in the second half of the history that has a response and for which the function good
// returns true.
func (s *scribe) find(t *testing.T, good func(*Op) bool) *Op {
	t.Helper()
	for i := len(s.w.Ops) / 2; i < len(s.w.Ops); i++ {
		if o := &s.w.Ops[i]; o.Return != Never && good(o) {
			return o
		}
	}
	t.Fatal("the history has no suitable call")
	return nil
}

// TestTrueHistories checks that Check accepts 20 random linearizable histories of 600 calls.
func TestTrueHistories(t *testing.T) {
	for seed := range uint64(20) {
		s := newScribe(seed)
		s.write(600)
		sum, err := s.w.Check(time.Minute)
		require.NoError(t, err, "seed %d", seed)
		require.Positive(t, sum.Late)
		require.Positive(t, sum.Expired)
		require.Positive(t, sum.Refused)
		require.Less(t, sum.Off, time.Second)
	}
}

// TestAnswerOfRepeatedRelease checks that Check accepts the response of a release that a member sent twice, because it
// lost its leader: the first attempt took effect, then a top-up did, and the response shows both. Check must reject the
// same history if a read shows the effect before the release was called.
func TestAnswerOfRepeatedRelease(t *testing.T) {
	s := newScribe(1)
	id := s.id()
	s.do(ledger.Command{Op: ledger.DoReserve, Reservation: id, Amount: 5, TTL: 100})
	s.w.Ops = append(s.w.Ops, Op{Kind: Reserve, Name: id, Amount: 5, TTL: 100, Call: 0, Return: 1, Status: ledger.Pending})
	figures := func() *Figures { f := figuresOf(must(s.book.Wallet(project))); return &f }
	s.do(ledger.Command{Op: ledger.DoRelease, Reservation: id})
	between := figures()
	s.do(ledger.Command{Op: ledger.DoTopUp, Amount: 7, Description: "other"})
	other := Op{Client: 1, Kind: TopUp, Name: "other", Amount: 7, Call: 2, Return: 4, Wallet: figures()}
	release := Op{Client: 2, Kind: Release, Name: id, Amount: 1, Call: 2, Return: 5, Wallet: figures(), Status: ledger.Released, Released: true}
	read := Op{Client: 3, Kind: ReadWallet, Call: 2, Return: 5, Wallet: between}
	s.w.Ops = append(s.w.Ops, other, release, read)
	_, err := s.w.Check(time.Minute)
	require.NoError(t, err)

	late := &s.w.Ops[len(s.w.Ops)-2]
	late.Call = 6 // the release now begins after the end of the read that shows its effect
	late.Return = 7
	_, err = s.w.Check(time.Minute)
	var v *Violation
	require.ErrorAs(t, err, &v)
}

// TestImpossibleHistories makes a linearizable history wrong in one of several ways, such as a stale read, and checks
// that Check returns a *Violation for each.
func TestImpossibleHistories(t *testing.T) {
	done := func(k Kind) func(*Op) bool { return func(o *Op) bool { return o.Kind == k && o.Refused == Done } }
	for name, lie := range map[string]func(t *testing.T, s *scribe){
		"a stale read": func(t *testing.T, s *scribe) {
			// Give a read the result of an earlier read, with more than 10 transactions between the two.
			last := s.find(t, func(o *Op) bool { return o.Kind == ReadWallet })
			for i := range s.w.Ops {
				if o := &s.w.Ops[i]; o.Kind == ReadWallet && o.Return != Never && o.Wallet.Sequence+10 < last.Wallet.Sequence {
					last.Wallet = o.Wallet
					return
				}
			}
			t.Fatal("the history has no suitable old read")
		},
		"a stale read of a reservation": func(t *testing.T, s *scribe) {
			s.find(t, func(o *Op) bool { return o.Kind == ReadReservation && o.Status != ledger.Pending })
			for i := range s.w.Ops {
				if o := &s.w.Ops[i]; o.Kind == ReadReservation && o.Refused == Done {
					o.Status = ledger.Pending
				}
			}
		},
		"a read that shows a later effect": func(t *testing.T, s *scribe) {
			last := s.find(t, func(o *Op) bool { return o.Kind == ReadWallet })
			s.w.Ops = append(s.w.Ops, Op{Kind: ReadWallet, Call: 0, Return: 1, Wallet: last.Wallet})
		},
		"a read with sums that never existed": func(t *testing.T, s *scribe) { s.find(t, done(ReadWallet)).Wallet.Reserved++ },
		"a commit that was acknowledged and lost": func(t *testing.T, s *scribe) {
			o := s.find(t, func(o *Op) bool { return o.Kind == Commit && o.Refused == WasExpired })
			w := figuresOf(must(s.book.Wallet(project)))
			o.Refused, o.Wallet, o.Status, o.Charged = Done, &w, ledger.Committed, o.Amount
		},
		"the end of the journal is lost": func(_ *testing.T, s *scribe) {
			s.write(1)
			s.w.Ops = append(s.w.Ops, Op{Kind: TopUp, Name: "lost", Amount: 5, Call: s.now, Return: s.now + 1, Wallet: &Figures{}})
		},
		"a top-up that took effect twice": func(t *testing.T, s *scribe) {
			s.find(t, done(TopUp))
			i := slices.IndexFunc(s.w.Journal, func(tx ledger.Transaction) bool { return tx.Type == ledger.TopUp && tx.Sequence > 1 })
			again := s.w.Journal[i]
			last := s.w.Journal[len(s.w.Journal)-1]
			again.ID, again.Sequence, again.BalanceAfter, again.At = "again", last.Sequence+1, last.BalanceAfter+again.Amount, last.At
			s.w.Journal = append(s.w.Journal, again)
		},
		"a reservation that expired twice": func(_ *testing.T, s *scribe) {
			i := slices.IndexFunc(s.w.Journal, func(tx ledger.Transaction) bool { return tx.By == Sweeper })
			again := s.w.Journal[i]
			last := s.w.Journal[len(s.w.Journal)-1]
			again.ID, again.Sequence, again.BalanceAfter, again.At = "again", last.Sequence+1, last.BalanceAfter, last.At
			s.w.Journal = append(s.w.Journal, again)
		},
		"an expiry before its time": func(_ *testing.T, s *scribe) {
			// Reserve with a TTL of 100 s, and append to the journal a release by the expiry sweep at the same time.
			id := s.id()
			s.w.Ops = append(s.w.Ops, Op{Kind: Reserve, Name: id, Amount: 1, TTL: 100, Call: s.now, Return: s.now + 1, Status: ledger.Pending})
			s.do(ledger.Command{Op: ledger.DoTopUp, Amount: 5, Description: "room"})
			s.w.Ops = append(s.w.Ops, Op{Kind: TopUp, Name: "room", Amount: 5, Call: s.now, Return: Never})
			s.do(ledger.Command{Op: ledger.DoReserve, Amount: 1, TTL: 100, Reservation: id})
			early := s.w.Journal[len(s.w.Journal)-1]
			early.ID, early.Type, early.By, early.Description = "early", ledger.Release, Sweeper, "expired"
			early.Sequence++
			s.w.Journal = append(s.w.Journal, early)
		},
		"a commit refused as expired before the deadline": func(t *testing.T, s *scribe) {
			o := s.find(t, func(o *Op) bool { return o.Kind == Commit && o.Refused == WasExpired })
			for i := range s.w.Ops {
				if made := s.w.Ops[i]; made.Kind == Reserve && made.Name == o.Name {
					s.w.Ops = append(s.w.Ops, Op{Kind: Commit, Name: o.Name, Amount: 1, Call: made.Call, Return: made.Call + 1, Refused: WasExpired})
				}
			}
		},
		"a refusal for lack of credit that was available": func(_ *testing.T, s *scribe) {
			s.w.Ops = append(s.w.Ops, Op{Kind: Reserve, Name: s.id(), Amount: 1, TTL: 1, Call: s.now, Return: s.now + 1, Refused: Insufficient})
		},
		"a reservation that no call made": func(t *testing.T, s *scribe) {
			o := s.find(t, done(Reserve))
			name := o.Name
			s.w.Ops = slices.DeleteFunc(s.w.Ops, func(o Op) bool { return o.Name == name })
		},
		"a response before the effect": func(t *testing.T, s *scribe) {
			// Exchange the times of two top-ups of which the second began after the first had ended.
			o := s.find(t, done(TopUp))
			after := s.find(t, func(p *Op) bool { return p.Kind == TopUp && p.Refused == Done && p.Call > o.Return+time.Second/2 })
			o.Call, o.Return, after.Call, after.Return = after.Call, after.Return, o.Call, o.Return
			s.w.Tolerance = 0
		},
		"a transaction time that is ten minutes ahead": func(_ *testing.T, s *scribe) {
			s.now += 10 * time.Minute
			s.do(ledger.Command{Op: ledger.DoTopUp, Amount: 5, Description: "ahead"})
			s.now -= 10 * time.Minute
			w := figuresOf(must(s.book.Wallet(project)))
			s.w.Ops = append(s.w.Ops, Op{Kind: TopUp, Name: "ahead", Amount: 5, Call: s.now, Return: s.now + 1, Wallet: &w})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScribe(7)
			s.write(600)
			_, err := s.w.Check(time.Minute)
			require.NoError(t, err, "the history must be linearizable before the change")
			lie(t, s)
			_, err = s.w.Check(time.Minute)
			var v *Violation
			require.ErrorAs(t, err, &v)
			t.Log(v)
		})
	}
}

func must(w *ledger.Wallet, _ error) *ledger.Wallet { return w }
