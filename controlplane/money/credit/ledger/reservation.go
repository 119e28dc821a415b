package ledger

import (
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// The operations on a reservation: reserve, commit, release and expire.

// repeated checks whether the command was already executed or its reservation has ended. If so, done is true, and Apply
// returns err and the outcome without executing the command. Apply calls it before it checks the wallet's status, so
// that a repeated command succeeds in any status.
func (s *step) repeated() (done bool, err error) {
	r := s.out.Reservation
	if r == nil {
		return false, nil
	}
	switch s.c.Op {
	case DoReserve:
		return true, s.same(r)
	case DoCommit:
		if r.Status == Committed && !mutant.On(mutant.CommitTwice) {
			return true, s.committed(r)
		}
	case DoRelease:
		s.out.Released = r.Status == Released
		if r.Status == Committed {
			return true, ended(r)
		}
		return r.Status != Pending, nil
	case DoExpire:
		return r.Status != Pending, nil
	}
	return false, nil
}

// same checks a DoReserve whose reservation ID already exists. It returns nil if the parameters equal those of the
// existing reservation r, and AlreadyExists otherwise.
func (s *step) same(r *Reservation) error {
	if r.Amount != s.c.Amount || r.Description != s.c.Description || r.ResourceType != s.c.ResourceType || r.TTL != ttlOf(s.c.TTL) {
		return fault.New(fault.AlreadyExists, "reservation %s is there, and is another", r.ID).WithReason("RESERVATION_EXISTS")
	}
	return nil
}

func (s *step) committed(r *Reservation) error {
	if s.c.Amount < 0 {
		return negative(s.c.Amount)
	}
	if amount := s.actual(r); amount != r.Charged {
		return fault.New(fault.FailedPrecondition, "reservation %s is committed with %d, not %d", r.ID, r.Charged, amount).
			WithReason("RESERVATION_COMMITTED")
	}
	return nil
}

// actual returns the amount that a commit of r charges.
func (s *step) actual(r *Reservation) int64 {
	if s.c.Amount == 0 {
		return r.Amount
	}
	return s.c.Amount
}

func negative(amount int64) error {
	return fault.Invalid("actual_amount", "must be 0, for all that was reserved, or more, got %d", amount)
}

func ttlOf(seconds int64) int64 {
	if seconds == 0 {
		return DefaultTTL
	}
	return seconds
}

// ended returns the error for an operation that requires a pending reservation, if r is committed, released or expired.
func ended(r *Reservation) error {
	reason := map[ReservationStatus]string{
		Committed: "RESERVATION_COMMITTED", Released: "RESERVATION_RELEASED", Expired: "RESERVATION_EXPIRED",
	}
	return fault.New(fault.FailedPrecondition, "reservation %s is %s", r.ID, r.Status).WithReason(reason[r.Status])
}

func (s *step) noReservation() error {
	return fault.New(fault.NotFound, "no reservation %s", s.c.Reservation)
}

func (s *step) reserve() error {
	if err := s.positive(); err != nil {
		return err
	}
	ttl := ttlOf(s.c.TTL)
	if ttl < 0 || ttl > MaxTTL {
		return fault.Invalid("ttl_seconds", "must be 0, for %d, to %d, got %d", DefaultTTL, MaxTTL, ttl)
	}
	w := &s.out.Wallet
	if w.Pending >= MaxPending {
		return fault.New(fault.ResourceExhausted, "the wallet has %d reservations pending", w.Pending).WithReason("TOO_MANY_RESERVATIONS")
	}
	if err := s.spend(Hold, Transaction{Description: s.c.Description, Reservation: s.c.Reservation}); err != nil {
		return err
	}
	w.Pending++
	s.out.Reservation = &Reservation{
		ID: s.c.Reservation, Project: w.Project, Amount: s.c.Amount, Status: Pending, Description: s.c.Description,
		ResourceType: s.c.ResourceType, TTL: ttl, Deadline: s.c.At + ttl*1000, CreatedAt: s.c.At, CreatedBy: s.c.By,
	}
	return nil
}

func (s *step) commit() error {
	r := s.out.Reservation
	switch {
	case s.c.Amount < 0:
		return negative(s.c.Amount)
	case r == nil:
		return s.noReservation()
	case r.Status != Pending && !mutant.On(mutant.CommitTwice):
		return ended(r)
	case r.Over(s.c.At) && !mutant.On(mutant.LateCommit):
		late := *r
		late.Status = Expired
		return ended(&late)
	}
	amount := s.actual(r)
	if amount > r.Amount {
		return fault.New(fault.FailedPrecondition, "reservation %s holds %d, not %d: charge the rest on its own", r.ID, r.Amount, amount).
			WithReason("AMOUNT_EXCEEDS_RESERVATION")
	}
	r.ResourceID, r.Charged = s.c.ResourceID, amount
	about := Transaction{Description: r.Description, ResourceID: s.c.ResourceID, Reservation: r.ID}
	if err := s.post(Charge, amount, about); err != nil {
		return err
	}
	if rest := r.Amount - amount; rest > 0 {
		if err := s.post(Release, rest, about); err != nil {
			return err
		}
	}
	s.leave(Committed)
	return nil
}

func (s *step) release() error {
	r := s.out.Reservation
	switch {
	case r == nil:
		return s.noReservation()
	case r.Over(s.c.At):
		return nil // past its deadline, a reservation can only be expired by DoExpire
	}
	s.out.Released = true
	return s.free(Released, s.c.Description)
}

// expire ends a reservation whose deadline has passed and makes its amount available again. Before the deadline it
// changes nothing, so it can be executed several times.
func (s *step) expire() error {
	r := s.out.Reservation
	if r == nil {
		return s.noReservation()
	}
	if !r.Over(s.c.At) {
		return nil
	}
	return s.free(Expired, "expired")
}

// free ends the reservation with the given status, and makes its full amount available again.
func (s *step) free(status ReservationStatus, why string) error {
	r := s.out.Reservation
	if err := s.post(Release, r.Amount, Transaction{Description: why, Reservation: r.ID}); err != nil {
		return err
	}
	s.leave(status)
	return nil
}

func (s *step) leave(status ReservationStatus) {
	s.out.Reservation.Status, s.out.Reservation.EndedAt = status, s.c.At
	s.out.Wallet.Pending--
}
