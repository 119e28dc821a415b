package ledgertest

import (
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Memory implements Book with package ledger. It stores the records in maps.
type Memory struct{ pages map[cloud.ProjectID]*page }

type page struct {
	wallet       ledger.Wallet
	reservations map[string]*ledger.Reservation
	transactions []ledger.Transaction
	refunded     map[uint64]int64
}

// NewMemory returns an empty Memory.
func NewMemory() *Memory { return &Memory{map[cloud.ProjectID]*page{}} }

// Do implements Book.
func (m *Memory) Do(project cloud.ProjectID, c ledger.Command) (ledger.Outcome, error) {
	p := m.pages[project]
	var t ledger.Touched
	if p != nil {
		t.Wallet, t.Reservation = &p.wallet, p.reservations[c.Reservation]
		if n := c.Charge; n > 0 && n <= uint64(len(p.transactions)) {
			t.Charge, t.Refunded = &p.transactions[n-1], p.refunded[n]
		}
	}
	out, err := ledger.Apply(t, c)
	if err != nil || !out.Changed {
		return out, err
	}
	if p == nil {
		p = &page{reservations: map[string]*ledger.Reservation{}, refunded: map[uint64]int64{}}
		m.pages[project] = p
	}
	p.wallet = out.Wallet
	p.transactions = append(p.transactions, out.Transactions...)
	if out.Reservation != nil {
		p.reservations[out.Reservation.ID] = out.Reservation
	}
	if t.Charge != nil {
		p.refunded[c.Charge] = out.Refunded
	}
	return out, nil
}

// Wallet implements Book.
func (m *Memory) Wallet(project cloud.ProjectID) (*ledger.Wallet, error) {
	if p := m.pages[project]; p != nil {
		return &p.wallet, nil
	}
	return nil, nil
}

// Reservation returns the reservation with this ID in a project's wallet, or nil if it does not exist.
func (m *Memory) Reservation(project cloud.ProjectID, id string) *ledger.Reservation {
	if p := m.pages[project]; p != nil {
		return p.reservations[id]
	}
	return nil
}

// Audit implements Book.
func (m *Memory) Audit() error {
	for project, p := range m.pages {
		a := ledger.NewAudit(p.wallet)
		for i := range p.transactions {
			a.Transaction(&p.transactions[i])
		}
		for _, r := range p.reservations {
			a.Reservation(r)
		}
		for n, amount := range p.refunded {
			a.Refunded(&p.transactions[n-1], amount)
		}
		if err := a.Done(); err != nil {
			return fmt.Errorf("audit %s: %w", project, err)
		}
	}
	return nil
}
