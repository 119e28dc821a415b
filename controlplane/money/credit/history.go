package credit

import (
	"context"
	"fmt"
	"slices"
	"sort"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Period is a time range. From is inclusive and To is exclusive. 0 in From or To means that the range has no bound
// there.
type Period struct{ From, To cloud.Time }

func (p Period) check() error {
	switch {
	case p.From < 0:
		return fault.Invalid("from", "must be 0 or more, got %d", p.From)
	case p.To < 0 || p.To != 0 && p.To < p.From:
		return fault.Invalid("to", "must be 0, or no earlier than from, got %d", p.To)
	}
	return nil
}

func (p Period) has(at cloud.Time) bool { return at >= p.From && (p.To == 0 || at < p.To) }

// Filter selects transactions that match all its nonzero fields. The zero value selects all transactions.
type Filter struct {
	Types                   []ledger.Type
	Reservation, ResourceID string
	Period                  Period
	// Of is the incarnation of the project whose wallet is read. Successive projects with the same ID are different
	// incarnations. If Of is nil, the wallet of the current one is read.
	Of *cloud.Incarnation
}

func (q *Filter) matches(tx *ledger.Transaction) bool {
	return (len(q.Types) == 0 || slices.Contains(q.Types, tx.Type)) && (q.Reservation == "" || tx.Reservation == q.Reservation) &&
		(q.ResourceID == "" || tx.ResourceID == q.ResourceID) && q.Period.has(tx.At)
}

// Transactions returns a page of the transactions of the wallet of t, oldest first, and the token of the next page. It
// returns only transactions that match the filter q.
func (s *Service) Transactions(ctx context.Context, t cloud.Tenant, q Filter, size int32, token string) ([]*ledger.Transaction, string, error) {
	if err := q.Period.check(); err != nil {
		return nil, "", err
	}
	w, err := s.selected(ctx, t, q.Of)
	if err != nil {
		return nil, "", err
	}
	q.Of = nil // account(w) in the path below already selects the incarnation
	req := store.PageRequest{Size: size, Token: token, Query: fmt.Sprintf("transactions\x00%+v", q)}
	return store.Page(ctx, s.opts.Store, transactions, req, q.matches, account(w))
}

// selected returns the wallet of one incarnation of the project t.Project; nil means the current incarnation.
// Successive projects with the same ID are different incarnations.
func (s *Service) selected(ctx context.Context, t cloud.Tenant, of *cloud.Incarnation) (w *ledger.Wallet, err error) {
	if of == nil {
		return s.Wallet(ctx, t)
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if w, err = wallets.Get(v, accountOf(t.Project, *of)); err == nil {
			err = checkOwner(w, t)
		}
		return err
	})
	return w, err
}

// Statement summarizes the transactions of the wallet of t in the period p: opening and closing balance, and the sum of
// each type. The result effective is the period p, with the current time as its end if p has none. Statement finds the
// first and the last transaction by binary search, and does not read the others.
func (s *Service) Statement(ctx context.Context, t cloud.Tenant, p Period) (out ledger.Statement, effective Period, err error) {
	if err := p.check(); err != nil {
		return out, p, err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		w, err := s.walletOf(v, t)
		if err != nil {
			return err
		}
		before, err := lastBefore(v, w, p.From)
		if err != nil {
			return err
		}
		effective = p
		if effective.To == 0 {
			// No transaction in this snapshot is later than effective.To, and no transaction after this snapshot is
			// earlier.
			effective.To = max(s.opts.Store.Now(), p.From)
			p.To = effective.To + 1
		}
		last, err := lastBefore(v, w, p.To)
		if err != nil {
			return err
		}
		out, err = ledger.Between(before, last)
		return err
	})
	return out, effective, err
}

// lastBefore returns the last transaction of the wallet w before a point in time, or nil if there is none. It uses
// binary search, because the times of a wallet's transactions never decrease.
func lastBefore(v *store.View, w *ledger.Wallet, at cloud.Time) (*ledger.Transaction, error) {
	var failed error
	n := sort.Search(int(w.Sequence), func(i int) bool {
		tx, err := transaction(v, w, uint64(i)+1)
		if err != nil {
			failed = err
			return true
		}
		return tx.At >= at
	})
	if failed != nil || n == 0 {
		return nil, failed
	}
	return transaction(v, w, uint64(n))
}

func transaction(v *store.View, w *ledger.Wallet, n uint64) (*ledger.Transaction, error) {
	tx, err := transactions.Get(v, account(w), number(n))
	if err == nil && tx == nil {
		err = &ledger.Violation{Project: w.Project, Says: fmt.Sprintf("I4: transaction %d is not there", n)}
	}
	return tx, err
}

// watchPage is the maximum number of existing transactions that a watch reads at a time. It limits the memory of a
// watch whose client does not read.
const watchPage = 32

// Watch calls send with the transactions of the wallet of t, in order and without a gap. The parameter named from is
// the sequence number of the first one. It sends the existing transactions, and then new ones until ctx ends. If the
// client reads so slowly that the next changes are no longer retained, Watch returns OutOfRange. The client can then
// start a new watch from the next sequence number.
func (s *Service) Watch(ctx context.Context, t cloud.Tenant, from uint64, send func(*ledger.Transaction) error) error {
	next := max(from, 1)
	if err := s.opts.Store.Barrier(ctx); err != nil {
		return err
	}
	var revision int64
	var of string
	for more := true; more; {
		var page []store.Record[ledger.Transaction]
		if err := s.opts.Store.Local(func(v *store.View) (err error) {
			revision = v.Revision()
			w, err := s.walletOf(v, t)
			if err != nil {
				return err
			}
			if of == "" {
				of = account(w)
			}
			page, more, err = transactions.ListAfter(v, watchPage, []string{of, number(next - 1)}, of)
			return err
		}); err != nil {
			return err
		}
		for _, r := range page {
			if err := send(r.Value); err != nil {
				return err
			}
			next = r.Value.Sequence + 1
		}
	}
	w := transactions.Watch(s.opts.Store, revision+1, of)
	defer w.Close()
	for {
		changes, _, err := w.Next(ctx)
		if err != nil {
			return err
		}
		for _, c := range changes {
			if c.Value == nil || c.Value.Sequence < next {
				continue
			}
			if err := send(c.Value); err != nil {
				return err
			}
			next = c.Value.Sequence + 1
		}
	}
}
