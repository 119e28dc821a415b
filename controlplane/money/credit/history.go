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

// Period is a time range: From inclusive, To exclusive. 0 means no limit.
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

// Filter selects transactions. The zero value selects all of them.
type Filter struct {
	Types                   []ledger.Type
	Reservation, ResourceID string
	Period                  Period
	// Of, if not nil, selects the wallet of this incarnation of the project. The default is the current incarnation.
	Of *cloud.Incarnation
}

func (q *Filter) matches(tx *ledger.Transaction) bool {
	return (len(q.Types) == 0 || slices.Contains(q.Types, tx.Type)) && (q.Reservation == "" || tx.Reservation == q.Reservation) &&
		(q.ResourceID == "" || tx.ResourceID == q.ResourceID) && q.Period.has(tx.At)
}

// Transactions returns a page of a tenant's transactions, oldest first.
func (s *Service) Transactions(ctx context.Context, t cloud.Tenant, q Filter, size int32, token string) ([]*ledger.Transaction, string, error) {
	if err := q.Period.check(); err != nil {
		return nil, "", err
	}
	w, err := s.selected(ctx, t, q.Of)
	if err != nil {
		return nil, "", err
	}
	q.Of = nil // the account in the list's path determines the incarnation
	req := store.PageRequest{Size: size, Token: token, Query: fmt.Sprintf("transactions\x00%+v", q)}
	return store.Page(ctx, s.opts.Store, transactions, req, q.matches, account(w))
}

// selected returns the wallet of a tenant's project: of the incarnation of, or of the current one if of is nil.
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

// Statement summarizes a period of a tenant's wallet, and returns the period with its end filled in. It finds the
// transactions at both ends by binary search, and does not read the ones between.
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
			// Later transactions get this timestamp or a later one, and the transactions read here are no later.
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

// lastBefore returns the last transaction before a time, or nil. Transaction times never decrease.
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

// watchPage is how many transactions a watch reads at once while it catches up. If the client does not read, the watch
// holds no more than one page.
const watchPage = 32

// Watch sends a tenant's transactions from a sequence number on, in order and without a gap, first existing ones and
// then new ones, until ctx ends. It returns OutOfRange if the reader falls behind the retained history; the reader can
// resume with the next sequence number.
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
