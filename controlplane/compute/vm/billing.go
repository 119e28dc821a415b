package vm

import (
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Billing tracks the cost of VMs. Its methods are called within the transactions that change VMs. They only read and
// write through the transaction, and their errors are returned to the caller.
type Billing interface {
	// Admit returns an error to refuse a VM that is being created. It is called after all other checks.
	Admit(tx *store.Tx, vm *cloud.VM) error
	// Start returns an error to refuse the start of a VM.
	Start(tx *store.Tx, vm *cloud.VM) error
	// Changed records the new state of a VM; it refuses nothing.
	Changed(tx *store.Tx, vm *cloud.VM) error
	// Removed records the deletion of a VM; it refuses nothing.
	Removed(tx *store.Tx, vm *cloud.VM) error
}

// noBilling implements Billing for VMs that are free of charge.
type noBilling struct{}

func (noBilling) Admit(*store.Tx, *cloud.VM) error   { return nil }
func (noBilling) Start(*store.Tx, *cloud.VM) error   { return nil }
func (noBilling) Changed(*store.Tx, *cloud.VM) error { return nil }
func (noBilling) Removed(*store.Tx, *cloud.VM) error { return nil }

// Halt stops a VM within a transaction, as StopVm with its default grace would, and reports whether it did. It does
// nothing if the VM does not exist, its desired state is off already, or its state does not allow a stop.
func (s *Service) Halt(tx *store.Tx, t cloud.Tenant, id cloud.VMID) (bool, error) {
	vm, err := VMs.Get(tx, string(t.Project), string(id))
	if err != nil || vm == nil || vm.Org != t.Org || !vm.Desired.On && !vm.Desired.StartAfterStop {
		return false, err
	}
	before := vm.Generation
	if vm.Stop(cloud.DefaultStop, tx.Now()) != nil {
		return false, nil
	}
	return true, s.save(tx, vm, before)
}
