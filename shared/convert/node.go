package convert

import (
	"github.com/trivet-cloud/trivet/shared/cloud"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// Node returns a node record as the message of the API. The record does not contain the node's state and the time of
// its last heartbeat, which only the leader has; the caller passes them.
func Node(n *cloud.Node, state cloud.NodeState, lastSeen cloud.Time) *vmv1.Node {
	return &vmv1.Node{
		Id: string(n.ID), Name: n.Name, State: vmv1.NodeState(state), Capacity: capacity(n.Capacity),
		Allocatable: capacity(n.Allocatable), Allocated: capacity(n.Allocated),
		Hypervisors: each(n.Hypervisors, func(h cloud.Hypervisor) vmv1.HypervisorType { return vmv1.HypervisorType(h) }),
		Labels:      copyMap(n.Labels), AgentVersion: n.AgentVersion, LastHeartbeat: lastSeen,
		SupportedVolumeDrivers:  each(n.VolumeDrivers, func(d cloud.VolumeDriver) vmv1.VolumeDriverKind { return vmv1.VolumeDriverKind(d) }),
		SupportedStorageClasses: copySlice(n.StorageClasses), SharedLiveMigration: n.SharedMigration,
	}
}

// NodeFrom returns the node that an agent's heartbeat message describes.
func NodeFrom(r *vmv1.HeartbeatNodeRequest) cloud.Node {
	return cloud.Node{
		ID: cloud.NodeID(r.GetNodeId()), Name: r.GetName(), Declared: enum[cloud.NodeState](r.GetState()),
		Capacity: capacityFrom(r.GetCapacity()), Allocatable: capacityFrom(r.GetAllocatable()),
		Hypervisors:  each(r.GetHypervisors(), func(h vmv1.HypervisorType) cloud.Hypervisor { return enum[cloud.Hypervisor](h) }),
		Labels:       copyMap(r.GetLabels()),
		AgentVersion: r.GetAgentVersion(),
		VolumeDrivers: each(r.GetSupportedVolumeDrivers(), func(d vmv1.VolumeDriverKind) cloud.VolumeDriver {
			return enum[cloud.VolumeDriver](d)
		}),
		StorageClasses: copySlice(r.GetSupportedStorageClasses()), SharedMigration: r.GetSharedLiveMigration(),
	}
}

func capacity(c cloud.Capacity) *vmv1.NodeCapacity {
	return &vmv1.NodeCapacity{Vcpus: c.VCPUs, MemoryMib: c.MemoryMiB, StorageGib: c.StorageGiB}
}

func capacityFrom(c *vmv1.NodeCapacity) cloud.Capacity {
	return cloud.Capacity{VCPUs: c.GetVcpus(), MemoryMiB: c.GetMemoryMib(), StorageGiB: c.GetStorageGib()}
}
