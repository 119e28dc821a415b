package credit

import (
	"context"
	"errors"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// auditPage is the number of records that an audit reads at a time.
const auditPage = 1000

// Finding is the result of the audit of one wallet.
type Finding struct {
	Project cloud.ProjectID
	// Incarnation is the incarnation of the project to which the wallet belongs. A later incarnation may have the
	// project's ID now.
	Incarnation cloud.Incarnation
	// Problem describes the first inconsistency in the wallet's records, or is empty if there is none.
	Problem                    string
	Transactions, Reservations uint64
}

// Audit recomputes every wallet from its records and calls send with one finding per wallet. The records of one wallet
// are read from one snapshot that is no older than the call. Different wallets may be read from different snapshots,
// because they do not depend on each other. An inconsistent wallet is a finding, not an error.
func (s *Service) Audit(ctx context.Context, send func(Finding) error) error {
	if err := s.opts.Store.Barrier(ctx); err != nil {
		return err
	}
	var after []string
	for more := true; more; {
		var page []store.Record[ledger.Wallet]
		if err := s.opts.Store.Local(func(v *store.View) (err error) {
			if after == nil {
				page, more, err = wallets.List(v, auditPage)
			} else {
				page, more, err = wallets.ListAfter(v, auditPage, after)
			}
			return err
		}); err != nil {
			return err
		}
		for _, r := range page {
			f, err := s.auditOf(ctx, r.Path[0])
			if err != nil {
				return err
			}
			if err := send(f); err != nil {
				return err
			}
			after = r.Path
		}
	}
	return nil
}

func (s *Service) auditOf(ctx context.Context, of string) (f Finding, err error) {
	f.Project = projectOf(of)
	err = s.opts.Store.Local(func(v *store.View) error {
		w, err := wallets.Get(v, of)
		if err != nil || w == nil {
			return err
		}
		f.Incarnation = w.Incarnation
		a := ledger.NewAudit(*w)
		if err := each(ctx, v, transactions, of, func(_ string, tx *ledger.Transaction) error {
			a.Transaction(tx)
			return nil
		}); err != nil {
			return err
		}
		if err := each(ctx, v, reservations, of, func(_ string, r *ledger.Reservation) error {
			a.Reservation(r)
			awaited, err := due.Has(v, number(r.Deadline), of, r.ID)
			if pending := r.Status == ledger.Pending; err == nil && awaited != pending && f.Problem == "" {
				f.Problem = fmt.Sprintf("I5: reservation %s is %s; that it waits for its deadline is %v", r.ID, r.Status, awaited)
			}
			return err
		}); err != nil {
			return err
		}
		if err := each(ctx, v, refunds, of, func(sequence string, amount *int64) error {
			charge, err := transactions.Get(v, of, sequence)
			if err != nil {
				return err
			}
			if charge == nil {
				charge = &ledger.Transaction{}
			}
			a.Refunded(charge, *amount)
			return nil
		}); err != nil {
			return err
		}
		f.Transactions, f.Reservations = a.Transactions(), a.Reservations()
		if err := a.Done(); err != nil {
			var violation *ledger.Violation
			if !errors.As(err, &violation) {
				return err
			}
			f.Problem = violation.Says
		}
		return nil
	})
	if err != nil {
		return f, fmt.Errorf("audit %s: %w", of, err)
	}
	if f.Problem != "" {
		s.note(&ledger.Violation{Project: f.Project, Says: f.Problem})
	}
	return f, nil
}

// each reads the records of one account in a table, auditPage records at a time. It calls visit for each record, with
// the last part of the record's path.
func each[T any](ctx context.Context, v *store.View, table store.Table[T], of string, visit func(string, *T) error) error {
	page, more, err := table.List(v, auditPage, of)
	for {
		if err != nil {
			return err
		}
		for _, r := range page {
			if err := visit(r.Path[1], r.Value); err != nil {
				return err
			}
		}
		if !more {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		page, more, err = table.ListAfter(v, auditPage, page[len(page)-1].Path, of)
	}
}
