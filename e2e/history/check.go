package history

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Wallet is the history of one wallet: its journal and all calls of clients that concern it.
type Wallet struct {
	Org     cloud.OrgID
	Project cloud.ProjectID
	// Journal holds all transactions in order. It must be read when no call can take effect any more. The field Totals
	// of the transactions must be zero.
	Journal []ledger.Transaction
	Ops     []Op
	// Began is the time, by a correct clock, at which the clock of the calls was zero. Tolerance is the maximum time by
	// which a transaction's time in the journal may be before the start or after the end of its call; 0 skips that
	// check.
	Began     time.Time
	Tolerance time.Duration
}

// Summary holds statistics about a history, which Check computes.
type Summary struct {
	// Known and Unknown are the numbers of calls with and without a response. Refused is the number of calls whose
	// response is a refusal. Late is the number of effects in the journal for which no call had a successful response,
	// but a call without a response may be the cause.
	Known, Unknown, Refused, Late int
	Transactions, Expired         int
	// Off shows how far the time of a transaction in the journal was outside of the interval from the start to the end
	// of its call, at most.
	Off time.Duration
}

// ErrUndecided is the error of Check when the time limit ended before an order was found or proven impossible.
var ErrUndecided = errors.New("no order was found in time, and no proof that there is none")

// Violation is the error of Check for a history that no correct ledger can produce. Says describes why.
type Violation struct{ Says string }

func (v *Violation) Error() string { return v.Says }

func violation(format string, args ...any) error { return &Violation{fmt.Sprintf(format, args...)} }

// Check returns nil if the history is linearizable: the ledger reproduces the journal, and an order of the calls agrees
// with all responses. It searches for that order for at most limit. Its error is a *Violation, or wraps ErrUndecided.
func (w *Wallet) Check(limit time.Duration) (s Summary, err error) {
	b, err := open(w.Org, w.Project, w.Journal, w.Ops)
	if err != nil {
		return s, violation("the journal of %s is not what the ledger does: %v", w.Project, err)
	}
	s.Transactions, s.Expired = len(w.Journal), len(b.effects[expire])
	calls, err := w.calls(b, &s)
	if err != nil {
		return s, err
	}
	model := porcupine.Model{
		Init:  func() any { return 1 }, // journal position 1: the wallet was created
		Step:  func(state, input, _ any) (bool, any) { return input.(*call).step(b, state.(int)) },
		Equal: func(a, b any) bool { return a == b },
	}
	switch result, info := porcupine.CheckOperationsVerbose(model, calls, limit); result {
	case porcupine.Ok:
		return s, nil
	case porcupine.Illegal:
		return s, violation("wallet %s: no order of the calls is what the clients saw; the first that fits nowhere: %s", w.Project, stuck(calls, info))
	default:
		return s, fmt.Errorf("wallet %s: %w", w.Project, ErrUndecided)
	}
}

// stuck describes the first call that fits nowhere. Of the calls that are missing in the longest partial order that
// porcupine found, this is the one that ended first.
func stuck(calls []porcupine.Operation, info porcupine.LinearizationInfo) string {
	var longest []int
	for _, partial := range info.PartialLinearizations() {
		for _, order := range partial {
			if len(order) > len(longest) {
				longest = order
			}
		}
	}
	in := map[int]bool{}
	for _, i := range longest {
		in[i] = true
	}
	first := -1
	for i := range calls {
		if !in[i] && (first < 0 || calls[i].Return < calls[first].Return) {
			first = i
		}
	}
	if first < 0 {
		return "none"
	}
	return calls[first].Input.(*call).String()
}

// call is an Op with its effect in the journal. The field did is that effect, or nil if there is none in the journal.
type call struct {
	Op
	did *effect
	// over is true if the deadline of the call's reservation may have passed before the call ended.
	over bool
	// silent is true for the first of the two calls that apart returns: it stands only for an effect, and has no
	// response to check.
	silent bool
}

// apart splits a successful commit or release into two calls, one for its effect and one for its response. It does so
// if the response shows a later state of the wallet than the effect. This happens if a member loses its leader and
// sends the call again: the second response shows the wallet at that later time. Effect and response are both within
// the duration of the call, but other calls may take effect between them. ok is false if the call is not split.
func (c *call) apart() (effect, answer *call, ok bool) {
	if c.did == nil || c.Refused != Done || c.Return == Never || c.Kind != Commit && c.Kind != Release || c.Wallet == nil || c.Wallet.Sequence <= uint64(c.did.to) {
		return nil, nil, false
	}
	effect, answer = &call{Op: c.Op, did: c.did, silent: true}, &call{Op: c.Op, over: c.over}
	return effect, answer, true
}

// calls returns the operations that porcupine must order: the calls that took effect or had a response, and the
// expiries. It sets the counts in s. It returns a Violation if the journal has an effect that none of the calls can
// have caused.
func (w *Wallet) calls(b *book, s *Summary) ([]porcupine.Operation, error) {
	var out []porcupine.Operation
	began := map[string]time.Duration{}
	done, late := map[*effect]bool{}, map[*effect]bool{}
	for _, o := range w.Ops {
		c := &call{Op: o, did: b.effects[o.Kind][o.Name]}
		if c.did != nil && c.did.amount != o.Amount && (o.Kind == TopUp || o.Kind == Commit) {
			c.did = nil // the effect is that of another call with the same name
		}
		if o.Kind == Reserve {
			if at, ok := began[o.Name]; !ok || o.Call < at {
				began[o.Name] = o.Call
			}
		}
		if o.Return == Never {
			s.Unknown++
			if c.did == nil {
				continue // the call had neither an effect nor a response
			}
			late[c.did] = true
		} else {
			s.Known++
			if o.Refused != Done {
				s.Refused++
			}
			if f := b.fates[o.Name]; f != nil {
				c.over = w.Tolerance == 0 || w.Began.Add(o.Return+w.Tolerance).UnixMilli() >= f.deadline
			}
			if c.did != nil && o.Refused == Done {
				done[c.did] = true
			}
		}
		parts := []*call{c}
		if effect, answer, ok := c.apart(); ok {
			parts = []*call{effect, answer}
		}
		for _, part := range parts {
			out = append(out, porcupine.Operation{ClientId: o.Client, Input: part, Call: int64(o.Call), Return: int64(o.Return)})
		}
	}
	for _, e := range sorted(b.effects) {
		switch {
		case e.kind == expire:
			c := &call{Op: Op{Client: sweeper, Kind: expire, Name: e.name, Call: began[e.name], Return: Never}, did: e}
			out = append(out, porcupine.Operation{ClientId: sweeper, Input: c, Call: int64(c.Call), Return: math.MaxInt64})
		case !done[e] && !late[e]:
			return nil, violation("wallet %s: no call made transaction %d, %s %s", w.Project, e.to, e.kind, e.name)
		case !done[e]:
			s.Late++
		}
	}
	return out, w.stamps(b, s)
}

// sweeper is the client number under which expiries appear among the calls.
const sweeper = -1

func sorted(effects map[Kind]map[string]*effect) []*effect {
	var out []*effect
	for _, kind := range effects {
		out = slices.AppendSeq(out, maps.Values(kind))
	}
	slices.SortFunc(out, func(a, b *effect) int { return a.to - b.to })
	return out
}

// stamps compares the times of the transactions in the journal with the calls that may have made them. It returns a
// Violation if a time is more than w.Tolerance before the first start or after the last end of these calls. It sets
// s.Off.
func (w *Wallet) stamps(b *book, s *Summary) error {
	if w.Tolerance == 0 {
		return nil
	}
	type span struct{ from, to time.Duration }
	spans := map[*effect]span{}
	for _, o := range w.Ops {
		e := b.effects[o.Kind][o.Name]
		if e == nil {
			continue
		}
		was, ok := spans[e]
		if !ok {
			was = span{o.Call, 0}
		}
		spans[e] = span{min(was.from, o.Call), max(was.to, o.Return)}
	}
	for _, e := range sorted(b.effects) {
		within, ok := spans[e]
		if !ok {
			continue
		}
		at := time.UnixMilli(e.at).Sub(w.Began)
		off := max(within.from-at, 0)
		if within.to != Never {
			off = max(off, at-within.to)
		}
		s.Off = max(s.Off, off)
		if off > w.Tolerance {
			return violation("wallet %s: transaction %d, %s %s, is stamped %s, and was called for from %s to %s", w.Project, e.to, e.kind, e.name, at, within.from, within.to)
		}
	}
	return nil
}

// step reports whether the call, with its response, is possible at journal position n. It also returns the position
// after the call.
func (c *call) step(b *book, n int) (bool, int) {
	next := n
	if c.did != nil && c.did.from == n && c.Refused == Done {
		next = c.did.to
	}
	if c.silent { // it has no response; next is n if another call of the same name made the effect
		return true, next
	}
	if c.Return == Never {
		return c.Kind != expire || next != n, next
	}
	if c.Wallet != nil && c.Kind != TopUp && *c.Wallet != b.after[next] {
		return false, n
	}
	return c.true(b, n, next), next
}

// The method true reports whether the response is correct for a call that leads from journal position n to the position
// next.
func (c *call) true(b *book, n, next int) bool {
	f := b.fates[c.Name]
	switch c.Kind {
	case TopUp: // a repeated top-up returns the response of the first one
		return c.Refused == Done && c.did != nil && next >= c.did.to && c.Wallet != nil && *c.Wallet == b.after[c.did.to]
	case Reserve:
		if c.Refused == Insufficient {
			return f.at(n) == 0 && c.Amount > b.after[n].Available && c.Available == b.after[n].Available
		}
		return c.Refused == Done && f.at(next) != 0 && f.amount == c.Amount
	case ReadWallet:
		return c.Refused == Done && c.Wallet != nil
	case ReadReservation:
		if c.Refused == NotFound {
			return f.at(n) == 0
		}
		return c.Refused == Done && f.at(n) == c.Status && (c.Status != ledger.Committed || f.charged == c.Charged)
	case Commit:
		return c.commit(f, n, next)
	case Release:
		return c.release(f, n, next)
	}
	return false
}

func (c *call) commit(f *fate, n, next int) bool {
	switch c.Refused {
	case Done:
		return f.at(next) == ledger.Committed && f.charged == c.Amount
	case NotFound:
		return f.at(n) == 0
	case WasCommitted:
		return f.at(n) == ledger.Committed && f.charged != c.Amount
	case WasReleased:
		return f.at(n) == ledger.Released
	case WasExpired:
		return c.expired(f, n)
	case TooMuch:
		return f.at(n) == ledger.Pending && c.Amount > f.amount
	}
	return false
}

func (c *call) release(f *fate, n, next int) bool {
	switch {
	case c.Refused == NotFound:
		return f.at(n) == 0
	case c.Refused == WasCommitted:
		return f.at(n) == ledger.Committed
	case c.Refused != Done:
		return false
	case c.Released:
		return f.at(next) == ledger.Released
	}
	return c.expired(f, n)
}

// expired reports whether the response "expired" is correct at journal position n. The deadline of the reservation must
// possibly have passed when the call ended. The reservation must be expired at n, or be pending at n and neither be
// committed nor released later.
func (c *call) expired(f *fate, n int) bool {
	switch f.at(n) {
	case ledger.Expired:
		return c.over
	case ledger.Pending:
		return c.over && (f.ended == 0 || f.status == ledger.Expired)
	}
	return false
}
