package vm

import (
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Billing charges for VMs. Its methods are called within the transaction that changes a VM. They may read and write
// only through tx. If a method returns an error, the transaction is not committed and the API caller gets the error.
type Billing interface {
	// Admit is called when vm is created, after all other checks. If it returns an error, vm is not created.
	Admit(tx *store.Tx, vm *cloud.VM) error
	// Start is called when a caller starts vm. If it returns an error, vm is not started.
	Start(tx *store.Tx, vm *cloud.VM) error
	// Changed is called after each change of the record of vm. It returns an error only if billing records cannot be
	// read or written, never to refuse the change.
	Changed(tx *store.Tx, vm *cloud.VM) error
	// Removed is called when vm is deleted. It returns an error only if billing records cannot be read or written,
	// never to refuse the deletion.
	Removed(tx *store.Tx, vm *cloud.VM) error
}

// noBilling implements Billing for VMs that are free of charge.
type noBilling struct{}

func (noBilling) Admit(*store.Tx, *cloud.VM) error   { return nil }
func (noBilling) Start(*store.Tx, *cloud.VM) error   { return nil }
func (noBilling) Changed(*store.Tx, *cloud.VM) error { return nil }
func (noBilling) Removed(*store.Tx, *cloud.VM) error { return nil }

// Halt stops a VM within the transaction tx, like StopVm with its default grace period, and returns true if it did. It
// returns false if the VM does not exist in tenant t, is already to be off, or is in a state in which it cannot be
// stopped.
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
