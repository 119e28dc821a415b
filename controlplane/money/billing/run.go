package billing

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Limits of one Run. The next Run continues with the rest.
const (
	// maxMeters is the approximate maximum number of meters (records that count a VM's hours) that one Run updates.
	// meterPage is the maximum in one transaction.
	maxMeters = 10_000
	meterPage = 64
	// maxProjects is the maximum number of projects that one Run charges, and maxPayments the maximum number of
	// transactions in total in which it does so.
	maxProjects = 1000
	maxPayments = 1000
	// comparePage is the maximum number of VMs, and also the maximum number of meters, that one Run compares.
	comparePage = 500
)

// Every returns the pause between two calls of Run: a tenth of a billed hour, at least 200 ms and at most 10 s. An hour
// is charged at most this long after it began, except when Run reaches one of its limits.
func (s *Service) Every() time.Duration {
	return min(10*time.Second, max(s.opts.Rules.Hour/10, 200*time.Millisecond))
}

// Run counts the hours that have begun, charges them, and repairs each meter that does not match its VM. Package leader
// calls Run periodically on the leader. The calls must not overlap. If billing is disabled, Run only counts hours and
// makes no bills.
func (s *Service) Run(ctx context.Context) error {
	failed := s.count(ctx)
	if s.opts.Rules.Enabled && ctx.Err() == nil {
		failed = errors.Join(failed, s.collect(ctx), s.compare(ctx), s.compareVolumes(ctx))
	}
	return failed
}

// count updates the meters of VMs whose next hour has begun, and stores the bills for these hours.
func (s *Service) count(ctx context.Context) error {
	var after []string
	for moved := 0; moved < maxMeters && ctx.Err() == nil; moved += meterPage {
		var rows []store.Record[struct{}]
		var more bool
		now := number(s.opts.Store.Now())
		err := s.opts.Store.Local(func(v *store.View) (err error) {
			rows, more, err = page(v, next, meterPage, after)
			return err
		})
		if err != nil {
			return err
		}
		for i, r := range rows {
			if r.Path[0] > now {
				rows, more = rows[:i], false
				break
			}
		}
		if len(rows) == 0 {
			return nil
		}
		if err := s.move(ctx, rows); err != nil {
			return fmt.Errorf("count hours: %w", err)
		}
		if !more {
			return nil
		}
		after = rows[len(rows)-1].Path
	}
	return ctx.Err()
}

// page returns up to size records of a table. If the parameter named after is nil, they are the first records, and
// otherwise those that follow the path in it. The bool is true if there are further records.
func page[T any](v *store.View, t store.Table[T], size int, after []string) ([]store.Record[T], bool, error) {
	if after == nil {
		return t.List(v, size)
	}
	return t.ListAfter(v, size, after)
}

// afterProject returns the path in the table owed after which the bills of the next project follow. In the path of a
// bill, hexadecimal digits follow the project ID, and "g" sorts after all of them.
func afterProject(id string) []string { return []string{id, "g"} }

// move counts the hours up to now for the VMs of some records of the table next, in one transaction.
func (s *Service) move(ctx context.Context, rows []store.Record[struct{}]) error {
	var long []string
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		long = nil
		for _, r := range rows {
			m, err := meters.Get(tx, r.Path[1], r.Path[2])
			if err != nil {
				return err
			}
			if m == nil || number(m.Until) != r.Path[0] {
				next.Delete(tx, r.Path...) // the meter has been updated meanwhile, so this record is out of date
				continue
			}
			was := *m
			b := m.Pass(tx.Now(), s.terms)
			if b != nil && b.Hours > 24 {
				long = append(long, fmt.Sprintf("%s: %d", b.VM, b.Hours))
			}
			if err := s.put(tx, &was, m, b); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && len(long) > 0 && s.opts.Rules.Enabled {
		s.opts.Log.Warn("more than a day is billed at once: was there no leader, or did the clock jump?", "hours", long)
	}
	return err
}

// collect charges projects for their unpaid bills. A project that cannot pay does not delay the others.
func (s *Service) collect(ctx context.Context) error {
	var failed error
	payments := 0
	for range maxProjects {
		if payments >= maxPayments || ctx.Err() != nil {
			return errors.Join(failed, ctx.Err())
		}
		var project cloud.ProjectID
		err := s.opts.Store.Local(func(v *store.View) error {
			first, _, err := page(v, owed, 1, s.payFrom)
			if len(first) > 0 {
				project = cloud.ProjectID(first[0].Path[0])
			}
			return err
		})
		if err != nil {
			return errors.Join(failed, err)
		}
		if project == "" {
			s.payFrom = nil
			s.debtors.round()
			return failed
		}
		for again := true; again && payments < maxPayments; payments++ {
			if again, err = s.pay(ctx, project); err != nil {
				failed = errors.Join(failed, fmt.Errorf("charge project %s: %w", project, err))
				again = false
			}
		}
		s.payFrom = afterProject(string(project))
	}
	return failed
}

// compare compares the next page of VMs with their meters, and the next page of meters with their VMs and volumes.
// Meters are the records that count the hours. compare repairs each mismatch: a VM without a meter, a meter without a
// VM or volume, or a meter that has other resources than its VM uses.
func (s *Service) compare(ctx context.Context) error {
	var odd []cloud.VMID
	var of []cloud.ProjectID
	var lost []*Meter // meters of volumes that do not exist
	err := s.opts.Store.Local(func(v *store.View) error {
		vms, more, err := page(v, vm.VMs, comparePage, s.vmFrom)
		if err != nil {
			return err
		}
		s.vmFrom = nextPosition(vms, more)
		for _, r := range vms {
			m, err := meters.Get(v, r.Path...)
			if err != nil {
				return err
			}
			if m == nil || m.Use != UseOf(r.Value) {
				odd, of = append(odd, r.Value.ID), append(of, r.Value.Project)
			}
		}
		all, more, err := page(v, meters, comparePage, s.meterFrom)
		if err != nil {
			return err
		}
		s.meterFrom = nextPosition(all, more)
		for _, r := range all {
			if r.Value.Volume {
				has, err := volume.Volumes.Has(v, r.Path...)
				if err != nil {
					return err
				}
				if !has {
					lost = append(lost, r.Value)
				}
				continue
			}
			has, err := vm.VMs.Has(v, r.Path...)
			if err != nil {
				return err
			}
			if !has {
				odd, of = append(odd, r.Value.VM), append(of, r.Value.Project)
			}
		}
		return nil
	})
	for i, id := range odd {
		if err != nil {
			break
		}
		_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error { return s.repair(tx, of[i], id) })
	}
	for _, m := range lost {
		if err != nil {
			break
		}
		_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error { return s.repairVolume(tx, m.Project, m.VM) })
	}
	if err != nil {
		return fmt.Errorf("compare VMs and meters: %w", err)
	}
	return nil
}

// nextPosition returns the path after which the next page begins. After the last page it returns nil, so that the next
// page is the first one of the table.
func nextPosition[T any](page []store.Record[T], more bool) []string {
	if !more {
		return nil
	}
	return page[len(page)-1].Path
}

// repair creates, updates or deletes the meter of a VM, the record that counts the VM's hours, so that it matches the
// VM's record. The time in which the VM had no meter is not billed.
func (s *Service) repair(tx *store.Tx, p cloud.ProjectID, id cloud.VMID) error {
	m, err := meters.Get(tx, string(p), string(id))
	if err != nil {
		return err
	}
	machine, err := vm.VMs.Get(tx, string(p), string(id))
	switch {
	case err != nil || machine == nil && m == nil:
		return err
	case machine == nil:
		if err := s.release(tx, m, "is gone"); err != nil {
			return err
		}
		deleteMeter(tx, m)
		return nil
	case m == nil:
		m = &Meter{Org: machine.Org, Project: p, VM: id, Name: machine.Name, Until: tx.Now()}
		if err := s.put(tx, m, m); err != nil {
			return err
		}
	}
	return s.Changed(tx, machine)
}
