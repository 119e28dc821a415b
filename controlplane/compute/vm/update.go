package vm

import (
	"context"
	"reflect"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Change holds the new values of an update. Nil or empty fields stay unchanged.
type Change struct {
	CPU    *cloud.CPU
	Memory *cloud.Memory
	// VCPUs and MemoryMiB change the size of the VM, and keep the other fields of its processor and memory.
	VCPUs     *uint32
	MemoryMiB *uint64
	Boot      *cloud.Boot
	Security  *cloud.Security
	Disks     []cloud.Disk
	Network   []cloud.NIC
	Metadata  map[string]string
	Labels    map[string]string
}

type updateRequest struct {
	Tenant cloud.Tenant
	VM     cloud.VMID
	Change Change
}

// Update changes labels and metadata of a VM in any state, and processor, memory, boot and security of a STOPPED VM, also
// the metadata that configures the virtual machine (see cloud.FirmwareKey).
// The new labels and metadata are merged into the old ones. Disks and NICs cannot be changed.
func (s *Service) Update(ctx context.Context, t cloud.Tenant, id cloud.VMID, c Change) (cloud.VM, error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return cloud.VM{}, err
	}
	return updateCommand.Call(ctx, s.opts.Commands, updateRequest{t, id, c})
}

var updateCommand = leader.NewCommand("vm.update", leader.Repeatable, (*Service).updateOnLeader)

// updateOnLeader implements Update on the leader. It writes nothing if no field changes.
func (s *Service) updateOnLeader(ctx context.Context, q updateRequest) (out cloud.VM, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		vm, err := getOwned(tx, q.Tenant, q.VM)
		if err != nil {
			return err
		}
		if vm.State == cloud.Migrating {
			return fault.New(fault.FailedPrecondition, "cannot update VM %s: it is %s", vm.Name, vm.State)
		}
		generation := vm.Generation
		changed, err := s.apply(tx, vm, &q.Change)
		if err != nil {
			return err
		}
		if changed {
			err = s.save(tx, vm, generation)
		}
		out = *vm
		return err
	})
	return out, err
}

// apply applies the change c to vm, and reports whether it changed a field of vm.
func (s *Service) apply(tx *store.Tx, vm *cloud.VM, c *Change) (bool, error) {
	before := *vm
	for _, key := range fixedLabels {
		if value, isSet := c.Labels[key]; isSet && value != vm.Labels[key] {
			return false, fault.Invalid("labels", "%s is fixed when a VM is created", key)
		}
	}
	if err := refuseSeed(c.Metadata); err != nil {
		return false, err
	}
	vm.Metadata = cloud.Merge(vm.Metadata, c.Metadata)
	vm.Labels = cloud.Merge(vm.Labels, c.Labels)
	if err := checkPairs(vm); err != nil {
		return false, err
	}
	spec := vm.Spec
	if c.CPU != nil {
		spec.CPU = c.CPU
	}
	if c.Memory != nil {
		spec.Memory = c.Memory
	}
	if c.VCPUs != nil {
		cpu := *spec.CPU
		if cpu.VCPUs != *c.VCPUs && cpu.Sockets*cpu.CoresPerSocket == cpu.VCPUs {
			cpu.Sockets, cpu.CoresPerSocket = 0, 0 // a topology of the old size
		}
		cpu.VCPUs = *c.VCPUs
		spec.CPU = &cpu
	}
	if c.MemoryMiB != nil {
		memory := *spec.Memory
		memory.SizeMiB = *c.MemoryMiB
		spec.Memory = &memory
	}
	if c.Boot != nil {
		spec.Boot = *c.Boot
	}
	if c.Security != nil {
		spec.Security = *c.Security
	}
	spec.Normalize()
	if len(c.Disks) > 0 || len(c.Network) > 0 {
		requested := cloud.Spec{Disks: c.Disks, Network: c.Network}
		requested.Normalize()
		if len(c.Disks) > 0 && !reflect.DeepEqual(requested.Disks, visibleDisks(vm.Spec.Disks)) {
			return false, fault.Invalid("spec.disks", "disks cannot be changed by UpdateVm: use AttachDisk and DetachDisk")
		}
		if len(c.Network) > 0 && !reflect.DeepEqual(requested.Network, visibleNICs(vm.Spec.Network)) {
			return false, fault.Invalid("spec.network", "NICs cannot be changed by UpdateVm: use AttachNic and DetachNic")
		}
	}
	if !reflect.DeepEqual(spec, vm.Spec) || !cloud.SameMachine(before.Metadata, vm.Metadata) {
		if err := s.changeSpec(tx, vm, spec, before.Images()); err != nil {
			return false, err
		}
	}
	if vm.TokensOptional() != before.TokensOptional() {
		vm.Generation++ // the host must receive the change
	}
	if vm.RestartsElsewhere() != before.RestartsElsewhere() {
		vm.Generation++
	}
	return !reflect.DeepEqual(&before, vm), nil
}

func checkPairs(vm *cloud.VM) error {
	if err := cloud.CheckPairs("metadata", vm.Metadata); err != nil {
		return err
	}
	if err := checkPolicy(vm.Metadata); err != nil {
		return err
	}
	if err := checkPlacementLabels(vm.Labels); err != nil {
		return err
	}
	return cloud.CheckPairs("labels", vm.Labels)
}

// changeSpec changes the spec of a stopped VM. The metadata in vm is that after the change. The parameter before has the
// images that the VM used before. The VM stays on its host, because the host has its disks. changeSpec returns
// ResourceExhausted if the new spec does not fit on that host.
func (s *Service) changeSpec(tx *store.Tx, vm *cloud.VM, spec cloud.Spec, before []cloud.ImageID) error {
	if err := spec.Check(); err != nil {
		return err
	}
	if err := spec.CheckSupported(); err != nil {
		return err
	}
	if err := cloud.CheckMachine(vm.Metadata, &spec); err != nil {
		return err
	}
	if vm.State != cloud.Stopped {
		return fault.New(fault.FailedPrecondition, "stop VM %s first: it is %s", vm.Name, vm.State)
	}
	n, err := node.Nodes.Get(tx, string(vm.Node))
	if err != nil {
		return err
	}
	if n == nil {
		return fault.New(fault.FailedPrecondition, "the host of VM %s is no longer in the cluster", vm.Name)
	}
	n.Allocated = n.Allocated.Minus(vm.Spec.Need())
	old := vm.Spec
	vm.Spec = spec
	request := &schedule.Request{VM: vm.ID, Need: spec.Need(), CPUModel: spec.CPU.Model, Features: vm.Features()}
	if why := schedule.Excludes(n, request); why != "" {
		return fault.New(fault.ResourceExhausted, "the host of VM %s %s", vm.Name, why).WithReason("NO_HOST_FITS")
	}
	if err := chargeQuota(tx, vm, amountOf(&spec), amountOf(&old)); err != nil {
		return err
	}
	n.Allocated = n.Allocated.Plus(spec.Need())
	node.Nodes.Put(tx, n, string(vm.Node))
	vm.Disks, vm.Kernel, vm.Initrd = nil, nil, nil
	images, err := resolveImages(tx, vm, before)
	if err != nil {
		return err
	}
	for _, id := range before {
		if images[id] == nil {
			image.Release(tx, id, vm.ID)
		}
	}
	for id, i := range images {
		if !slices.Contains(before, id) {
			i.Use(tx, vm.ID)
		}
	}
	vm.Generation++
	return nil
}
