package vm

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

type recoverRequest struct {
	Tenant cloud.Tenant
	VM     cloud.VMID
	// Create describes the VM to create if no VM has the ID. It is nil if the VM must exist.
	Create *CreateRequest
	Start  bool
	Body   [32]byte
}

// RecoverVM moves a VM whose host is fenced to another host, as Recover does, also if the VM's metadata does not request
// that. It returns the VM as PENDING and does not wait for the new host. If start is true, the VM is started there even
// if it was off. A VM that is PENDING already is not changed otherwise.
//
// If no VM has the ID, w describes a VM that is created with this ID, for example because the VM is missing in a restored
// backup. Then the VM is returned as CREATING. w must be nil if the VM exists.
func (s *Service) RecoverVM(ctx context.Context, t cloud.Tenant, id cloud.VMID, w *CreateRequest, start bool, body [32]byte) (cloud.VM, error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return cloud.VM{}, err
	}
	if w != nil {
		w.Spec.Normalize()
		var err error
		if w.Seed, w.Metadata, err = takeSeed(w.Metadata); err != nil {
			return cloud.VM{}, err
		}
		if err := w.check(); err != nil {
			return cloud.VM{}, err
		}
	}
	return recoverCommand.Call(ctx, s.opts.Commands, recoverRequest{t, id, w, start, body})
}

var recoverCommand = leader.NewCommand("vm.recover", leader.Keyed, (*Service).recoverOnLeader)

func (s *Service) recoverOnLeader(ctx context.Context, q recoverRequest) (out cloud.VM, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		out, _, err = store.Idempotent(tx, auth.CallerOf(ctx), store.InProject(q.Tenant.Project), "RecoverVm", q.Body, func() (cloud.VM, error) {
			vm, err := s.recoverRecords(ctx, tx, q)
			if err != nil || !q.Start {
				return *vm, err
			}
			before := vm.Generation
			if err := vm.Apply(cloud.StartRequested, tx.Now()); err != nil {
				return *vm, err
			}
			if vm.Generation == before {
				return *vm, nil
			}
			if err := s.opts.Billing.Start(tx, vm); err != nil {
				return *vm, err
			}
			return *vm, s.save(tx, vm, before)
		})
		return err
	})
	s.placements.countRefusal(err)
	return out, err
}

// recoverRecords implements RecoverVM without the start. It never returns nil.
func (s *Service) recoverRecords(ctx context.Context, tx *store.Tx, q recoverRequest) (*cloud.VM, error) {
	none := &cloud.VM{}
	vm, err := getOwned(tx, q.Tenant, q.VM)
	switch {
	case fault.Is(err, fault.NotFound) && q.Create != nil:
		if err := checkUnused(tx, q.VM); err != nil {
			return none, err
		}
		made, err := s.createRecords(ctx, tx, q.VM, createArgs{Tenant: q.Tenant, Request: *q.Create})
		return &made, err
	case err != nil:
		return none, err
	case q.Create != nil:
		return none, fault.Invalid("spec", "must be empty: VM %s exists", q.VM)
	case vm.State == cloud.Pending:
		return vm, nil
	}
	return vm, s.leaveLostHost(tx, vm)
}

// checkUnused returns AlreadyExists if a VM of any project has the ID, and FailedPrecondition if a host has not removed a
// deleted VM with the ID yet. IDs of VMs are unique in the cloud, because hosts know VMs by their IDs.
func checkUnused(tx *store.Tx, id cloud.VMID) error {
	all, _, err := vmDeadlines.List(tx.Unguarded(), 0)
	if err != nil {
		return err
	}
	for _, r := range all {
		if r.Value.ID == id {
			return fault.New(fault.AlreadyExists, "another project has a VM with the ID %s", id)
		}
	}
	nodes, _, err := node.Nodes.List(tx.Unguarded(), 0)
	if err != nil {
		return err
	}
	for _, n := range nodes {
		placed, err := node.PlacedVMs.Has(tx, n.Path[0], string(id))
		if err != nil {
			return err
		}
		if placed {
			return fault.New(fault.FailedPrecondition, "host %s has not removed the deleted VM %s yet: try again later", n.Value.Name, id)
		}
	}
	return nil
}
