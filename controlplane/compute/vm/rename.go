package vm

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

type renameRequest struct {
	Tenant cloud.Tenant
	VM     cloud.VMID
	Name   string
}

// Rename changes the name of a VM in any state but MIGRATING. The new name replaces the old one in DNS, and the guest gets
// it as its host name when it renews its DHCP lease or starts again. A VM that already has the name is not changed.
func (s *Service) Rename(ctx context.Context, t cloud.Tenant, id cloud.VMID, name string) (cloud.VM, error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return cloud.VM{}, err
	}
	if err := cloud.CheckName("name", name); err != nil {
		return cloud.VM{}, err
	}
	return renameCommand.Call(ctx, s.opts.Commands, renameRequest{t, id, name})
}

var renameCommand = leader.NewCommand("vm.rename", leader.Repeatable, (*Service).renameOnLeader)

// renameOnLeader implements Rename on the leader.
func (s *Service) renameOnLeader(ctx context.Context, q renameRequest) (out cloud.VM, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		vm, err := getOwned(tx, q.Tenant, q.VM)
		if err != nil {
			return err
		}
		if vm.Name == q.Name {
			out = *vm
			return nil
		}
		if vm.State == cloud.Migrating {
			return fault.New(fault.FailedPrecondition, "cannot rename VM %s: it is %s", vm.Name, vm.State)
		}
		project := string(vm.Project)
		if err := refuseTaken(tx, project, q.Name); err != nil {
			return err
		}
		names.Delete(tx, project, vm.Name)
		names.Put(tx, &vm.ID, project, q.Name)
		if len(vm.Spec.Network) > 0 {
			if err := network.RenameNICs(tx, vm.Tenant(), vm.ID, q.Name); err != nil {
				return err
			}
		}
		generation := vm.Generation
		vm.Name = q.Name
		vm.Generation++ // the host must receive the new host name of the guest
		err = s.save(tx, vm, generation)
		out = *vm
		return err
	})
	return out, err
}

// refuseTaken returns AlreadyExists if a VM of the project has the name.
func refuseTaken(v store.Reader, project, name string) error {
	taken, err := names.Has(v, project, name)
	if err == nil && taken {
		err = fault.New(fault.AlreadyExists, "the project has a VM called %s", name)
	}
	return err
}
