package vm

import (
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Billing is told in the transactions that change VMs what they cost from now on. It does nothing but read and write
// through the transaction, and its refusals are for the caller.
type Billing interface {
	// Admit is asked about a VM that is being made, after everything else agreed.
	Admit(tx *store.Tx, vm *cloud.VM) error
	// Start is asked about a VM that is to be started.
	Start(tx *store.Tx, vm *cloud.VM) error
	// Changed is told of a VM as it is from now on; it refuses nothing.
	Changed(tx *store.Tx, vm *cloud.VM) error
	// Removed is told of a VM that is no more; it refuses nothing.
	Removed(tx *store.Tx, vm *cloud.VM) error
}

// unbilled is the Billing of VMs that cost nothing.
type unbilled struct{}

func (unbilled) Admit(*store.Tx, *cloud.VM) error   { return nil }
func (unbilled) Start(*store.Tx, *cloud.VM) error   { return nil }
func (unbilled) Changed(*store.Tx, *cloud.VM) error { return nil }
func (unbilled) Removed(*store.Tx, *cloud.VM) error { return nil }

// Halt stops a VM in a transaction, as StopVm with its default grace would, unless it is off or wanted off already, or is
// in a state that cannot be stopped. It says whether it did.
func (s *Service) Halt(tx *store.Tx, t cloud.Tenant, id cloud.VMID) (bool, error) {
	vm, err := VMs.Get(tx, string(t.Project), string(id))
	if err != nil || vm == nil || vm.Org != t.Org || !vm.Wish.On && !vm.Wish.Again {
		return false, err
	}
	before := vm.Generation
	if vm.Stop(cloud.DefaultStop, tx.Now()) != nil {
		return false, nil
	}
	return true, s.save(tx, vm, before)
}
