package vm

import (
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// amountOf returns how much of its project's quota a VM uses. The VM uses it from its creation to its deletion, even
// while it is stopped.
func amountOf(vm *cloud.VM) tenant.Amount {
	return amountOfCapacity(vm.Reserved()).Plus(tenant.Amount{VMs: 1})
}

// amountOfCapacity returns how much of a quota the reserved capacity of a VM uses.
func amountOfCapacity(c cloud.Capacity) tenant.Amount {
	return tenant.Amount{VCPUs: c.AllVCPUs(), MemoryMiB: c.AllMemoryMiB(), StorageGiB: c.StorageGiB}
}

// releaseQuota subtracts the difference between before and vm.Reserved from the usage of the project and the org. The
// parameter before is the VM's reserved capacity before a change.
func releaseQuota(tx *store.Tx, vm *cloud.VM, before cloud.Capacity) error {
	less := amountOfCapacity(before).Minus(amountOfCapacity(vm.Reserved()))
	if less == (tenant.Amount{}) {
		return nil
	}
	return tenant.Give(tx, vm.Tenant(), tenant.Machines, less)
}

// releaseReserved releases the difference between before and vm.Reserved on the VM's host and in the quotas. The
// parameter before is the VM's reserved capacity before a change.
func releaseReserved(tx *store.Tx, vm *cloud.VM, before cloud.Capacity) error {
	less := before.Minus(vm.Reserved())
	if less == (cloud.Capacity{}) {
		return nil
	}
	if err := releaseCapacity(tx, vm.Node, less); err != nil {
		return err
	}
	return releaseQuota(tx, vm, before)
}

// CheckNoVMs returns an error if the project t.Project still has VMs, because a project with VMs cannot be deleted.
func CheckNoVMs(r store.Reader, t cloud.Tenant) error {
	if t.Project == "" {
		return nil
	}
	found, _, err := VMs.List(r, 1, string(t.Project))
	if err != nil || len(found) == 0 {
		return err
	}
	return fault.New(fault.FailedPrecondition, "project %s has VM %s: delete its VMs first", t.Project, found[0].Value.Name)
}

// chargeQuota counts a new or changed VM in the quotas of its project and its org. The parameter named more is the
// amount that the VM will use, and the one named less is the amount that it has used so far. It returns
// ResourceExhausted if a quota would be exceeded.
func chargeQuota(tx *store.Tx, vm *cloud.VM, more, less tenant.Amount) error {
	return tenant.Take(tx, cloud.Tenant{Org: vm.Org, Project: vm.Project}, tenant.Machines, more, less, func(p cloud.ProjectID) (sum tenant.Amount, err error) {
		all, _, err := VMs.List(tx, 0, string(p))
		for _, r := range all {
			sum = sum.Plus(amountOf(r.Value))
		}
		return sum, err
	})
}
