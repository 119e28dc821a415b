package vm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/compute/drain"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// settleDrained records the results of those migrations that the drain of a host has begun and that have ended.
func (s *Service) settleDrained(ctx context.Context, id cloud.NodeID) error {
	var due []cloud.VMID
	if err := s.opts.Store.Local(func(v *store.View) error {
		all, _, err := node.DrainedVMs.List(v, 0, string(id))
		if err != nil {
			return err
		}
		for _, r := range all {
			if r.Value.Attempt == 0 {
				continue
			}
			vm, err := VMs.Get(v, string(r.Value.Project), r.Path[1])
			if err != nil {
				return err
			}
			if vm == nil || vm.Migration == nil || vm.Migration.Attempt != r.Value.Attempt {
				due = append(due, cloud.VMID(r.Path[1]))
			}
		}
		return nil
	}); err != nil {
		return err
	}
	var failed error
	for _, vm := range due {
		_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error { return settleOne(tx, id, vm) })
		failed = errors.Join(failed, err)
	}
	return failed
}

// settleOne records the result of one migration that has ended.
func settleOne(tx *store.Tx, host cloud.NodeID, id cloud.VMID) error {
	e, err := node.DrainedVMs.Get(tx, string(host), string(id))
	if err != nil || e == nil || e.Attempt == 0 {
		return err
	}
	vm, err := VMs.Get(tx, string(e.Project), string(id))
	switch {
	case err != nil:
		return err
	case vm == nil: // it was deleted
		node.DrainedVMs.Delete(tx, string(host), string(id))
		return nil
	case vm.Migration != nil && vm.Migration.Attempt == e.Attempt:
		return nil
	}
	last := vm.LastMigration
	switch {
	case last != nil && last.Attempt == e.Attempt && !last.Moved:
		countFailure(e, last.Reason, last.Target, tx.Now())
	case hasLeft(vm, e, host):
		e.Moved, e.To, e.Error, e.ShutDown = true, vm.Node, "", false
	}
	e.Attempt = 0
	node.DrainedVMs.Put(tx, e, string(host), string(id))
	return nil
}

// countFailure records a failed try to move a VM, and when the VM is tried again.
func countFailure(e *node.DrainedVM, why string, target cloud.NodeID, now cloud.Time) {
	e.Tries++
	e.Error, e.Avoid = truncate(why, maxLastError), target
	e.Next = now + drain.RetryAfter(e.Tries).Milliseconds()
}

// drainedVM returns the DrainedVM record of a VM, or a new one if there is none.
func drainedVM(tx *store.Tx, host cloud.NodeID, vm *cloud.VM) (*node.DrainedVM, error) {
	e, err := node.DrainedVMs.Get(tx, string(host), string(vm.ID))
	if err == nil && e == nil {
		e = &node.DrainedVM{Org: vm.Org, Project: vm.Project, Name: vm.Name}
	}
	return e, err
}

// drainedNow returns the VM with its DrainedVM record if the host is still being drained and is the VM's host, and
// otherwise nil.
func drainedNow(tx *store.Tx, host cloud.NodeID, seen *cloud.VM) (*cloud.VM, *node.DrainedVM, *cloud.Node, error) {
	n, err := node.Nodes.Get(tx, string(host))
	if err != nil || n == nil || !n.Draining() {
		return nil, nil, nil, err
	}
	vm, err := VMs.Get(tx, string(seen.Project), string(seen.ID))
	if err != nil || vm == nil || vm.Node != host {
		return nil, nil, nil, err
	}
	e, err := drainedVM(tx, host, vm)
	return vm, e, n, err
}

// errFitsLater means that a VM could be moved to a host that now receives as many VMs as it may.
var errFitsLater = errors.New("all hosts that fit receive other VMs")

// moveDrained begins the migration of a VM away from a drained host. If that is not possible, it records why. If all hosts
// that fit receive as many VMs as they may, this is no failed try, but the VM is tried again only after drain.RetryBusy,
// so that other VMs are tried meanwhile. The parameter arriving is changed with each migration.
func (s *Service) moveDrained(ctx context.Context, host cloud.NodeID, seen *cloud.VM, arriving map[cloud.NodeID]int) error {
	busy := map[cloud.NodeID]string{}
	for id, n := range arriving {
		if n >= drain.MaxArriving {
			busy[id] = "is receiving other VMs"
		}
	}
	var target cloud.NodeID
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		target = ""
		vm, e, _, err := drainedNow(tx, host, seen)
		if err != nil || vm == nil || vm.State != cloud.Running {
			return err
		}
		if err := s.beginDrainMigration(tx, vm, e.Avoid, busy); err != nil {
			return err
		}
		target, e.Attempt = vm.Migration.Target, vm.Migration.Attempt
		node.DrainedVMs.Put(tx, e, string(host), string(vm.ID))
		return nil
	})
	var retryable *retryableRefusal
	refused, ok := fault.From(err)
	switch {
	case err == nil:
		if target != "" {
			arriving[target]++
		}
		return nil
	case errors.As(err, &retryable): // hosts have not sent the new leader a heartbeat yet
		return nil
	case !ok || refused.Kind != fault.ResourceExhausted && refused.Kind != fault.FailedPrecondition && refused.Kind != fault.NotFound:
		return err
	case refused.Reason == reasonNoHostFits && len(busy) > 0:
		// The transaction is always aborted: it only finds out whether the VM fits on a busy host.
		_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			vm, e, _, err := drainedNow(tx, host, seen)
			if err != nil || vm == nil {
				return cmp.Or(err, errFitsLater)
			}
			return cmp.Or(s.beginDrainMigration(tx, vm, e.Avoid, map[cloud.NodeID]string{}), errFitsLater)
		})
		if refused, ok = fault.From(err); !ok && !errors.Is(err, errFitsLater) {
			return err
		}
	}
	refusal, first := err, false
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		vm, e, n, err := drainedNow(tx, host, seen)
		if err != nil || vm == nil {
			return err
		}
		if first = e.Tries == 0; refused != nil {
			countFailure(e, refusalText(refused, n.Name), "", tx.Now())
		} else {
			e.Next = tx.Now() + drain.RetryBusy.Milliseconds()
		}
		node.DrainedVMs.Put(tx, e, string(host), string(vm.ID))
		return nil
	})
	if err == nil && first {
		s.placements.countRefusal(refusal)
	}
	return err
}

// refusalText returns the message of a refused migration. If it says why no host fits, the text names up to three hosts
// other than the drained one, whose own reason is of no use.
func refusalText(f *fault.Fault, drained string) string {
	if _, listed := f.Details[drained]; f.Reason != reasonNoHostFits || !listed {
		return f.Message
	}
	var reasons []string
	for _, host := range slices.Sorted(maps.Keys(f.Details)) {
		if host != drained {
			reasons = append(reasons, fmt.Sprint(host, " ", f.Details[host]))
		}
	}
	switch n := len(reasons); {
	case n == 0:
		return "no host fits: the cloud has no other host"
	case n > 3:
		reasons = append(reasons[:3], fmt.Sprintf("and %d more hosts", n-3))
	}
	return "no host fits: " + strings.Join(reasons, "; ")
}

// beginDrainMigration begins the migration of a VM to a host that is not in busy. It prefers hosts other than avoid, to
// which the last migration of the VM has failed.
func (s *Service) beginDrainMigration(tx *store.Tx, vm *cloud.VM, avoid cloud.NodeID, busy map[cloud.NodeID]string) error {
	if avoid == "" || busy[avoid] != "" {
		return s.beginMigration(tx, vm, "", 0, busy)
	}
	busy[avoid] = "did not receive the VM in the last try"
	err := s.beginMigration(tx, vm, "", 0, busy)
	delete(busy, avoid)
	if f, ok := fault.From(err); ok && f.Reason == reasonNoHostFits {
		return s.beginMigration(tx, vm, "", 0, busy)
	}
	return err
}

// shutDownDrained requests that a VM that cannot be moved is shut down, as Stop does.
func (s *Service) shutDownDrained(ctx context.Context, host cloud.NodeID, seen *cloud.VM) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		vm, e, n, err := drainedNow(tx, host, seen)
		if err != nil || vm == nil || !n.Drain.Force || vm.State != cloud.Running && vm.State != cloud.Error {
			return err
		}
		obstacle, err := migrationObstacle(tx, vm, n)
		if err != nil {
			return err
		}
		generation := vm.Generation
		if err := vm.Stop(cloud.DefaultStop, tx.Now()); err != nil {
			return err
		}
		e.ShutDown = true
		e.Error = cmp.Or(e.Error, obstacle)
		node.DrainedVMs.Put(tx, e, string(host), string(vm.ID))
		return s.save(tx, vm, generation)
	})
	if err == nil {
		s.opts.Log.Info("a VM that cannot be moved from a drained host is shut down", "vm", seen.ID, "node", host)
	}
	return err
}

// cancelArrival cancels the migration of a VM to a drained host. After the switchover the migration goes on, and the VM
// is moved when it has ended.
func (s *Service) cancelArrival(ctx context.Context, host cloud.NodeID, seen *cloud.VM) error {
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		vm, err := VMs.Get(tx, string(seen.Project), string(seen.ID))
		if err != nil || vm == nil || vm.Migration == nil || vm.Migration.Target != host {
			return err
		}
		generation := vm.Generation
		if err := s.abortMigration(tx, vm); err != nil {
			if f, ok := fault.From(err); ok && f.Reason == ReasonAtSwitchover {
				return nil
			}
			return err
		}
		return s.saveMigration(tx, vm, generation)
	})
	return err
}
