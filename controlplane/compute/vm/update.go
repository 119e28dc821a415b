package vm

import (
	"cmp"
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
	// DiskSizes has new sizes of disks in GiB, by the ID of the disk.
	DiskSizes map[string]uint64
	Network   []cloud.NIC
	Metadata  map[string]string
	Labels    map[string]string
}

type updateRequest struct {
	Tenant cloud.Tenant
	VM     cloud.VMID
	Change Change
}

// Update changes labels and metadata of a VM in any state but MIGRATING. Of a STOPPED VM it also changes processor,
// memory, boot, security, and the metadata that configures the virtual machine (see cloud.FirmwareKey). The processors
// and memory of a VM that is STARTING, RUNNING, STOPPING or in ERROR change at its next start. The new labels and
// metadata are merged into the old ones. A change of the size removes the metadata cloud.InstanceTypeKey, unless c sets
// it. Disks that are not volumes can be made larger, with or without a process of the VM (see grow). Nothing else of the
// disks and NICs can be changed.
func (s *Service) Update(ctx context.Context, t cloud.Tenant, id cloud.VMID, c Change) (cloud.VM, error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return cloud.VM{}, err
	}
	vm, err := updateCommand.Call(ctx, s.opts.Commands, updateRequest{t, id, c})
	if err == nil && !hasSizes(&vm, c.DiskSizes) {
		// A leader of an earlier version ignores DiskSizes.
		err = fault.New(fault.FailedPrecondition, "the sizes of the disks were not changed: the leader of the cluster has an earlier version")
	}
	return vm, err
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
	if err := checkKeys(c.Metadata, c.Labels, vm); err != nil {
		return false, err
	}
	if err := cloud.CheckInstanceTypeKey(c.Metadata); err != nil { // not vm.Metadata: earlier versions accepted any value
		return false, err
	}
	change := c.Metadata
	if shown := vm.PendingResize(); shown != "" && change[cloud.PendingResize] == shown {
		change = cloud.Merge(change, map[string]string{cloud.PendingResize: ""}) // the caller repeats what it has read
	}
	vm.Metadata = cloud.Merge(vm.Metadata, change)
	vm.Labels = cloud.Merge(vm.Labels, c.Labels)
	if err := checkPairs(vm); err != nil {
		return false, err
	}
	current := vm.NextSpec()
	spec := current
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
	vm.ForgetInstanceType(&current, &spec, c.Metadata)
	var err error
	sizes := c.DiskSizes
	if len(c.Disks) > 0 || len(c.Network) > 0 {
		requested := cloud.Spec{Disks: c.Disks, Network: c.Network}
		requested.Normalize()
		if len(c.Disks) > 0 {
			if sizes, err = sizesOf(vm.Spec.Disks, requested.Disks); err != nil {
				return false, err
			}
		}
		if len(c.Network) > 0 && !reflect.DeepEqual(requested.Network, visibleNICs(vm.Spec.Network)) {
			return false, fault.Invalid("spec.network", "NICs cannot be changed by UpdateVm: use AttachNic and DetachNic")
		}
	}
	if len(sizes) > 0 {
		if spec.Disks, err = withSizes(vm, sizes); err != nil {
			return false, err
		}
	}
	if !reflect.DeepEqual(spec, current) || !cloud.SameMachine(before.Metadata, vm.Metadata) {
		if err := s.changeSpec(tx, vm, spec, &before); err != nil {
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

// changeSpec changes the spec of a VM to spec. vm.Metadata must already have the new metadata. The parameter before is
// the VM before the change. If the VM is not STOPPED, only processors, memory and the sizes of disks can change:
// processors and memory at the VM's next start, and the sizes in the spec at once (see grow).
// The VM stays on its host, because the host has its disks. changeSpec returns ResourceExhausted if the new spec does
// not fit on that host.
func (s *Service) changeSpec(tx *store.Tx, vm *cloud.VM, spec cloud.Spec, before *cloud.VM) error {
	if err := spec.Check(); err != nil {
		return err
	}
	if err := cloud.CheckMachine(vm.Metadata, &spec); err != nil {
		return err
	}
	sameDisks := spec
	sameDisks.Disks = vm.Spec.Disks
	resized := !reflect.DeepEqual(vm.NextSpec(), sameDisks)
	if err := s.grow(tx, vm, spec.Disks); err != nil {
		return err
	}
	if vm.State == cloud.Stopped {
		vm.Spec, vm.Resize = spec, nil
		vm.Generation++
	} else {
		if spec.Boot != vm.Spec.Boot || spec.Security != vm.Spec.Security || !cloud.SameMachine(before.Metadata, vm.Metadata) {
			return fault.New(fault.FailedPrecondition, "stop VM %s first: it is %s", vm.Name, vm.State)
		}
		if resized {
			if err := vm.ResizeAtNextStart(&spec); err != nil {
				return err
			}
		}
	}
	if spec.CPU.Model == "" && before.Spec.CPU.Model != "" && vm.BaselineCPU == "" {
		host, err := node.Nodes.Get(tx, string(vm.Node))
		if err != nil {
			return err
		}
		if host != nil {
			vm.BaselineCPU = s.opts.Nodes.BaselineCPU(host.Architecture)
		}
	}
	if err := s.reserve(tx, vm, before, cmp.Or(spec.CPU.Model, vm.BaselineCPU)); err != nil {
		return err
	}
	return changeImages(tx, vm, before, spec)
}

// reserve changes the allocated capacity of the VM's host and the usage of its quotas from those of before to those of
// vm. The parameter before is the VM before the change, and model is the CPU model of its new spec.
func (s *Service) reserve(tx *store.Tx, vm, before *cloud.VM, model string) error {
	n, err := node.Nodes.Get(tx, string(vm.Node))
	if err != nil {
		return err
	}
	if n == nil {
		return fault.New(fault.FailedPrecondition, "the host of VM %s is no longer in the cluster", vm.Name)
	}
	n.Allocated = n.Allocated.Minus(before.Reserved())
	request := &schedule.Request{VM: vm.ID, Need: vm.Reserved(), CPUModel: model, Features: vm.Features()}
	if why := schedule.Excludes(n, request); why != "" {
		return fault.New(fault.ResourceExhausted, "the host of VM %s %s", vm.Name, why).WithReason("NO_HOST_FITS")
	}
	if err := chargeQuota(tx, vm, amountOf(vm), amountOf(before)); err != nil {
		return err
	}
	n.Allocated = n.Allocated.Plus(vm.Reserved())
	node.Nodes.Put(tx, n, string(vm.Node))
	return nil
}

// changeImages checks that a VM can use the images of its new spec. Unless a resize is pending, it also records which
// images the VM uses, and sets the spec of vm and the disks with which the host builds the VM.
func changeImages(tx *store.Tx, vm, before *cloud.VM, spec cloud.Spec) error {
	next, used := *vm, before.Images()
	next.Spec, next.Disks, next.Kernel, next.Initrd = spec, nil, nil, nil
	images, err := resolveImages(tx, &next, used)
	if err != nil || vm.Resize != nil {
		return err
	}
	*vm = next
	for _, id := range used {
		if images[id] == nil {
			image.Release(tx, id, vm.ID)
		}
	}
	for id, i := range images {
		if !slices.Contains(used, id) {
			i.Use(tx, vm.ID)
		}
	}
	return nil
}
