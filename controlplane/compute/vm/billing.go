package vm

import (
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Billing charges for VMs. Its methods are called within the transactions that change VMs. They may read and write only
// through tx. If one returns an error, the transaction is not committed and the caller gets the error.
type Billing interface {
	// Admit may refuse to create vm, by an error. It is called after all other checks.
	Admit(tx *store.Tx, vm *cloud.VM) error
	// Start may refuse to start vm, by an error.
	Start(tx *store.Tx, vm *cloud.VM) error
	// Changed is called after each change of vm. It must not refuse the change.
	Changed(tx *store.Tx, vm *cloud.VM) error
	// Removed is called when vm is deleted. It must not refuse the deletion.
	Removed(tx *store.Tx, vm *cloud.VM) error
}

// noBilling implements Billing for VMs that are free of charge.
type noBilling struct{}

func (noBilling) Admit(*store.Tx, *cloud.VM) error   { return nil }
func (noBilling) Start(*store.Tx, *cloud.VM) error   { return nil }
func (noBilling) Changed(*store.Tx, *cloud.VM) error { return nil }
func (noBilling) Removed(*store.Tx, *cloud.VM) error { return nil }

// Halt stops a VM within the transaction tx, like StopVm with its default grace period, and reports whether it did. It
// does nothing if the VM does not exist, if its desired state is off already, or if its state does not allow a stop.
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
