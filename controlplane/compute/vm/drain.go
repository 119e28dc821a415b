package vm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/drain"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// DrainEvery is the interval at which package leader calls StepDrains on the leader.
const DrainEvery = time.Second

// ReasonInMaintenance is the reason in the error of Start if the VM's host is in maintenance, and ReasonDraining if the
// host is drained with force.
const (
	ReasonInMaintenance = "NODE_IN_MAINTENANCE"
	ReasonDraining      = "NODE_DRAINING"
)

// checkMaintenance returns FailedPrecondition if the VM's host is in maintenance, or is being drained with force. A
// drain with force shuts VMs down. It would never end if a user could start such a VM again each time. The transaction
// conflicts with a change of the host's record, so the host cannot enter maintenance while the VM is being started.
func checkMaintenance(tx *store.Tx, vm *cloud.VM) error {
	if vm.Node == "" || mutant.On(mutant.StartInMaintenance) {
		return nil
	}
	n, err := node.Nodes.Get(tx, string(vm.Node))
	if err != nil || n == nil {
		return err
	}
	if n.Draining() && n.Drain.Force {
		return fault.New(fault.FailedPrecondition, "cannot start VM %s: an operator is draining its host %s with force; try again when the maintenance has ended", vm.Name, n.Name).
			WithReason(ReasonDraining)
	}
	if !n.InMaintenance() {
		return nil
	}
	return fault.New(fault.FailedPrecondition, "cannot start VM %s: its host %s is in maintenance; try again when the maintenance has ended", vm.Name, n.Name).
		WithReason(ReasonInMaintenance)
}

// StepDrains carries out the next steps of all drains: it records the results of migrations, begins further ones, and
// ends drains. It runs only on the leader. The state of a drain is in the records, so a new leader continues it. The
// failure of one step does not delay the others, which include those of other hosts.
func (s *Service) StepDrains(ctx context.Context) error {
	hosts := s.opts.Nodes.Draining()
	if len(hosts) == 0 {
		return nil
	}
	arriving, err := s.arriving()
	if err != nil {
		return err
	}
	for _, id := range hosts {
		err = errors.Join(err, s.stepDrain(ctx, id, arriving))
	}
	return err
}

// arriving returns, for each host, the number of VMs that are being migrated to it.
func (s *Service) arriving() (map[cloud.NodeID]int, error) {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.migrations))
	s.mu.Unlock()
	out := map[cloud.NodeID]int{}
	return out, s.opts.Store.Local(func(v *store.View) error {
		for _, one := range all {
			vm, err := VMs.Get(v, string(one.project), string(one.id))
			if err != nil {
				return err
			}
			if vm != nil && vm.Migration != nil {
				out[vm.Migration.Target]++
			}
		}
		return nil
	})
}

// stepDrain carries out the next steps of the drain of one host.
func (s *Service) stepDrain(ctx context.Context, id cloud.NodeID, arriving map[cloud.NodeID]int) (err error) {
	if err := s.settleDrained(ctx, id); err != nil {
		return err
	}
	var d *drained
	if err := s.opts.Store.Local(func(v *store.View) error {
		d, err = s.readDrained(v, id)
		return err
	}); err != nil || d == nil || !d.host.Draining() {
		return err
	}
	plan := d.plan(s.opts.Store.Now())
	for _, one := range plan.Decisions {
		switch vm := d.byID[one.VM]; one.Do {
		case drain.Move:
			err = errors.Join(err, s.moveDrained(ctx, id, vm, arriving))
		case drain.ShutDown:
			err = errors.Join(err, s.shutDownDrained(ctx, id, vm))
		case drain.Relocate:
			err = errors.Join(err, s.relocateDrained(ctx, id, vm))
		case drain.CancelArrival:
			err = errors.Join(err, s.cancelArrival(ctx, id, vm))
		}
	}
	switch {
	case plan.Empty:
		err = errors.Join(err, s.beginMaintenance(ctx, id))
	case plan.Expired:
		err = errors.Join(err, s.expireDrain(ctx, id, d.result(plan)))
	}
	return err
}

// drained is a host that is drained, with its VMs, as it is in one view of the records.
type drained struct {
	host *cloud.Node
	// vms has the VMs that are placed on the host, and those that the host has not removed yet.
	vms  []drain.VM
	byID map[cloud.VMID]*cloud.VM // without the VMs that were deleted
	// entries has the DrainedVM records of the host, also of VMs that have left the host.
	entries map[cloud.VMID]*node.DrainedVM
}

func (d *drained) plan(now cloud.Time) drain.Plan { return drain.Next(d.host.Drain, d.vms, now) }

// readDrained returns the host and its VMs. It returns nil if the host has no drain.
func (s *Service) readDrained(r store.Reader, id cloud.NodeID) (*drained, error) {
	n, err := node.Nodes.Get(r, string(id))
	if err != nil || n == nil || n.Drain == nil {
		return nil, err
	}
	out := &drained{host: n, byID: map[cloud.VMID]*cloud.VM{}, entries: map[cloud.VMID]*node.DrainedVM{}}
	entries, _, err := node.DrainedVMs.List(r, 0, string(id))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		out.entries[cloud.VMID(e.Path[1])] = e.Value
	}
	placed, _, err := node.PlacedVMs.List(r, 0, string(id))
	if err != nil {
		return nil, err
	}
	silent, agents := s.opts.Nodes.Unresponsive(id), new(poolAgents)
	for _, p := range placed {
		one := drain.VM{ID: cloud.VMID(p.Path[1]), Activity: drain.Removing, Why: "has moved; the host has not deleted its files yet"}
		vm, err := VMs.Get(r, string(p.Value.Project), string(one.ID))
		if err != nil {
			return nil, err
		}
		if vm != nil {
			out.byID[one.ID] = vm
		}
		if vm != nil && !p.Value.Gone {
			obstacle, err := migrationObstacle(r, vm, n)
			if err != nil {
				return nil, err
			}
			elsewhere, err := agents.obstacle(r, vm)
			if err != nil {
				return nil, err
			}
			temporary, err := volume.MigratableLater(r, vm.Tenant(), vm.Spec.Volumes())
			if err != nil {
				return nil, err
			}
			one.Activity, one.Why = drain.ActivityOf(vm, id, obstacle, elsewhere, temporary, silent)
			one.Priority = vm.Priority()
			if one.Portable, err = portable(r, vm); err != nil {
				return nil, err
			}
			if e := out.entries[one.ID]; e != nil {
				one.Tries, one.Next, one.Error, one.NoHost = e.Tries, e.Next, e.Error, e.NoHost
			}
		}
		out.vms = append(out.vms, one)
	}
	return out, nil
}

// maxNamedVMs is the maximum number of VMs that the result of a drain names.
const maxNamedVMs = 5

// result returns the text for the result of a drain that has not emptied the host in time.
func (d *drained) result(plan drain.Plan) string {
	var named []string
	n := 0
	left := map[cloud.VMID]bool{}
	for _, vm := range d.vms {
		left[vm.ID] = vm.Activity == drain.Removing
	}
	for _, one := range plan.Decisions {
		if one.Status == drain.Stays || left[one.VM] {
			continue
		}
		if n++; n > maxNamedVMs {
			continue
		}
		name := string(one.VM)
		if vm := d.byID[one.VM]; vm != nil {
			name = vm.Name
		}
		text := name + " is not moved yet"
		if one.Reason != "" {
			text = name + " " + one.Reason
		}
		named = append(named, truncate(text, 200))
	}
	if n > maxNamedVMs {
		named = append(named, fmt.Sprintf("and %d more", n-maxNamedVMs))
	}
	if n == 0 {
		return "timeout: the host has not deleted the files of VMs that have left it"
	}
	return fmt.Sprintf("timeout: %d VMs are still on the host: %s", n, strings.Join(named, "; "))
}

// beginMaintenance ends the drain of a host on which no VM runs. It reads all records again in its transaction, so that
// no VM can be started or placed there at the same time.
func (s *Service) beginMaintenance(ctx context.Context, id cloud.NodeID) error {
	begun := false
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		d, err := s.readDrained(tx, id)
		if begun = err == nil && d != nil && d.host.Draining() && d.plan(tx.Now()).Empty; !begun {
			return err
		}
		d.host.EndDrain(cloud.DrainEmpty, "no VM runs on the host", tx.Now())
		node.Nodes.Put(tx, d.host, string(id))
		return nil
	})
	if err == nil && begun {
		s.opts.Log.Info("a drained host is in maintenance", "node", id)
	}
	return err
}

// expireDrain ends a drain whose deadline has passed. The host stays cordoned.
func (s *Service) expireDrain(ctx context.Context, id cloud.NodeID, result string) error {
	expired := false
	_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		expired = false
		n, err := node.Nodes.Get(tx, string(id))
		if err != nil || n == nil || !n.Draining() || tx.Now() < n.Drain.Deadline {
			return err
		}
		n.EndDrain(cloud.DrainIncomplete, result, tx.Now())
		node.Nodes.Put(tx, n, string(id))
		expired = true
		return nil
	})
	if err == nil && expired {
		s.opts.Log.Warn("a drain has not emptied its host in time", "node", id, "result", result)
	}
	return err
}
