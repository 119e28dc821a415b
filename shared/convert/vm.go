package convert

import (
	"github.com/trivet-cloud/trivet/shared/cloud"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// VM returns a VM record as the message of the API. usage is the VM's last reported resource usage, or nil.
func VM(vm *cloud.VM, usage *cloud.Usage) *vmv1.VirtualMachine {
	metadata := copyMap(vm.Metadata)
	if pending := vm.PendingResize(); pending != "" {
		metadata = cloud.Merge(metadata, map[string]string{cloud.PendingResize: pending})
	}
	return &vmv1.VirtualMachine{
		Id: string(vm.ID), Name: vm.Name, OrgId: string(vm.Org), ProjectId: string(vm.Project),
		State: vmv1.VmState(vm.State), Spec: Spec(&vm.Spec), Status: status(vm, usage), NodeId: string(vm.Node),
		Hypervisor: vmv1.HypervisorType(vm.Hypervisor), CreatedAt: vm.CreatedAt, UpdatedAt: vm.UpdatedAt,
		CreatedBy: vm.CreatedBy, Metadata: metadata, Labels: copyMap(vm.Labels),
	}
}

func status(vm *cloud.VM, usage *cloud.Usage) *vmv1.VmStatus {
	s := &vm.Status
	addresses := vm.Addresses()
	if usage != nil {
		addresses = append(addresses, vm.Unassigned(usage.GuestAddresses)...)
	}
	return &vmv1.VmStatus{
		ActualState: vmv1.VmState(s.Actual), HostPid: s.PID, StartedAt: s.StartedAt, IpAddresses: addresses,
		ResourceUsage: Usage(usage), LastError: s.LastError,
	}
}

// Usage returns a VM's resource usage as the message of the API, or nil if u is nil.
func Usage(u *cloud.Usage) *vmv1.ResourceUsage {
	if u == nil {
		return nil
	}
	return &vmv1.ResourceUsage{
		CpuPercent: u.CPUPercent, MemoryUsedMib: u.MemoryMiB, DiskReadBytes: u.DiskReadBytes,
		DiskWriteBytes: u.DiskWriteBytes, NetworkRxBytes: u.NetworkReceivedBytes, NetworkTxBytes: u.NetworkTransmitBytes,
	}
}

// UsageFrom converts a protobuf message to a VM's resource usage. It is the inverse of Usage. It returns nil if u is
// nil.
func UsageFrom(u *vmv1.ResourceUsage) *cloud.Usage {
	if u == nil {
		return nil
	}
	return &cloud.Usage{
		CPUPercent: u.GetCpuPercent(), MemoryMiB: u.GetMemoryUsedMib(), DiskReadBytes: u.GetDiskReadBytes(),
		DiskWriteBytes: u.GetDiskWriteBytes(), NetworkReceivedBytes: u.GetNetworkRxBytes(), NetworkTransmitBytes: u.GetNetworkTxBytes(),
	}
}
