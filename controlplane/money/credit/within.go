package credit

import (
	"errors"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// What another service does to a wallet in a transaction of its own, so that its records and the wallet's change together
// or not at all. Nobody waits for a desk there: a transaction that meets another of the same wallet is tried again.

// Within carries out an order in a transaction. The order comes with the ids that it needs, who gives it, and no
// idempotency key: to give it once is the transaction's business. A refusal is a *fault.Fault and has written nothing; the
// transaction may go on, or fail with it.
func (s *Service) Within(tx *store.Tx, o Order) (ledger.Outcome, error) {
	if err := o.Check(); err != nil {
		return ledger.Outcome{}, err
	}
	out, err := s.carryOut(tx, &o)
	s.note(err)
	return out, err
}

// system is how the names of those begin who give orders within. No user has such a name.
const system = "system:"

// mayEnd refuses to commit or release what another service reserved for something: who can use up the wallet can else take
// away what stands for that.
func mayEnd(r *ledger.Reservation, c *ledger.Command) error {
	ends := c.Op == ledger.DoCommit || c.Op == ledger.DoRelease
	if !ends || r == nil || !strings.HasPrefix(r.CreatedBy, system) || r.CreatedBy == c.By {
		return nil
	}
	return fault.New(fault.FailedPrecondition, "reservation %s is for %s, and ends with that", r.ID, r.Description).WithReason("RESERVATION_IN_USE")
}

// WalletAt is a tenant's wallet as a transaction or a view sees it. NotFound when there is none.
func (s *Service) WalletAt(r store.Reader, t cloud.Tenant) (*ledger.Wallet, error) {
	return s.walletOf(r, t)
}

// HeldAt is what a reservation of a tenant's holds for a commit at now: 0 when there is none, or when it has ended.
func (s *Service) HeldAt(r store.Reader, t cloud.Tenant, id string, now cloud.Time) (int64, error) {
	w, err := s.walletOf(r, t)
	if err != nil {
		if fault.Is(err, fault.NotFound) {
			err = nil
		}
		return 0, err
	}
	held, err := reservations.Get(r, account(w), id)
	if err != nil || held == nil || held.Status != ledger.Pending || held.Over(now) {
		return 0, err
	}
	return held.Amount, nil
}

// violations counts what should never be.
func violations(r prometheus.Registerer) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "trivet_credit_violations_total", Help: "Times that a wallet was found not to add up, by an order or an audit on this member.",
	})
	if r != nil {
		r.MustRegister(c)
	}
	return c
}

// note counts a violation, and tells the log.
func (s *Service) note(err error) {
	var v *ledger.Violation
	if errors.As(err, &v) {
		s.violations.Inc()
		s.opts.Log.Error("LEDGER VIOLATION: a wallet does not add up and takes no more orders", "project", v.Project, "err", v)
	}
}
