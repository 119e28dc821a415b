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

// With the functions below, other services change a wallet in a transaction of their own, so that their records and the
// wallet change atomically. These requests do not wait in the wallet's queue. If their transaction conflicts with
// another transaction on the wallet, it is executed again.

// Within executes the request o in the transaction tx. The command in o must contain the transaction IDs and the
// principal. Within ignores idempotency keys: the caller's transaction must ensure that the request is executed once.
// If the request is refused, the error is a *fault.Fault and nothing is written. The caller may then continue with tx,
// or return the error.
func (s *Service) Within(tx *store.Tx, o Request) (ledger.Outcome, error) {
	if err := o.Check(); err != nil {
		return ledger.Outcome{}, err
	}
	out, err := s.carryOut(tx, &o)
	s.note(err)
	return out, err
}

// system is the prefix of the names of principals that use Within. No user can have such a name.
const system = "system:"

// mayEnd returns FailedPrecondition if c commits or releases a reservation that another service of the control plane
// made. Without this check, a tenant could end the reservation that pays for, say, a VM.
func mayEnd(r *ledger.Reservation, c *ledger.Command) error {
	ends := c.Op == ledger.DoCommit || c.Op == ledger.DoRelease
	if !ends || r == nil || !strings.HasPrefix(r.CreatedBy, system) || r.CreatedBy == c.By {
		return nil
	}
	return fault.New(fault.FailedPrecondition, "reservation %s is for %s, and ends with that", r.ID, r.Description).WithReason("RESERVATION_IN_USE")
}

// WalletAt returns the wallet of t, or NotFound. The records are read from r, a transaction or a view.
func (s *Service) WalletAt(r store.Reader, t cloud.Tenant) (*ledger.Wallet, error) {
	return s.walletOf(r, t)
}

// ReservedAt returns the amount that could be charged, at the time now, by committing a reservation in the wallet of t.
// It returns 0 if the reservation does not exist, is not pending, or is past its deadline.
func (s *Service) ReservedAt(r store.Reader, t cloud.Tenant, id string, now cloud.Time) (int64, error) {
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

// violations returns the counter of ledger violations. If r is not nil, it registers the counter with r.
func violations(r prometheus.Registerer) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "trivet_credit_violations_total", Help: "Number of times that a request or an audit on this member found contradicting records of a wallet.",
	})
	if r != nil {
		r.MustRegister(c)
	}
	return c
}

// note checks whether err is a *ledger.Violation. If so, it logs err and increments the counter of violations.
func (s *Service) note(err error) {
	var v *ledger.Violation
	if errors.As(err, &v) {
		s.violations.Inc()
		s.opts.Log.Error("LEDGER VIOLATION: a wallet's records contradict each other, so it refuses all changes", "project", v.Project, "err", v)
	}
}
