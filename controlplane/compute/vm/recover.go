package vm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// RecoverEvery is the interval at which package leader calls Recover on the leader.
	RecoverEvery = time.Second
	// maxRecoveries is the maximum number of VMs that are being built and started after they lost their host. Further
	// VMs wait, so that the hosts that are left do not start all guests of the lost host at once.
	maxRecoveries = 20
	// rescanEvery is the time after which Recover reads the VMs of a lost host again. VMs may have become recoverable,
	// for example by a change of their metadata.
	rescanEvery = 10 * time.Second
	// priorityTime is the maximum time for which a VM that may be placed soon delays the placement of VMs with a lower
	// priority (see placeAgain). Without the delay, these VMs could use the last free capacity.
	priorityTime = 30 * time.Second
)

// Recover moves VMs from lost hosts to other hosts. It runs only on the leader. First it records for each lost host
// with VMs that are Recoverable that the host is fenced, and changes these VMs to PENDING. Then it places PENDING VMs
// in the order of their priority. It places a VM only when no lost host can write to its volumes. If more hosts will be
// lost soon (node.Service.MoreLost), a VM waits for at most node.GatherTime, because VMs of those hosts may have a
// higher priority. An error with one host or one VM does not delay the others.
func (s *Service) Recover(ctx context.Context) error {
	lost, err := s.opts.Nodes.Lost()
	if err != nil {
		return err
	}
	var failed error
	left := false
	for id := range s.scanned {
		if !slices.Contains(lost, id) {
			delete(s.scanned, id)
		}
	}
	for _, id := range lost {
		if now := s.opts.Store.Now(); now-s.scanned[id] >= rescanEvery.Milliseconds() {
			s.scanned[id] = now
			some, err := s.leaveHost(ctx, id)
			left, failed = left || some, errors.Join(failed, err)
		}
	}
	// The VMs that have just become PENDING are not in s.recoveries yet.
	if left {
		return failed
	}
	return errors.Join(failed, s.placePending(ctx))
}

// leaveHost changes the recoverable VMs of a lost host to PENDING. It returns whether it has changed any.
func (s *Service) leaveHost(ctx context.Context, id cloud.NodeID) (some bool, err error) {
	var due []cloud.VM
	var failed error
	var confirmed bool // a caller has confirmed that the host is off
	if err := s.opts.Store.View(ctx, func(v *store.View) error {
		due, failed = nil, nil
		fence, err := node.FenceOf(v, id)
		if err != nil {
			return err
		}
		confirmed = fence != nil && fence.Confirmed
		placed, _, err := node.PlacedVMs.List(v, 0, string(id))
		if err != nil {
			return err
		}
		for _, p := range placed {
			vm, err := recoverable(v, id, p, confirmed)
			if err != nil {
				failed = errors.Join(failed, fmt.Errorf("VM %s: %w", p.Path[1], err))
			} else if vm != nil {
				due = append(due, *vm)
			}
		}
		return nil
	}); err != nil || len(due) == 0 {
		return false, errors.Join(failed, err)
	}
	if !confirmed {
		if fenced, err := s.opts.Nodes.FenceLost(ctx, id); err != nil || !fenced {
			return false, errors.Join(failed, err)
		}
	}
	slices.SortFunc(due, byPriority)
	for _, one := range due {
		left := false
		if _, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			vm, err := VMs.Get(tx, string(one.Project), string(one.ID))
			if err != nil || vm == nil || vm.Node != id || vm.Recoverable(true) != "" {
				return err
			}
			left = true
			return s.leaveLostHost(tx, vm)
		}); err != nil {
			failed = errors.Join(failed, fmt.Errorf("VM %s: %w", one.ID, err))
		} else if left {
			some = true
			s.opts.Log.Warn("a VM has lost its host", "vm", one.ID, "name", one.Name, "node", id)
		}
	}
	return some, failed
}

// recoverable returns the VM of the Placed record p on the host id if the control plane may by itself start the VM on
// another host. Otherwise it returns nil. The parameter confirmed is true if a caller has confirmed that the host is off.
func recoverable(r store.Reader, id cloud.NodeID, p store.Record[node.Placed], confirmed bool) (*cloud.VM, error) {
	if p.Value.Gone {
		return nil, nil
	}
	vm, err := VMs.Get(r, string(p.Value.Project), p.Path[1])
	if err != nil || vm == nil || vm.Node != id || vm.Recoverable(confirmed) != "" {
		return nil, err
	}
	why, err := immovable(r, vm)
	if err != nil || why != "" {
		return nil, err
	}
	return vm, nil
}

// immovable returns "" if all disks of a VM can be used on other hosts, and the VM has no other state on its host.
// Otherwise it returns the reason, as the predicate of a sentence whose subject is the VM.
func immovable(r store.Reader, vm *cloud.VM) (string, error) {
	for _, d := range vm.Spec.Disks {
		if d.Volume == "" {
			return "has the disk " + d.ID + ", which is on its host only", nil
		}
	}
	if why := vm.StateOnHost(); why != "" {
		return why, nil
	}
	return volume.Immovable(r, vm.Tenant(), vm.Spec.Volumes())
}

// errNotFenced returns the error for a VM that may still run on its host.
func errNotFenced(vm *cloud.VM) error {
	return fault.New(fault.FailedPrecondition, "VM %s may still run on its host %s: if the host is lost, an operator must confirm that it is off (`trivet host fence`)",
		vm.Name, vm.Node).WithReason("HOST_NOT_FENCED")
}

// leaveLostHost changes a VM to PENDING, without a host. Its host must be Unresponsive and have a Fence record in tx. If
// no caller has confirmed that the host is off, the host must have confirmed that it powers the VM off when its lease
// ends. The VM's disks must be movable. The host is told to destroy the VM when it answers again. Until then, the
// capacity that the VM may still use on the host stays allocated.
func (s *Service) leaveLostHost(tx *store.Tx, vm *cloud.VM) error {
	fence, err := node.FenceOf(tx, vm.Node)
	if err != nil {
		return err
	}
	confirmed := fence != nil && (fence.Confirmed || vm.Status.StopsWithLease || mutant.On(mutant.RecoverUnconfirmed))
	if !confirmed || !s.opts.Nodes.Unresponsive(vm.Node) {
		return errNotFenced(vm)
	}
	why, err := immovable(tx, vm)
	if err != nil {
		return err
	}
	if why != "" {
		return fault.New(fault.FailedPrecondition, "VM %s cannot get another host: it %s", vm.Name, why).WithReason("DISK_ON_HOST")
	}
	return s.leaveHostWith(tx, vm, vm.LoseHost)
}

// leaveHostWith calls leave, which changes a VM to PENDING, without a host, and changes all records that depend on the
// VM's host. The VM must have no process on the host that can write to its volumes, and its disks must be movable.
func (s *Service) leaveHostWith(tx *store.Tx, vm *cloud.VM, leave func(now cloud.Time) error) error {
	lost, generation, held := vm.Node, vm.Generation, vm.Reserved()
	if err := leave(tx.Now()); err != nil {
		return err
	}
	node.PlacedVMs.Put(tx, &node.Placed{
		Project: vm.Project, Generation: vm.Generation, Gone: true, Held: held,
	}, string(lost), string(vm.ID))
	joinGroups(tx, vm)
	if err := releaseQuota(tx, vm, held); err != nil {
		return err
	}
	if err := volume.EndLostAttachments(tx, vm.Tenant(), vm.ID, vm.Spec.Volumes()); err != nil {
		return err
	}
	return s.save(tx, vm, generation)
}

// byPriority orders VMs by priority, the highest first, and by the time of their creation.
func byPriority(a, b cloud.VM) int {
	return cmp.Or(cmp.Compare(b.Priority(), a.Priority()), cmp.Compare(a.ID, b.ID))
}

// placePending places PENDING VMs, as far as maxRecoveries and priorityTime allow. For a VM that must wait, it writes the
// reason to the VM's record.
func (s *Service) placePending(ctx context.Context) error {
	s.mu.Lock()
	pending := make([]recovery, 0, len(s.recoveries))
	busy := 0
	for _, r := range s.recoveries {
		if r.pending {
			pending = append(pending, r)
		} else {
			busy++
		}
	}
	s.mu.Unlock()
	if len(pending) == 0 {
		return nil
	}
	var vms []cloud.VM
	if err := s.opts.Store.View(ctx, func(v *store.View) error {
		vms = nil
		for _, r := range pending {
			vm, err := VMs.Get(v, string(r.project), string(r.id))
			if err != nil {
				return err
			}
			if vm != nil && vm.State == cloud.Pending {
				vms = append(vms, *vm)
			}
		}
		return nil
	}); err != nil {
		return err
	}
	slices.SortFunc(vms, byPriority)
	var failed error
	more := s.opts.Nodes.MoreLost()
	waits := func(vm *cloud.VM, milliseconds int64) bool {
		return vm.Recovery != nil && s.opts.Store.Now()-vm.Recovery.Began < milliseconds
	}
	var first *cloud.VM // the VM with the highest priority of those that wait for a short time
	for _, one := range vms {
		if busy >= maxRecoveries || first != nil && one.Priority() < first.Priority() {
			break
		}
		if more && waits(&one, node.GatherTime) {
			first = cmp.Or(first, &one)
			continue
		}
		placed, soon, err := s.placeAgain(ctx, &one)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("VM %s: %w", one.ID, err))
		}
		switch {
		case placed:
			busy++
		case soon && waits(&one, priorityTime.Milliseconds()):
			first = cmp.Or(first, &one)
		}
	}
	return failed
}

// placeAgain places one PENDING VM, or records in the VM the reason why the VM must wait. The result soon is true if
// the VM may be placed soon: its volumes are attached to its former host, or hosts have not sent the new leader a
// heartbeat yet, or the records could not be read or written.
func (s *Service) placeAgain(ctx context.Context, one *cloud.VM) (placed, soon bool, err error) {
	var wait string
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		placed, soon, wait = false, false, ""
		vm, err := VMs.Get(tx, string(one.Project), string(one.ID))
		if err != nil || vm == nil || vm.State != cloud.Pending {
			return err
		}
		if wait, err = volume.Waiting(tx, vm.Tenant(), vm.Spec.Volumes()); err != nil || wait != "" {
			soon = wait != ""
			return err
		}
		placed = true
		return s.moveRecords(tx, vm)
	})
	var refused *fault.Fault
	var retryable *retryableRefusal
	switch {
	case err == nil && wait == "":
		return placed, false, nil
	case err == nil:
	case errors.As(err, &retryable):
		return false, true, nil
	case errors.As(err, &refused):
		if s.beginsToWait(one.ID) {
			s.placements.countRefusal(err)
		}
		wait = "waits for a host: " + refused.Message
	default:
		return false, true, err
	}
	wait = "the VM " + truncate(wait, maxLastError)
	if one.Status.LastError == wait {
		return false, soon, nil
	}
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		vm, err := VMs.Get(tx, string(one.Project), string(one.ID))
		if err != nil || vm == nil || vm.State != cloud.Pending || vm.Status.LastError == wait {
			return err
		}
		vm.Status.LastError = wait
		return s.save(tx, vm, vm.Generation)
	})
	return false, soon, err
}

// moveRecords chooses a host for a PENDING VM, and changes all records that name the VM's host.
func (s *Service) moveRecords(tx *store.Tx, vm *cloud.VM) error {
	images := map[cloud.ImageID]*image.Usable{}
	for _, id := range vm.Images() {
		i, err := lookupImage(tx, vm.Org, id, true)
		if err != nil {
			return err
		}
		images[id] = i
	}
	needs, err := volume.PlacementOf(tx, vm.Tenant(), vm.Spec.Volumes())
	if err != nil {
		return err
	}
	generation := vm.Generation
	if err := s.place(tx, vm, images, &needs); err != nil {
		return err
	}
	if err := vm.PlaceOn(vm.Node, tx.Now()); err != nil {
		return err
	}
	for _, d := range vm.Spec.Disks {
		if err := volume.Attach(tx, vm.Tenant(), d.Volume, vm.ID, d.ID, vm.Node); err != nil {
			return err
		}
	}
	if err := network.MoveNICs(tx, vm.Tenant(), vm.ID, vm.Node, vm.Name); err != nil {
		return err
	}
	joinGroups(tx, vm)
	return s.save(tx, vm, generation)
}

// recovery is a VM that has lost its host and is not as it should be on another one yet.
type recovery struct {
	project cloud.ProjectID
	id      cloud.VMID
	pending bool // the VM has no host
	waiting bool // the VM is pending, and this leader has found no host for it
}

// beginsToWait records that this leader has found no host for a VM. It returns false if it has found none before, since
// the VM lost its last host.
func (s *Service) beginsToWait(id cloud.VMID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, known := s.recoveries[id]
	if !known || r.waiting {
		return false
	}
	r.waiting = true
	s.recoveries[id] = r
	return true
}

// trackRecovery keeps s.recoveries equal to the records of VMs that have lost their host. The caller must hold s.mu.
func (s *Service) trackRecovery(vm *deadlineFields) {
	if vm.Recovery == nil && vm.State != cloud.Pending {
		delete(s.recoveries, vm.ID)
		return
	}
	pending := vm.State == cloud.Pending
	s.recoveries[vm.ID] = recovery{vm.Project, vm.ID, pending, pending && s.recoveries[vm.ID].waiting}
}
