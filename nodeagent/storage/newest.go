package storage

import (
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// WithNewestVolumes returns the assigned VMs with the newest desired state of their volumes. For each volume it takes
// the desired state in the parameter volumes if the generation there is higher than in the disk of the VM. The two can
// differ because the control plane does not send a VM again when one of its volumes has grown. WithNewestVolumes does
// not modify its arguments: it copies each VM that it changes.
func WithNewestVolumes(
	vms map[cloud.VMID]*agentv1.AssignedVm, volumes map[cloud.VolumeID]*agentv1.AssignedVolume,
) map[cloud.VMID]*agentv1.AssignedVm {
	out := make(map[cloud.VMID]*agentv1.AssignedVm, len(vms))
	for id, vm := range vms {
		out[id] = vm
		for i, d := range vm.GetDisks() {
			newest := volumes[cloud.VolumeID(d.GetVolume().GetVolumeId())]
			if d.GetVolume() == nil || newest.GetGeneration() <= d.GetVolume().GetGeneration() {
				continue
			}
			if out[id] == vm {
				out[id] = proto.CloneOf(vm)
			}
			out[id].Disks[i].Volume = newest
		}
	}
	return out
}
