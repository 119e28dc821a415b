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
	// maxHours is the maximum number of hours that one transaction charges, and maxBills the maximum number of bills
	// that it reads.
	maxHours = 100
	maxBills = 100
)

// settle charges the first maxBills unpaid bills of a project, oldest first. It ends early when the wallet refuses a
// charge or when maxHours hours are charged. The result hours is the number of hours charged plus the number of bills
// written off, and unpaid contains the bills that it read and that are still unpaid. The result refusal is the wallet's
// refusal, or nil.
//
// Bills from before the project's creation belong to a deleted project with the same ID. They are written off: the
// wallet that should have paid them is closed, and the later project does not pay for them.
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

// charge charges the first hour of a bill. It takes as much as possible from the bill's reservation, and the rest from
// the available amount. It returns the wallet's refusal, or nil if the hour is charged. After a refusal, nothing has
// changed.
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

// splitRefusal returns err as its first result if err is a *fault.Fault, which means that the wallet refused. Otherwise
// it returns err as its second result.
func splitRefusal(err error) (*fault.Fault, error) {
	if f, ok := fault.From(err); ok {
		return f, nil
	}
	return nil, err
}

// pay charges unpaid bills of a project in one transaction. The result again is true if there may be more to charge. If
// the wallet refuses and the policy is Stop, pay stops the VMs of the unpaid bills.
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
		s.opts.Log.Warn("a project cannot pay for its VMs and volumes", "project", p, "wallet", refusal.Message, "on_empty", cmp.Or(s.opts.Rules.OnEmpty, Keep))
	}
	if refusal != nil && s.opts.Rules.OnEmpty == Stop {
		return false, s.haltAll(ctx, p)
	}
	return refusal == nil && hours > 0, nil
}

// haltAll stops the VMs of all unpaid bills of a project whose wallet refuses to pay. It reads the bills in pages, with
// one transaction per page.
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

// halt stops the VMs of the bills at the given paths in one transaction. It first tries to charge the bills of the
// project again. If the wallet does not refuse, halt stops no VM.
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

// debtors holds the projects that could not pay, each with the reason, in the previous and in the current round. In a
// round, which may take several calls of Run, each project with unpaid bills is charged once. A project that could not
// pay in the previous round for the same reason is not logged again.
type debtors struct{ before, now map[cloud.ProjectID]string }

// isNew stores in the current round that the project p could not pay, with the reason why. It returns false if p
// already could not pay for the same reason in this or the previous round.
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
