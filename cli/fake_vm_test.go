package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/filter"
)

func (c *fakeCloud) CreateVm(ctx context.Context, in *vmv1.CreateVmRequest) (*vmv1.VirtualMachine, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	key := strings.Join(md.Get("idempotency-key"), "")
	c.mu.Lock()
	defer c.mu.Unlock()
	if vm := c.byKey[key]; vm != nil {
		return vm, nil
	}
	if nics := in.GetSpec().GetNetwork(); len(nics) > 0 {
		c.calls = append(c.calls, "  "+oneLine(&vmv1.VmSpec{Network: nics}))
	}
	cpus := in.GetSpec().GetCpu().GetVcpus()
	switch {
	case cpus > 288:
		return nil, failed(codes.InvalidArgument, "spec.cpu.vcpus", "spec.cpu.vcpus: must be 1 to 288, got %d", cpus)
	case cpus > 8:
		return nil, noHostFits(map[string]string{
			"host-1": "is CORDONED", "host-22": fmt.Sprintf("has 8 vCPUs free, %d needed", cpus),
		})
	case slices.ContainsFunc(c.vms, func(vm *vmv1.VirtualMachine) bool { return vm.GetName() == in.GetName() }):
		return nil, failed(codes.AlreadyExists, "", "a VM named %s exists", in.GetName())
	}
	vm := &vmv1.VirtualMachine{
		Id: c.nextID(), Name: in.GetName(), OrgId: "default", ProjectId: "default", Spec: in.GetSpec(), NodeId: c.hostOf(in.GetLabels()),
		State: vmv1.VmState_VM_STATE_CREATING, Status: &vmv1.VmStatus{}, Labels: in.GetLabels(), Metadata: in.GetMetadata(),
		CreatedAt: now.Add(-90 * time.Minute).UnixMilli(), UpdatedAt: now.UnixMilli(), CreatedBy: "demo", Hypervisor: in.GetHypervisor(),
	}
	for _, nic := range vm.GetSpec().GetNetwork() {
		if err := c.net.plug(vm.GetId(), nic); err != nil {
			return nil, err
		}
	}
	c.vms = append(c.vms, vm)
	c.byKey[key] = vm
	return vm, nil
}

// hostOf returns the ID of the host that the node selector in the labels of a VM chooses by name, or else host-1.
func (c *fakeCloud) hostOf(labels map[string]string) string {
	selector, _ := cloud.ParseNodeSelector(labels[cloud.NodeSelectorLabel])
	for _, n := range c.nodes {
		if n.GetName() == selector[cloud.HostLabel] {
			return n.GetId()
		}
	}
	return "host-1"
}

// AttachNic attaches a NIC to a VM in any state.
func (c *fakeCloud) AttachNic(_ context.Context, in *vmv1.AttachNicRequest) (*vmv1.VirtualMachine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, "  "+oneLine(in))
	vm, err := c.vm(in.GetVmId())
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(vm.GetSpec().GetNetwork(), func(n *vmv1.NetworkSpec) bool { return n.GetId() == in.GetNic().GetId() }) {
		return nil, failed(codes.AlreadyExists, "", "%s has a NIC with the ID %s", vm.GetName(), in.GetNic().GetId())
	}
	if err := c.net.plug(vm.GetId(), in.GetNic()); err != nil {
		return nil, err
	}
	if vm.Spec == nil {
		vm.Spec = &vmv1.VmSpec{}
	}
	vm.Spec.Network = append(vm.Spec.Network, in.GetNic())
	return vm, nil
}

func (c *fakeCloud) DetachNic(_ context.Context, in *vmv1.DetachNicRequest) (*vmv1.VirtualMachine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	vm, err := c.vm(in.GetVmId())
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(vm.GetSpec().GetNetwork(), func(n *vmv1.NetworkSpec) bool { return n.GetId() == in.GetNicId() })
	if i < 0 {
		return nil, failed(codes.NotFound, "", "%s has no NIC %s", vm.GetName(), in.GetNicId())
	}
	c.net.unplug(vm.GetSpec().GetNetwork()[i].GetPortId())
	vm.Spec.Network = slices.Delete(vm.GetSpec().GetNetwork(), i, i+1)
	return vm, nil
}

func (c *fakeCloud) vm(id string) (*vmv1.VirtualMachine, error) {
	for _, vm := range c.vms {
		if vm.GetId() == id {
			return vm, nil
		}
	}
	return nil, failed(codes.NotFound, "", "no VM %s", id)
}

func (c *fakeCloud) GetVm(_ context.Context, in *vmv1.GetVmRequest) (*vmv1.VirtualMachine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.vm(in.GetVmId())
}

// UpdateVm changes metadata, labels, disks, processors and memory. Of a VM that is RUNNING it shows a change of the spec as pending.
func (c *fakeCloud) UpdateVm(_ context.Context, in *vmv1.UpdateVmRequest) (*vmv1.VirtualMachine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, "  "+oneLine(&vmv1.UpdateVmRequest{Metadata: in.GetMetadata(), Labels: in.GetLabels(), Spec: in.GetSpec()}))
	vm, err := c.vm(in.GetVmId())
	if err != nil {
		return nil, err
	}
	vm.Metadata = cloud.Merge(vm.GetMetadata(), in.GetMetadata())
	vm.Labels = cloud.Merge(vm.GetLabels(), in.GetLabels())
	if in.GetSpec() == nil {
		return vm, nil
	}
	if disks := in.GetSpec().GetDisks(); disks != nil {
		vm.Spec.Disks = disks
		return vm, nil
	}
	if vm.GetState() == vmv1.VmState_VM_STATE_RUNNING {
		var pending []string
		if n := in.GetSpec().GetCpu().GetVcpus(); n > 0 {
			pending = append(pending, fmt.Sprintf("vcpus=%d", n))
		}
		if n := in.GetSpec().GetMemory().GetSizeMib(); n > 0 {
			pending = append(pending, fmt.Sprintf("memory_mib=%d", n))
		}
		vm.Metadata = cloud.Merge(vm.GetMetadata(), map[string]string{cloud.PendingResize: strings.Join(pending, ",")})
		return vm, nil
	}
	if in.GetSpec().GetCpu() != nil {
		vm.Spec.Cpu = in.GetSpec().GetCpu()
	}
	if in.GetSpec().GetMemory() != nil {
		vm.Spec.Memory = in.GetSpec().GetMemory()
	}
	return vm, nil
}

// vmFields are the fields that a filter of ListVms can compare.
var vmFields = map[string]filter.Field[*vmv1.VirtualMachine]{
	"node_id": filter.Text((*vmv1.VirtualMachine).GetNodeId),
	"name":    filter.Text((*vmv1.VirtualMachine).GetName),
	"labels":  filter.Pairs((*vmv1.VirtualMachine).GetLabels),
}

// ListVms returns two VMs per page.
func (c *fakeCloud) ListVms(_ context.Context, in *vmv1.ListVmsRequest) (*vmv1.ListVmsResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	vms := slices.Clone(c.vms)
	match, err := filter.Compile(in.GetFilter(), vmFields)
	if err != nil {
		return nil, failed(codes.InvalidArgument, "filter", "%v", err)
	}
	vms = slices.DeleteFunc(vms, func(vm *vmv1.VirtualMachine) bool { return !match(vm) })
	from := 0
	if in.GetPageToken() != "" {
		_, _ = fmt.Sscan(in.GetPageToken(), &from)
	}
	to := min(from+min(2, int(in.GetPageSize())), len(vms)) // a page has two VMs, or fewer
	resp := &vmv1.ListVmsResponse{Vms: vms[from:to]}
	if to < len(vms) {
		resp.NextPageToken = fmt.Sprint(to)
	}
	return resp, nil
}

// power sets the state of a VM to the state to, or to the state during if the call does not wait or the VM is called slow.
// The VM called stuck stays in during, and the call waits until its deadline passes.
func (c *fakeCloud) power(ctx context.Context, id string, during, to vmv1.VmState) (*vmv1.VirtualMachine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	vm, err := c.vm(id)
	if err != nil {
		return nil, err
	}
	switch {
	case async(ctx), vm.GetName() == "slow":
		to = during
	case vm.GetName() == "stuck":
		vm.State = during
		c.mu.Unlock()
		<-ctx.Done()
		c.mu.Lock()
		return nil, ctx.Err()
	case vm.GetName() == "broken":
		vm.State = vmv1.VmState_VM_STATE_ERROR
		return nil, failed(codes.FailedPrecondition, "", "broken: disk is gone")
	}
	vm.State = to
	return vm, nil
}

func (c *fakeCloud) StartVm(ctx context.Context, in *vmv1.StartVmRequest) (*vmv1.VirtualMachine, error) {
	return c.power(ctx, in.GetVmId(), vmv1.VmState_VM_STATE_STARTING, vmv1.VmState_VM_STATE_RUNNING)
}

func (c *fakeCloud) StopVm(ctx context.Context, in *vmv1.StopVmRequest) (*vmv1.VirtualMachine, error) {
	c.mu.Lock()
	c.calls = append(c.calls, fmt.Sprintf("  stop force=%v timeout=%d", in.GetForce(), in.GetTimeoutSeconds()))
	c.mu.Unlock()
	return c.power(ctx, in.GetVmId(), vmv1.VmState_VM_STATE_STOPPING, vmv1.VmState_VM_STATE_STOPPED)
}

func (c *fakeCloud) RebootVm(ctx context.Context, in *vmv1.RebootVmRequest) (*vmv1.VirtualMachine, error) {
	return c.power(ctx, in.GetVmId(), vmv1.VmState_VM_STATE_RUNNING, vmv1.VmState_VM_STATE_RUNNING)
}

func (c *fakeCloud) ResetVm(ctx context.Context, in *vmv1.ResetVmRequest) (*vmv1.VirtualMachine, error) {
	return c.power(ctx, in.GetVmId(), vmv1.VmState_VM_STATE_RUNNING, vmv1.VmState_VM_STATE_RUNNING)
}

// RecoverVm makes a VM PENDING.
func (c *fakeCloud) RecoverVm(_ context.Context, in *vmv1.RecoverVmRequest) (*vmv1.VirtualMachine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	vm, err := c.vm(in.GetVmId())
	if err == nil {
		vm.State = vmv1.VmState_VM_STATE_PENDING
	}
	return vm, err
}

func (c *fakeCloud) DeleteVm(_ context.Context, in *vmv1.DeleteVmRequest) (*emptypb.Empty, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	vm, err := c.vm(in.GetVmId())
	if err != nil {
		return nil, err
	}
	if vm.GetState() == vmv1.VmState_VM_STATE_RUNNING && !in.GetForce() {
		return nil, failed(codes.FailedPrecondition, "", "%s is RUNNING: stop it, or delete it with force", vm.GetName())
	}
	c.vms = slices.DeleteFunc(c.vms, func(v *vmv1.VirtualMachine) bool { return v == vm })
	return &emptypb.Empty{}, nil
}

// followVM sends the VM, whose disks it completes if it is CREATING, and then waits.
func (c *fakeCloud) followVM(id string, stream grpc.ServerStreamingServer[vmv1.VmEvent]) error {
	c.mu.Lock()
	vm, err := c.vm(id)
	if err == nil {
		if vm.GetState() == vmv1.VmState_VM_STATE_CREATING {
			vm.State = vmv1.VmState_VM_STATE_STOPPED
		}
		vm = proto.CloneOf(vm)
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	if err := stream.Send(&vmv1.VmEvent{VmId: id, Vm: vm, Timestamp: now.UnixMilli()}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

// WatchVm sends the events of the next script for the VM, or else of the next script or, if there is none, the VM.
func (c *fakeCloud) WatchVm(in *vmv1.WatchVmRequest, stream grpc.ServerStreamingServer[vmv1.VmEvent]) error {
	c.mu.Lock()
	var script []watched
	if len(c.watches) > 0 {
		next := max(slices.IndexFunc(c.watches, func(w []watched) bool { return w[0].event.GetVmId() == in.GetVmId() }), 0)
		script = c.watches[next]
		c.watches = slices.Delete(c.watches, next, next+1)
	}
	c.mu.Unlock()
	if script == nil {
		return c.followVM(in.GetVmId(), stream)
	}
	for _, w := range script {
		switch {
		case w.wait:
			<-stream.Context().Done()
			return nil
		case w.event == nil:
			return failed(w.code, "", "the stream broke")
		}
		if err := stream.Send(w.event); err != nil {
			return err
		}
	}
	return nil
}

func (c *fakeCloud) ReadConsoleLog(in *operatorv1.ReadConsoleLogRequest, stream grpc.ServerStreamingServer[operatorv1.ReadConsoleLogResponse]) error {
	c.mu.Lock()
	c.calls = append(c.calls, fmt.Sprintf("  follow=%v tail=%d", in.GetFollow(), in.GetTailBytes()))
	chunks := c.console
	c.mu.Unlock()
	for _, data := range chunks {
		if err := stream.Send(&operatorv1.ReadConsoleLogResponse{Data: data}); err != nil {
			return err
		}
	}
	if err := c.fault("", "ReadConsoleLog", true); err != nil || !in.GetFollow() {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (c *fakeCloud) RenameVm(_ context.Context, in *operatorv1.RenameVmRequest) (*operatorv1.RenameVmResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, "  "+oneLine(in))
	for _, vm := range c.vms {
		if vm.GetName() == in.GetName() && vm.GetId() != in.GetVmId() {
			return nil, failed(codes.AlreadyExists, "", "the project has a VM called %s", in.GetName())
		}
	}
	for _, vm := range c.vms {
		if vm.GetId() == in.GetVmId() {
			vm.Name = in.GetName()
			return &operatorv1.RenameVmResponse{Vm: vm}, nil
		}
	}
	return nil, failed(codes.NotFound, "", "there is no VM %s", in.GetVmId())
}
