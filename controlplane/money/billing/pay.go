package billing

import (
	"cmp"
	"context"

	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// maxHours is the maximum number of hours charged in one transaction, and maxBills the maximum number of bills read
	// in it.
	maxHours = 100
	maxBills = 100
)

// settle charges the unpaid bills of a project, oldest first. It ends when the first maxBills bills are paid, when the
// wallet refuses a charge, or when maxHours hours are charged. hours is the number of hours that it charged plus the
// number of bills that it wrote off. unpaid holds those of the bills that are still unpaid. refusal is the wallet's
// refusal, or nil.
//
// Bills from before the project's creation belong to a deleted project of the same ID. They are written off: the wallet
// that owed them is closed, and a later project does not pay for them.
func (s *Service) settle(tx *store.Tx, p cloud.ProjectID) (hours int, unpaid []*Bill, refusal *fault.Fault, err error) {
	page, _, err := owed.List(tx, maxBills, string(p))
	if err != nil {
		return 0, nil, nil, err
	}
	createdAt, err := s.opts.Credits.ProjectCreatedAt(tx, p)
	if err != nil {
		return 0, nil, nil, err
	}
	for _, r := range page {
		b := r.Value
		if b.From < createdAt {
			owed.Delete(tx, r.Path...)
			hours++
			continue
		}
		before := hours
		for b.Hours > 0 && refusal == nil && hours < maxHours {
			if refusal, err = s.charge(tx, b); err != nil {
				return hours, nil, nil, err
			}
			if refusal == nil {
				b.PayOne()
				hours++
			}
		}
		switch {
		case b.Hours > 0:
			unpaid = append(unpaid, b)
			if hours > before {
				owed.Put(tx, b, r.Path...)
			}
		case !mutant.On(mutant.KeepPaidBill):
			owed.Delete(tx, r.Path...)
		}
	}
	return hours, unpaid, refusal, nil
}

// charge charges the first hour of a bill: first from the bill's reservation, the rest from the available amount. It
// returns the wallet's refusal, or nil if the hour is charged. After a refusal nothing has changed.
func (s *Service) charge(tx *store.Tx, b *Bill) (*fault.Fault, error) {
	t := cloud.Tenant{Org: b.Org, Project: b.Project}
	w, err := s.opts.Credits.WalletAt(tx, t)
	if err != nil {
		return splitRefusal(err)
	}
	if err := checkSpendable(w, 0); err != nil {
		return splitRefusal(err)
	}
	var held int64
	if b.Reservation != "" {
		if held, err = s.opts.Credits.ReservedAt(tx, t, b.Reservation, tx.Now()); err != nil {
			return nil, err
		}
	}
	if rest := b.Price - held; rest > 0 {
		_, err := s.opts.Credits.Within(tx, credit.Request{Tenant: t, Command: ledger.Command{
			Op: ledger.DoCharge, By: by, IDs: [2]string{b.ID("charge")}, Amount: rest, Description: b.Says(), ResourceID: string(b.VM),
		}})
		if err != nil {
			return splitRefusal(err)
		}
	}
	if held == 0 {
		return nil, nil
	}
	_, err = s.opts.Credits.Within(tx, credit.Request{Tenant: t, Command: ledger.Command{
		Op: ledger.DoCommit, By: by, IDs: [2]string{b.ID("commit"), b.ID("free")}, Amount: min(held, b.Price), Reservation: b.Reservation,
		ResourceID: string(b.VM),
	}})
	return nil, err
}

// splitRefusal returns err as a refusal if it is a *fault.Fault, and otherwise as an error.
func splitRefusal(err error) (*fault.Fault, error) {
	if f, ok := fault.From(err); ok {
		return f, nil
	}
	return nil, err
}

// pay charges unpaid bills of a project in one transaction. again reports whether there may be more to charge. If the
// wallet refuses and the policy is Stop, pay stops the VMs of the unpaid bills.
func (s *Service) pay(ctx context.Context, p cloud.ProjectID) (again bool, err error) {
	var hours int
	var refusal *fault.Fault
	if _, err := s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		hours, _, refusal, err = s.settle(tx, p)
		return err
	}); err != nil {
		return false, err
	}
	if refusal != nil && s.debtors.isNew(p, cmp.Or(refusal.Reason, refusal.Message)) {
		s.opts.Log.Warn("a project cannot pay for its VMs", "project", p, "wallet", refusal.Message, "on_empty", cmp.Or(s.opts.Rules.OnEmpty, Keep))
	}
	if refusal != nil && s.opts.Rules.OnEmpty == Stop {
		return false, s.haltAll(ctx, p)
	}
	return refusal == nil && hours > 0, nil
}

// haltAll stops the VMs of all unpaid bills of a project, a page of bills at a time, while the wallet refuses to pay.
func (s *Service) haltAll(ctx context.Context, p cloud.ProjectID) error {
	var after []string
	for more := true; more; {
		var on [][]string
		if err := s.opts.Store.Local(func(v *store.View) error {
			list := func() ([]store.Record[Bill], bool, error) { return owed.List(v, maxBills, string(p)) }
			if after != nil {
				list = func() ([]store.Record[Bill], bool, error) { return owed.ListAfter(v, maxBills, after, string(p)) }
			}
			page, rest, err := list()
			if err != nil {
				return err
			}
			for _, r := range page {
				machine, err := vm.VMs.Get(v, string(p), string(r.Value.VM))
				if err != nil {
					return err
				}
				if machine != nil && (machine.Desired.On || machine.Desired.StartAfterStop) {
					on = append(on, r.Path)
				}
			}
			if more = rest; more {
				after = page[len(page)-1].Path
			}
			return nil
		}); err != nil {
			return err
		}
		if err := s.halt(ctx, p, on); err != nil {
			return err
		}
	}
	return nil
}

// halt stops the VMs of the bills at the given paths in one transaction. It does nothing if the project can pay now.
func (s *Service) halt(ctx context.Context, p cloud.ProjectID, bills [][]string) error {
	if len(bills) == 0 {
		return nil
	}
	var halted []cloud.VMID
	var refusal *fault.Fault
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		halted = nil
		if _, _, refusal, err = s.settle(tx, p); err != nil || refusal == nil {
			return err
		}
		for _, at := range bills {
			b, err := owed.Get(tx, at...)
			if err != nil {
				return err
			}
			if b == nil {
				continue
			}
			did, err := s.machines.Halt(tx, cloud.Tenant{Org: b.Org, Project: b.Project}, b.VM)
			if err != nil {
				return err
			}
			if did {
				halted = append(halted, b.VM)
			}
		}
		return nil
	})
	if err == nil && len(halted) > 0 {
		s.opts.Log.Warn("VMs are stopped, as their hours are not paid", "project", p, "vms", halted, "wallet", refusal.Message)
	}
	return err
}

// debtors holds the projects that could not pay, with the reason, in the previous and in the current round over all
// projects. It is used to log each of them once.
type debtors struct{ before, now map[cloud.ProjectID]string }

// isNew adds the project p to the current round, with the reason why it could not pay. It returns false if p could not
// pay for the same reason in this or the previous round.
func (d *debtors) isNew(p cloud.ProjectID, why string) bool {
	if d.now == nil {
		d.now = map[cloud.ProjectID]string{}
	}
	known := d.before[p] == why || d.now[p] == why
	d.now[p] = why
	return !known
}

// round starts a new round over all projects.
func (d *debtors) round() { d.before, d.now = d.now, nil }
