package live

import (
	"maps"
	"slices"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

// storedVolume is a host's stored record of a volume, with the VM whose process has the volume open.
type storedVolume struct {
	present bool
	// generation is the highest attachment generation that the host has received. closed is true if the volume was
	// assigned as detached at this generation. The host then no longer opens the volume at this generation.
	generation uint64
	closed     bool
	open       cloud.VMID
	copies     copies
	origin     origin
}

// poolGiB is the size of the storage pool local of each host.
const poolGiB = 40

// volumesOf returns the disks that are volumes in the desired state of a VM, by ID.
func volumesOf(want *agentv1.AssignedVm) map[string]*agentv1.AssignedVolume {
	out := map[string]*agentv1.AssignedVolume{}
	for _, d := range want.GetDisks() {
		if d.GetVolume() != nil {
			out[d.GetId()] = d.GetVolume()
		}
	}
	return out
}

// accept stores the desired state of a volume from an assignment, and makes the volume if the host does not have it. It
// returns the stored state. It must not be called for a deleted volume. The caller must hold h.mu.
func (h *host) accept(a *agentv1.AssignedVolume) *storedVolume {
	id := cloud.VolumeID(a.GetVolumeId())
	v := h.volumes[id]
	if v == nil {
		if a.GetMustExist() {
			h.f.fail("%s has lost volume %s", h.name, id)
		}
		if a.GetSource() != nil {
			source := h.volumes[cloud.VolumeID(a.GetSource().GetVolumeId())]
			if source == nil {
				source = &storedVolume{}
			}
			h.f.checkSource(h, a, source.copies)
		}
		v = &storedVolume{present: true, copies: copies{}, origin: newOrigin(a)}
		h.volumes[id] = v
		h.f.count("volumes made")
	}
	switch generation := a.GetAttachmentGeneration(); {
	case generation > v.generation:
		v.generation, v.closed = generation, a.GetVmId() == ""
	case generation == v.generation && a.GetVmId() == "":
		v.closed = true
	}
	return v
}

// open opens a volume for a VM's process. It returns false if the assignment is older than what the host has stored,
// or another process has the volume open. The caller must hold h.mu.
func (h *host) open(vm cloud.VMID, a *agentv1.AssignedVolume) bool {
	if c := h.f.commonOf(a.GetPool()); c != nil {
		return c.open(h, vm, a)
	}
	if h.volumes[cloud.VolumeID(a.GetVolumeId())] == nil && a.GetSource() != nil {
		return false // applyVolumes makes the volume.
	}
	v := h.accept(a)
	if a.GetVmId() != string(vm) || a.GetAttachmentGeneration() < v.generation || v.closed || v.open != "" && v.open != vm {
		h.f.count("stale attachments refused")
		return false
	}
	h.f.audit.opened(h, cloud.VolumeID(a.GetVolumeId()), vm, v.generation)
	v.open = vm
	h.f.count("volumes opened")
	return true
}

// closeVolumes closes all volumes that the process of a VM has open. If no agent runs, the next agent records later
// that the content of volumes in common storage is complete. The caller must hold h.mu.
func (h *host) closeVolumes(vm cloud.VMID) {
	for _, c := range h.f.allCommon() {
		c.close(h, vm, "", h.agent != nil)
	}
	for _, v := range h.volumes {
		if v.open == vm {
			v.open = ""
		}
	}
}

// setVolumes attaches volumes to a running guest and detaches others, until the guest has the volumes of its desired
// state. It refuses a random eighth of the attachments and detachments. A refusal lasts until the desired state
// changes.
func (h *host) setVolumes(id cloud.VMID, want *agentv1.AssignedVm) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil || g.proc == nil {
		return
	}
	p, wanted := g.proc, volumesOf(want)
	p.refused, p.settled = map[string]string{}, want.GetGeneration()
	for disk, a := range wanted {
		if p.volumes[disk] != "" {
			continue
		}
		if h.rng.IntN(8) == 0 || !h.open(id, a) {
			p.refused[disk] = "the host cannot attach it"
			continue
		}
		p.volumes[disk] = cloud.VolumeID(a.GetVolumeId())
	}
	for disk, volume := range p.volumes {
		if wanted[disk] != nil {
			continue
		}
		if h.rng.IntN(8) == 0 {
			p.refused[disk] = "the guest did not release the device"
			continue
		}
		delete(p.volumes, disk)
		for _, c := range h.f.allCommon() {
			c.close(h, id, volume, true)
		}
		if v := h.volumes[volume]; v != nil {
			v.open = ""
		}
	}
}

// volumesDiffer reports whether the volumes of the guest differ from its desired state, so that setVolumes must be
// called.
func (p *proc) volumesDiffer(want *agentv1.AssignedVm) bool {
	if p.settled == want.GetGeneration() {
		return false
	}
	wanted := volumesOf(want)
	return len(wanted) != len(p.volumes) || slices.ContainsFunc(slices.Collect(maps.Keys(wanted)), func(disk string) bool { return p.volumes[disk] == "" })
}

// diskObservations returns the report about the volumes of a running guest.
func (p *proc) diskObservations(want *agentv1.AssignedVm) (out []cloud.DiskObservation) {
	for _, disk := range slices.Sorted(maps.Keys(p.volumes)) {
		out = append(out, cloud.DiskObservation{ID: disk, Attached: true})
	}
	if p.settled != want.GetGeneration() {
		return out
	}
	for _, disk := range slices.Sorted(maps.Keys(p.refused)) {
		if i := slices.IndexFunc(out, func(d cloud.DiskObservation) bool { return d.ID == disk }); i >= 0 {
			out[i].Error = p.refused[disk]
		} else {
			out = append(out, cloud.DiskObservation{ID: disk, Error: p.refused[disk]})
		}
	}
	return out
}

// applyVolumes makes and deletes volumes as assigned, and returns the reports about all assigned volumes. For a random
// sixteenth of the volumes in common storage, the storage executes the requests, but its answer is lost.
func (h *host) applyVolumes(assigned map[cloud.VolumeID]*agentv1.AssignedVolume) (out []*agentv1.VolumeObservation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now().UnixMilli()
	if h.rng.IntN(2) == 0 {
		now = 0 // New snapshots are reported as absent, and begun later.
	}
	for _, id := range slices.Sorted(maps.Keys(assigned)) {
		a := assigned[id]
		o := cloud.VolumeObservation{Volume: id, Generation: a.GetGeneration()}
		if c := h.f.commonOf(a.GetPool()); c != nil {
			c.settle(h, a, assigned, now, &o)
			if h.rng.IntN(16) == 0 {
				continue
			}
			o.SizeBytes = a.GetSizeBytes()
		} else if a.GetDeleted() {
			if v := h.volumes[id]; v != nil && v.open == "" {
				delete(h.volumes, id)
				h.f.count("volumes deleted on hosts")
			}
			o.Present = h.volumes[id] != nil
		} else {
			v := h.accept(a)
			o.Present, o.SizeBytes, o.FlushedGeneration = true, a.GetSizeBytes(), v.generation
			o.Snapshots = h.settleSnapshots(v.copies, a, assigned, now)
			h.settleFlatten(&v.origin, a, &o)
			if v.open != "" {
				o.FlushedGeneration = v.generation - 1
			}
		}
		out = append(out, convert.VolumeObservation(o))
	}
	return out
}

// holder returns the VM whose process has a volume in a pool of the host open, or "".
func (h *host) holder(id cloud.VolumeID) cloud.VMID {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v := h.volumes[id]; v != nil {
		return v.open
	}
	return ""
}

// takeVolumes replaces the assigned volumes, and wakes the goroutine that reports.
func (a *agent) takeVolumes(volumes map[cloud.VolumeID]*agentv1.AssignedVolume) {
	a.mu.Lock()
	a.volumes = volumes
	a.mu.Unlock()
	a.levels.poke()
}

// volumeReports applies the assigned volumes and returns the reports about them.
func (a *agent) volumeReports() []*agentv1.VolumeObservation {
	a.mu.Lock()
	assigned := maps.Clone(a.volumes)
	a.mu.Unlock()
	return a.host.applyVolumes(assigned)
}

// poke wakes the goroutine that reports.
func (l *levels) poke() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}
