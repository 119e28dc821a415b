package billing

import (
	"errors"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

var _ vm.Billing = (*Service)(nil)

// by is the principal that the wallet transactions of package billing name. No user can have this name.
const by = "system:billing"

// Admit implements vm.Billing. It first charges the project's unpaid bills, and then reserves the price of the VM's
// first hour. If bills stay unpaid or the reservation fails, it returns an error, and the VM is not created. For a VM
// that costs nothing it does neither.
func (s *Service) Admit(tx *store.Tx, vm *cloud.VM) error {
	m := &Meter{Org: vm.Org, Project: vm.Project, VM: vm.ID, Name: vm.Name, Until: tx.Now()}
	if err := s.reserve(tx, m, s.terms.Prices.Hour(FullUse(vm)), "vm"); err != nil {
		return err
	}
	return s.put(tx, m, m)
}

// reserve charges the unpaid bills of the project of the new meter m. It then reserves price, the price of the first
// hour, and sets m.Reservation. It returns an error if bills stay unpaid or the reservation fails. It does nothing if
// price is 0. resource is the resource type of the reservation: "vm" or "volume".
func (s *Service) reserve(tx *store.Tx, m *Meter, price int64, resource string) error {
	if price == 0 {
		return nil
	}
	if !mutant.On(mutant.AdmitDebtor) {
		if err := s.checkSolvent(tx, m.object(), price); err != nil {
			return err
		}
	}
	m.Reservation = idOf(m.VM, "reservation")
	o := credit.Request{Tenant: cloud.Tenant{Org: m.Org, Project: m.Project}, Command: ledger.Command{
		Op: ledger.DoReserve, By: by, IDs: [2]string{idOf(m.VM, "reservation/hold")}, Amount: price,
		Description: fmt.Sprintf("%s, its first hour", m.object()), Reservation: m.Reservation, ResourceType: resource,
		TTL: (cloud.CreatingTime + s.terms.Hour + 999) / 1000,
	}}
	if _, err := s.opts.Credits.Within(tx, o); err != nil {
		return errTooLittleCredit(m.object(), price, err)
	}
	return nil
}

// Start implements vm.Billing. With the policy Keep, or for a VM that costs nothing, it returns nil. With the policy
// Stop, it returns an error if the project has unpaid bills, or if the wallet does not cover the part of the VM's
// current hour that is not billed yet. Credit that was reserved when the VM was created counts as available.
func (s *Service) Start(tx *store.Tx, vm *cloud.VM) error {
	price := s.terms.Prices.Hour(FullUse(vm))
	if s.opts.Rules.OnEmpty != Stop || price == 0 {
		return nil
	}
	m, err := meters.Get(tx, string(vm.Project), string(vm.ID))
	if err != nil {
		return err
	}
	need := price
	if m != nil {
		if tx.Now() < m.Until {
			need -= m.Peak
		}
		if m.Reservation != "" {
			held, err := s.opts.Credits.ReservedAt(tx, vm.Tenant(), m.Reservation, tx.Now())
			if err != nil {
				return err
			}
			need -= held
		}
	}
	if err := s.checkSolvent(tx, objectOf(vm), price); err != nil {
		return err
	}
	wallet, err := s.opts.Credits.WalletAt(tx, vm.Tenant())
	if err == nil {
		err = checkSpendable(wallet, need)
	}
	if err != nil {
		return errTooLittleCredit(objectOf(vm), price, err)
	}
	return nil
}

// object identifies a VM or a volume, and its project, in messages to users.
type object struct {
	volume  bool
	name    string
	project cloud.ProjectID
}

func objectOf(vm *cloud.VM) object { return object{false, vm.Name, vm.Project} }

func (o object) String() string {
	if o.volume {
		return "volume " + o.name
	}
	return "VM " + o.name
}

// checkSolvent charges the unpaid bills of the project of o, and returns an error if some of them stay unpaid. price is
// the price of an hour of o, and is used only in the error.
func (s *Service) checkSolvent(tx *store.Tx, o object, price int64) error {
	_, unpaid, refusal, err := s.settle(tx, o.project)
	switch {
	case err != nil:
		return err
	case len(unpaid) == 0:
		return nil
	case refusal == nil:
		// The wallet refused nothing. settle ended because it has reached its limits for one transaction.
		return fault.New(fault.ResourceExhausted, "unpaid hours are being charged to project %s: try again", o.project).
			WithReason("CREDIT_OWED").With("price", price).MayRetry()
	}
	var sum int64
	for _, b := range unpaid {
		if sum += b.Total(); sum < 0 {
			sum = maxAmount
		}
	}
	more := ""
	if len(unpaid) == maxBills {
		more = " or more"
	}
	f := errTooLittleCredit(o, price, refusal)
	f.Message += fmt.Sprintf("; project %s owes %d%s for earlier hours", o.project, sum, more)
	return f.With("owed", sum)
}

const maxAmount = 1<<63 - 1

// checkSpendable returns an error if the wallet is not active, or if its available amount is less than the required
// amount.
func checkSpendable(w *ledger.Wallet, amount int64) error {
	switch {
	case w.Status != ledger.Active:
		return fault.New(fault.FailedPrecondition, "the wallet is %s", w.Status).WithReason(reasons[w.Status])
	case amount > w.Available():
		return fault.New(fault.ResourceExhausted, "%d is wanted, %d is available", amount, w.Available()).
			WithReason("INSUFFICIENT_CREDIT").With("available", w.Available())
	}
	return nil
}

var reasons = map[ledger.WalletStatus]string{ledger.Suspended: "WALLET_SUSPENDED", ledger.Closed: "WALLET_CLOSED"}

// errTooLittleCredit returns the error for a VM or volume that the project cannot pay for. The error contains price,
// the price of an hour. The reason and the available amount are taken from cause, the error of the wallet.
func errTooLittleCredit(o object, price int64, cause error) *fault.Fault {
	f, ok := fault.From(cause)
	if !ok {
		return fault.New(fault.Internal, "%s cannot be paid for", o).Because(cause)
	}
	out := fault.New(fault.ResourceExhausted, "an hour of %s costs %d: %s", o, price, f.Message).Because(cause).
		WithReason(f.Reason).With("price", price)
	if fault.Is(cause, fault.NotFound) {
		out.Message, out.Reason = fmt.Sprintf("an hour of %s costs %d: project %s has no wallet", o, price, o.project), "NO_WALLET"
		out = out.With("available", int64(0))
	}
	if available, ok := f.Details["available"]; ok {
		out = out.With("available", available)
	}
	return out
}

// Changed implements vm.Billing. It counts the VM's hours up to now with the resources that the VM used before the
// change, and stores the resources that the VM uses from now on.
func (s *Service) Changed(tx *store.Tx, vm *cloud.VM) error {
	m, err := meters.Get(tx, string(vm.Project), string(vm.ID))
	if err != nil || m == nil {
		return err
	}
	failed := vm.State == cloud.Failed && m.Reservation != ""
	u := UseOf(vm)
	if u == m.Use && !failed {
		return nil
	}
	was := *m
	bills := m.Change(tx.Now(), u, s.terms)
	if failed {
		if err := s.release(tx, m, "could not be built"); err != nil {
			return err
		}
	}
	return s.put(tx, &was, m, bills...)
}

// Removed implements vm.Billing. It counts the VM's hours up to now and deletes the VM's meter. Unpaid bills remain.
func (s *Service) Removed(tx *store.Tx, vm *cloud.VM) error {
	m, err := meters.Get(tx, string(vm.Project), string(vm.ID))
	if err != nil || m == nil {
		return err
	}
	was := *m
	if err := s.put(tx, &was, m, m.Pass(tx.Now(), s.terms)); err != nil {
		return err
	}
	if err := s.release(tx, m, "was deleted"); err != nil {
		return err
	}
	deleteMeter(tx, m)
	return nil
}

// release releases the reservation of the meter m, if it is not committed yet. It ignores a refusal by the wallet and a
// violation of the wallet's invariants, because changing or deleting a VM must not depend on the wallet.
func (s *Service) release(tx *store.Tx, m *Meter, why string) error {
	if m.Reservation == "" || mutant.On(mutant.KeepReservation) {
		return nil
	}
	_, err := s.opts.Credits.Within(tx, credit.Request{Tenant: cloud.Tenant{Org: m.Org, Project: m.Project}, Command: ledger.Command{
		Op: ledger.DoRelease, By: by, IDs: [2]string{idOf(m.VM, "reservation/release")}, Reservation: m.Reservation,
		Description: fmt.Sprintf("%s %s", m.object(), why),
	}})
	m.Reservation = ""
	return ignoreRefusals(err)
}

// ignoreRefusals returns nil if err is a refusal by a wallet or a violation of a wallet's invariants. Otherwise it
// returns err.
func ignoreRefusals(err error) error {
	var broken *ledger.Violation
	if _, refused := fault.From(err); refused || errors.As(err, &broken) {
		return nil
	}
	return err
}
