package live

import (
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// openStandby opens a volume for the process of a migration's target on the host h, which does not write yet. It returns
// false if the VM does not have the volume, or if two processes have the volume open already.
func (c *commonStorage) openStandby(h *host, vm cloud.VMID, a *agentv1.AssignedVolume) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, generation := c.volumes[cloud.VolumeID(a.GetVolumeId())], a.GetAttachmentGeneration()
	switch {
	case i == nil || !a.GetStandby() || a.GetVmId() != string(vm) || i.vm != vm || i.other != nil,
		generation <= i.generation || generation <= i.detached || i.host == h:
		return false
	}
	i.other = h
	c.f.count(c.what + " opened on two hosts")
	return true
}

// activate gives a volume to the process on the host h that has opened it with openStandby. It returns false if the
// attachment in a is older than the recorded one or has ended.
func (c *commonStorage) activate(h *host, vm cloud.VMID, a *agentv1.AssignedVolume) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, generation := c.volumes[cloud.VolumeID(a.GetVolumeId())], a.GetAttachmentGeneration()
	switch {
	case i == nil || a.GetStandby() || a.GetVmId() != string(vm) || i.vm != vm:
		return false
	case i.host == h && i.generation == generation:
		return true
	case i.other != h || generation <= i.generation || generation <= i.detached:
		return false
	}
	i.host, i.client, i.other = h, vm, i.host
	c.grant(h, vm, a, i)
	return true
}

// takeBack gives a volume back to the process on the host h, the source of a migration that has failed. The process of the
// target must have closed the volume, or the Ceph cluster refuses its requests from now on. takeBack returns false if the
// target may still write, or if the attachment in a is older than the recorded one. The caller must hold c.mu.
func (c *commonStorage) takeBack(h *host, vm cloud.VMID, a *agentv1.AssignedVolume, i *commonVolume) bool {
	own, others := i.host == h, i.other != nil
	if !own {
		own, others = i.other == h, i.host != nil
	}
	switch {
	case !own || a.GetStandby() || a.GetVmId() != string(vm) || i.vm != vm || a.GetAttachmentGeneration() < i.generation:
		return false
	case i.host == h && i.generation == a.GetAttachmentGeneration():
		return true
	case c.locks && (others || time.Now().Before(i.locked)):
		return false
	case others:
		c.f.count("clients of the Ceph cluster fenced")
	}
	i.host, i.client, i.other = h, vm, nil
	c.grant(h, vm, a, i)
	c.f.count(c.what + " taken back")
	return true
}

// grant records the attachment in a of a volume that a process on the host h has open. The caller must hold c.mu.
func (c *commonStorage) grant(h *host, vm cloud.VMID, a *agentv1.AssignedVolume, i *commonVolume) {
	i.generation, i.flushed = a.GetAttachmentGeneration(), min(i.flushed, a.GetAttachmentGeneration()-1)
	c.f.audit.opened(h, cloud.VolumeID(a.GetVolumeId()), vm, i.generation)
}

// takeBackVolumes takes all volumes of a VM back that the control plane has given back to the host h. It returns false if
// one of them cannot be taken back yet. The caller must hold h.mu.
func (h *host) takeBackVolumes(id cloud.VMID, want *agentv1.AssignedVm) bool {
	for _, a := range volumesOf(want) {
		c := h.f.commonOf(a.GetPool())
		if c == nil || a.GetStandby() || !a.GetMigrated() {
			continue
		}
		c.mu.Lock()
		i := c.volumes[cloud.VolumeID(a.GetVolumeId())]
		ok := i != nil && c.takeBack(h, id, a, i)
		c.mu.Unlock()
		if !ok {
			return false
		}
	}
	return true
}

// standbyVolumes opens the volumes of a VM for the process of a migration's target. It returns nil if one of them cannot
// be opened. The caller must hold h.mu.
func (h *host) standbyVolumes(id cloud.VMID, want *agentv1.AssignedVm) map[string]cloud.VolumeID {
	out := map[string]cloud.VolumeID{}
	for disk, a := range volumesOf(want) {
		if c := h.f.commonOf(a.GetPool()); c == nil || !c.openStandby(h, id, a) {
			h.closeVolumes(id)
			return nil
		}
		out[disk] = cloud.VolumeID(a.GetVolumeId())
	}
	return out
}

// activateVolumes activates the volumes of a VM on the target of a migration. It returns false if one of them cannot be
// activated. The caller must hold h.mu.
func (h *host) activateVolumes(id cloud.VMID, want *agentv1.AssignedVm) bool {
	for _, a := range volumesOf(want) {
		if c := h.f.commonOf(a.GetPool()); c == nil || !c.activate(h, id, a) {
			return false
		}
	}
	return true
}

// checkWriter reports a violation if the host h runs a guest with a volume that another host may write to. The caller must
// hold h.mu.
func (h *host) checkWriter(id cloud.VMID, p *proc) {
	for _, volume := range p.volumes {
		for _, c := range h.f.allCommon() {
			c.mu.Lock()
			if i := c.volumes[volume]; i != nil && i.host != nil && i.host != h {
				h.f.fail("%s runs VM %s, and %s may write to its volume %s", h.name, id, i.host.name, volume)
			}
			c.mu.Unlock()
		}
	}
}
