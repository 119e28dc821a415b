package vm

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/compute/drain"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// DrainProgress is the drain of a host with the VMs that it concerns.
type DrainProgress struct {
	// Drain is nil if the host was not drained since it was last uncordoned.
	Drain *cloud.Drain
	// BootID is cloud.Node.BootID.
	BootID string
	// VMs has first the VMs that are on the host, in the order in which they are moved, and then those that have left.
	VMs []DrainedVM
}

// DrainedVM is a VM in the progress of a drain.
type DrainedVM struct {
	ID      cloud.VMID
	Name    string
	Org     cloud.OrgID
	Project cloud.ProjectID
	Status  drain.Status
	// Reason explains the status. It can be empty.
	Reason string
	// Tries is the number of failed tries to move the VM.
	Tries int
	// To is the host to which the VM is being moved or was moved, and ToName its name.
	To     cloud.NodeID
	ToName string
	// TotalBytes and SentBytes are the progress of the VM's migration. They are 0 if it is not known.
	TotalBytes, SentBytes uint64
}

// GetDrain returns the progress of the drain of a host. The caller must already be authorized.
func (s *Service) GetDrain(ctx context.Context, id cloud.NodeID) (DrainProgress, error) {
	if err := cloud.CheckUUID("node_id", string(id)); err != nil {
		return DrainProgress{}, err
	}
	return getDrainCommand.Call(ctx, s.opts.Commands, id)
}

var getDrainCommand = leader.NewCommand("vm.get-drain", leader.Repeatable, (*Service).getDrainOnLeader)

func (s *Service) getDrainOnLeader(ctx context.Context, id cloud.NodeID) (out DrainProgress, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		out = DrainProgress{}
		n, err := node.Nodes.Get(v, string(id))
		if err == nil && n == nil {
			err = fault.New(fault.NotFound, "no node %s", id)
		}
		if err != nil {
			return err
		}
		out.BootID = n.BootID
		d, err := s.readDrained(v, id)
		if err != nil || d == nil {
			return err
		}
		out.Drain = d.host.Drain
		out.VMs, err = s.describeDrained(v, d)
		return err
	})
	return out, err
}

// describeDrained returns the VMs of a drain as DrainProgress shows them.
func (s *Service) describeDrained(v *store.View, d *drained) (out []DrainedVM, err error) {
	name := func(id cloud.NodeID) string {
		n, failed := node.Nodes.Get(v, string(id))
		if err = cmp.Or(err, failed); n == nil {
			return ""
		}
		return n.Name
	}
	tries := map[cloud.VMID]drain.VM{}
	for _, one := range d.vms {
		tries[one.ID] = one
	}
	now, here := s.opts.Store.Now(), map[cloud.VMID]bool{}
	for _, one := range d.plan(now).Decisions {
		vm, e := d.byID[one.VM], d.entries[one.VM]
		if vm == nil || vm.Node != d.host.ID && vm.Migration == nil {
			continue // it has left
		}
		here[one.VM] = true
		say := DrainedVM{ID: vm.ID, Name: vm.Name, Org: vm.Org, Project: vm.Project, Status: one.Status, Reason: one.Reason, Tries: tries[vm.ID].Tries}
		if wait := tries[vm.ID].Next - now; wait > 0 && say.Tries > 0 && say.Tries < drain.MaxTries && tries[vm.ID].Activity == drain.Running {
			say.Reason += fmt.Sprintf(" (%d failed attempts, next in %d s)", say.Tries, (wait+999)/1000)
		}
		switch {
		case e == nil || !e.ShutDown:
		case one.Status == drain.Stays:
			say.Status, say.Reason = drain.ShutDownDone, e.Error
		case vm.State == cloud.Stopping:
			say.Status = drain.ShuttingDown
		}
		if m := vm.Migration; m != nil && one.Status == drain.Moving {
			say.To, say.ToName = m.Target, name(m.Target)
			s.mu.Lock()
			say.TotalBytes, say.SentBytes = s.progress[vm.ID].Total, s.progress[vm.ID].Sent
			s.mu.Unlock()
		}
		out = append(out, say)
	}
	left := len(out)
	for id, e := range d.entries {
		if here[id] {
			continue
		}
		moved := e.Moved
		if !moved && e.Attempt != 0 {
			vm, failed := VMs.Get(v, string(e.Project), string(id))
			err = cmp.Or(err, failed)
			moved = hasLeft(vm, e, d.host.ID)
		}
		if !moved {
			continue
		}
		say := DrainedVM{ID: id, Name: e.Name, Org: e.Org, Project: e.Project, Status: drain.Moved, Tries: e.Tries, To: e.To}
		if e.To == "" { // it was relocated
			vm, failed := VMs.Get(v, string(e.Project), string(id))
			if err = cmp.Or(err, failed); vm == nil {
				continue
			}
			if say.To = vm.Node; say.To == "" {
				say.Status, say.Reason = drain.Moving, vm.Status.LastError
			}
		}
		say.ToName = name(say.To)
		out = append(out, say)
	}
	slices.SortFunc(out[left:], func(a, b DrainedVM) int { return cmp.Compare(a.ID, b.ID) })
	return out, err
}

// hasLeft reports whether the migration attempt that e records has moved vm away from host. It is true even if
// settleDrained has not recorded the move yet.
func hasLeft(vm *cloud.VM, e *node.DrainedVM, host cloud.NodeID) bool {
	if vm == nil || vm.Node == host || vm.Migration != nil && vm.Migration.Attempt == e.Attempt {
		return false
	}
	last := vm.LastMigration
	return last == nil || last.Attempt != e.Attempt || last.Moved
}
