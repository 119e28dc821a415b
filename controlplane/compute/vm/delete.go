package vm

import (
	"context"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// powerOffWait is how long a forced Delete waits for the host to report that it has destroyed the VM.
const powerOffWait = 10 * time.Second

type deleteRequest struct {
	Tenant cloud.Tenant
	VM     cloud.VMID
	Force  bool
	Body   [32]byte
}

type deleteResponse struct {
	Node cloud.NodeID
	// Away is true if the host does not respond. The host will destroy the VM when it connects again.
	Away bool
	// Replayed means that an earlier call with the same idempotency key deleted the VM. It is not part of the response
	// that is stored under the key.
	Replayed bool
}

// Delete deletes a VM's record and all records that belong to it. Without force, it refuses to delete a VM that is
// powered on or whose host does not respond. With force, it also deletes such a VM, and waits up to powerOffWait until
// the host has destroyed it, unless the caller prefers rpc.RespondAsync. replayed reports whether an earlier call with the same idempotency key deleted the VM.
func (s *Service) Delete(ctx context.Context, t cloud.Tenant, id cloud.VMID, force bool, body [32]byte) (replayed bool, err error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return false, err
	}
	response, err := deleteCommand.Call(ctx, s.opts.Commands, deleteRequest{t, id, force, body})
	if err != nil || !force || response.Node == "" || response.Away || rpc.RespondAsync(ctx) {
		return response.Replayed, err
	}
	ctx, cancel := context.WithTimeout(ctx, powerOffWait)
	defer cancel()
	// The VM's record is already deleted. Wait until the host has reported that it has destroyed the VM, which deletes
	// the VM's Placed record.
	store.Await(ctx, s.opts.Store, node.PlacedVMs, func(p *node.Placed) (bool, error) { return p == nil, nil }, string(response.Node), string(id))
	return response.Replayed, nil
}

var deleteCommand = leader.NewCommand("vm.delete", leader.Keyed, (*Service).deleteOnLeader)

// deleteOnLeader implements Delete on the leader, without waiting for the host.
func (s *Service) deleteOnLeader(ctx context.Context, q deleteRequest) (out deleteResponse, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		var replayed bool
		out, replayed, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InProject(q.Tenant.Project), "DeleteVm", q.Body, func() (deleteResponse, error) {
			vm, err := getOwned(tx, q.Tenant, q.VM)
			if err != nil {
				return deleteResponse{}, err
			}
			return s.deleteRecords(tx, vm, q.Force)
		})
		out.Replayed = replayed
		return err
	})
	return out, err
}

// deleteRecords deletes the VM's records, and sets its Placed record to Gone, so that the host destroys the VM.
// Capacity that the host may still use stays allocated until the host reports that the VM is absent. That is always the
// storage. It is also the processors and memory, unless the VM is certainly off. A VM in ERROR is not certainly off:
// its process may still run, if it did not stop in time. See also cloud.VM.CertainlyOff. Likewise, volumes are detached at once only from a STOPPED VM.
func (s *Service) deleteRecords(tx *store.Tx, vm *cloud.VM, force bool) (deleteResponse, error) {
	ev := cloud.DeleteRequested
	if force {
		ev = cloud.ForceDeleteRequested
	}
	unresponsive := vm.Node != "" && s.opts.Nodes.Unresponsive(vm.Node)
	if unresponsive && !force {
		return deleteResponse{}, fault.New(fault.FailedPrecondition,
			"the host of VM %s does not answer, so its disks cannot be removed now: wait, or use force", vm.Name)
	}
	was := vm.State
	off := vm.CertainlyOff()
	if err := vm.Apply(ev, tx.Now()); err != nil {
		return deleteResponse{}, err
	}
	project := string(vm.Project)
	VMs.Delete(tx, project, string(vm.ID))
	names.Delete(tx, project, vm.Name)
	seeds.Delete(tx, string(vm.ID))
	leaveGroups(tx, vm)
	if err := tenant.Give(tx, vm.Tenant(), tenant.Machines, amountOf(vm)); err != nil {
		return deleteResponse{}, err
	}
	for _, id := range vm.Images() {
		image.Release(tx, id, vm.ID)
	}
	if len(vm.Spec.Network) > 0 {
		if err := network.ReleaseNICs(tx, vm.Tenant(), vm.ID); err != nil {
			return deleteResponse{}, err
		}
	}
	if err := s.opts.Billing.Removed(tx, vm); err != nil {
		return deleteResponse{}, err
	}
	if vm.Node == "" {
		return deleteResponse{}, releaseVolumes(tx, vm.Project, vm.ID, vm.Spec.Volumes())
	}
	var attached []cloud.VolumeID
	if was == cloud.Stopped || mutant.On(mutant.ReleaseDeletedEarly) {
		if err := releaseVolumes(tx, vm.Project, vm.ID, vm.Spec.Volumes()); err != nil {
			return deleteResponse{}, err
		}
	} else {
		attached = vm.Spec.Volumes()
	}
	need := vm.Reserved()
	reserved := need
	if off {
		reserved = cloud.Capacity{StorageGiB: need.StorageGiB}
		if err := releaseCapacity(tx, vm.Node, need.Minus(reserved)); err != nil {
			return deleteResponse{}, err
		}
	}
	node.PlacedVMs.Put(tx, &node.Placed{Project: vm.Project, Generation: vm.Generation + 1, Gone: true, Held: reserved, Volumes: attached}, string(vm.Node), string(vm.ID))
	if other := vm.OtherHost(); other != "" {
		if err := endMigrationOfVolumes(tx, vm); err != nil {
			return deleteResponse{}, err
		}
		node.PlacedVMs.Put(tx, &node.Placed{Project: vm.Project, Generation: vm.Generation + 1, Gone: true, Held: need}, string(other), string(vm.ID))
	}
	return deleteResponse{Node: vm.Node, Away: unresponsive}, nil
}

// endMigrationOfVolumes ends the migration of the volumes of a VM that is deleted. They are detached when VM.Node has
// destroyed the VM, whether or not the other host answers. After the switchover, the other host may run the guest.
// Therefore RBD volumes are fenced before another VM can have them.
func endMigrationOfVolumes(tx *store.Tx, vm *cloud.VM) error {
	ids := vm.Spec.Volumes()
	if vm.Migration.Phase >= cloud.MigrationSwitchover {
		if err := volume.FenceMigrated(tx, vm.Tenant(), vm.ID, ids); err != nil {
			return err
		}
	}
	return volume.SetHosts(tx, vm.Tenant(), vm.ID, ids, vm.Node, "")
}

// releaseCapacity subtracts c from the allocated capacity of a host. It does nothing if the host has no record.
func releaseCapacity(tx *store.Tx, id cloud.NodeID, c cloud.Capacity) error {
	n, err := node.Nodes.Get(tx, string(id))
	if err != nil || n == nil {
		return err
	}
	n.Allocated = n.Allocated.Minus(c)
	node.Nodes.Put(tx, n, string(id))
	return nil
}
