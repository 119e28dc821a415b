package ledger

import (
	"math"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// The operations on the wallet itself.

func (s *step) create() error {
	if s.c.Amount < 0 {
		return fault.Invalid("initial_balance", "must be 0 or more, got %d", s.c.Amount)
	}
	s.out.Wallet = Wallet{Org: s.c.Tenant.Org, Project: s.c.Tenant.Project, Status: Active, CreatedAt: s.c.At}
	s.out.Changed = true
	if s.c.Amount == 0 {
		return nil
	}
	return s.post(TopUp, s.c.Amount, Transaction{Description: "initial balance"})
}

func (s *step) topUp() error {
	if err := s.positive(); err != nil {
		return err
	}
	// No account can exceed the sum of all deposits, so it is enough to check that this sum does not overflow.
	if most := math.MaxInt64 - s.out.Wallet.Deposited(); s.c.Amount > most {
		return fault.Invalid("amount", "must be %d or less: the wallet can count no more", most).WithReason("OVERFLOW")
	}
	return s.post(TopUp, s.c.Amount, Transaction{Description: s.c.Description})
}

// charge charges the command's amount for usage. It takes the amount from the credit that is available and not
// reserved.
func (s *step) charge() error {
	if err := s.positive(); err != nil {
		return err
	}
	return s.spend(BillingCharge, Transaction{Description: s.c.Description, ResourceID: s.c.ResourceID})
}

// refund returns all or a part of the amount of a charge to the available amount of the wallet.
func (s *step) refund() error {
	if err := s.positive(); err != nil {
		return err
	}
	of := s.t.Charge
	if of == nil {
		return fault.New(fault.NotFound, "no transaction %d", s.c.Charge)
	}
	if of.Type != Charge && of.Type != BillingCharge {
		return fault.New(fault.FailedPrecondition, "transaction %d is a %s: only a charge is refunded", of.Sequence, of.Type).WithReason("NOT_A_CHARGE")
	}
	if left := of.Amount - s.t.Refunded; s.c.Amount > left {
		return fault.New(fault.FailedPrecondition, "%d is wanted, %d of transaction %d is not refunded yet", s.c.Amount, left, of.Sequence).
			WithReason("AMOUNT_EXCEEDS_CHARGE")
	}
	s.out.Refunded += s.c.Amount
	return s.post(Refund, s.c.Amount, Transaction{
		Description: s.c.Description, ResourceID: of.ResourceID, Reservation: of.Reservation, Charge: of.Sequence,
	})
}

func (s *step) suspend() error { return s.become(Suspended) }
func (s *step) resume() error  { return s.become(Active) }

func (s *step) close() error {
	if n := s.out.Wallet.Reserved(); n != 0 {
		return fault.New(fault.FailedPrecondition, "%d is reserved: commit or release it first", n).WithReason("WALLET_HAS_RESERVATIONS")
	}
	return s.become(Closed)
}

func (s *step) become(status WalletStatus) error {
	s.out.Changed = s.out.Wallet.Status != status
	s.out.Wallet.Status = status
	return nil
}
