package live

import (
	"fmt"
	"maps"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// volumeRecords is the witness's copy of the volume records, with the last opening of each volume on a host.
type volumeRecords struct {
	all   map[cloud.VolumeID]*cloud.Volume
	bound map[cloud.NodeID]map[cloud.VolumeID]*node.Bound
	// shared are the records of shared pools, by ID.
	shared map[string]*volume.SharedPool
	// disputed has the volumes of VMs that were deleted after the switchover of a migration: the source may still have
	// them open when the target has destroyed the VM.
	disputed map[cloud.VolumeID]bool
	// opened has the last opening of each volume. It is guarded by truth.mu.
	opened map[cloud.VolumeID]opening
}

// opening records which VM's process opened a volume, on which host and at which attachment generation.
type opening struct {
	host       *host
	vm         cloud.VMID
	generation uint64
}

func newVolumeRecords() *volumeRecords {
	return &volumeRecords{
		all: map[cloud.VolumeID]*cloud.Volume{}, bound: map[cloud.NodeID]map[cloud.VolumeID]*node.Bound{}, opened: map[cloud.VolumeID]opening{},
		shared: map[string]*volume.SharedPool{}, disputed: map[cloud.VolumeID]bool{},
	}
}

// deletedVM records that the record of a VM is deleted; vm is its last value.
func (r *volumeRecords) deletedVM(vm *cloud.VM) {
	if vm == nil || vm.Migration == nil || vm.Node != vm.Migration.Target {
		return
	}
	for _, id := range vm.Spec.Volumes() {
		r.disputed[id] = true
	}
}

// opened records that a VM's process opens a volume. It reports a violation if the volume was opened before at a higher
// attachment generation, or at the same generation by another VM or on another host.
func (a *witness) opened(h *host, id cloud.VolumeID, vm cloud.VMID, generation uint64) {
	a.truth.mu.Lock()
	defer a.truth.mu.Unlock()
	now, last := opening{h, vm, generation}, a.volumes.opened[id]
	switch {
	case generation < last.generation:
		a.f.fail("%s opens volume %s at generation %d after generation %d", h.name, id, generation, last.generation)
	case generation == last.generation && now != last:
		a.f.fail("two VMs have opened volume %s at generation %d: %s and %s", id, generation, last.vm, vm)
	}
	a.volumes.opened[id] = now
}

// changeVolume applies one event of the tables volume, bound-volume and shared-pool.
func (a *witness) changeVolume(e watch.Event, parts []string) error {
	r, deleted := a.volumes, e.Type == watch.EventDelete
	if parts[0] == "shared-pool" {
		if deleted {
			delete(r.shared, parts[1])
			return nil
		}
		p, err := decode[volume.SharedPool](e.KV.Value)
		r.shared[parts[1]] = p
		return err
	}
	if parts[0] == "bound-volume" {
		on, id := cloud.NodeID(parts[1]), cloud.VolumeID(parts[2])
		if r.bound[on] == nil {
			r.bound[on] = map[cloud.VolumeID]*node.Bound{}
		}
		if deleted {
			// A volume in common storage moves to another host. balanceVolumes checks that it is bound there.
			if was := r.bound[on][id]; was == nil || !was.Gone && was.Class == "" && was.PoolID == "" {
				return fmt.Errorf("host %s forgets volume %s, which was not deleted", on, id)
			}
			delete(r.bound[on], id)
			return nil
		}
		b, err := decode[node.Bound](e.KV.Value)
		if err == nil {
			r.bound[on][id] = b
		}
		return err
	}
	id := cloud.VolumeID(parts[2])
	before := r.all[id]
	if deleted {
		delete(r.all, id)
		if before != nil && before.VM != "" {
			return fmt.Errorf("volume %s is deleted while VM %s has it", id, before.VM)
		}
		return nil
	}
	now, err := decode[cloud.Volume](e.KV.Value)
	if err != nil {
		return err
	}
	r.all[id] = now
	if before == nil {
		return nil
	}
	return a.stepVolume(e.KV.ModRevision, before, now)
}

// stepVolume checks a change of a volume's record.
func (a *witness) stepVolume(revision int64, before, now *cloud.Volume) error {
	granted := now.AttachmentGeneration != before.AttachmentGeneration
	// lost: the host of the VM is lost, and the VM keeps the volume. again: the VM gets the volume on its next host.
	lost, again := now.Ending && !before.Ending, before.Ending && !now.Ending && now.VM != "" && now.VM == before.VM
	// migrated: a step of the VM's migration gives the volume to the other host.
	migrated := now.Migrated && now.VM != "" && now.VM == before.VM && now.Node != before.Node && (before.Other == now.Node || now.Other == before.Node)
	// ends: the next host ends the last attachment, because the VM was deleted after its host was lost or in a migration.
	ends := before.VM == "" && (before.Fence || before.HostRemoved)
	if lost {
		a.f.count("volumes of lost hosts")
	}
	if migrated {
		a.f.count("volumes of migrated VMs")
	}
	if before.VM != now.VM {
		a.f.trace.Add("commit %d: volume %s goes from VM %s to %s, generation %d, flushed %d", revision, now.ID, short(before.VM), short(now.VM),
			now.AttachmentGeneration, now.FlushedGeneration)
	}
	if before.Node != "" && now.Node != before.Node {
		a.f.count("volumes moved")
		if now.PoolID != "" {
			a.f.count("shared volumes moved")
		}
	}
	switch {
	case now.AttachmentGeneration < before.AttachmentGeneration || now.FlushedGeneration < before.FlushedGeneration || now.Generation < before.Generation:
		return fmt.Errorf("volume %s goes back from %+v to %+v", now.ID, before, now)
	case now.FlushedGeneration > now.AttachmentGeneration:
		return fmt.Errorf("volume %s is flushed at generation %d, which was never granted", now.ID, now.FlushedGeneration)
	case before.Node != "" && now.Node != before.Node && (now.Driver != cloud.DriverRBD && before.PoolID == "" || !before.Ending && !migrated && (before.VM != "" || !ends && !before.Flushed())):
		return fmt.Errorf("volume %s goes from host %s to %s", now.ID, before.Node, now.Node)
	case before.Node != "" && now.PoolID != before.PoolID:
		return fmt.Errorf("volume %s goes from the pool %q to %q", now.ID, before.PoolID, now.PoolID)
	case now.SizeGiB < before.SizeGiB:
		return fmt.Errorf("volume %s shrinks", now.ID)
	case granted != (now.VM != "" && now.VM != before.VM || lost || again || migrated):
		return fmt.Errorf("VM %s gets volume %s of generation %d after %d", now.VM, now.ID, now.AttachmentGeneration, before.AttachmentGeneration)
	case granted && !lost && !migrated && (before.VM != "" && !again || !before.Flushed()):
		return fmt.Errorf("volume %s is granted to VM %s before VM %s has given it back", now.ID, now.VM, before.VM)
	}
	if before.Image != nil && now.Image == nil && a.f.needsImage(now) {
		return fmt.Errorf("volume %s no longer uses its image, and its content still needs it", now.ID)
	}
	if a.volumes.disputed[now.ID] && now.VM == "" && !now.Flushed() && (now.Fence || now.PoolID != "") {
		return nil // No VM gets the volume before a host has fenced it, or has its lock.
	}
	if now.VM == "" || now.VM != before.VM { // not the change that the deletion of the VM itself makes
		delete(a.volumes.disputed, now.ID)
	}
	for _, c := range a.f.allCommon() {
		if vm, h := c.holder(now.ID); now.VM == "" && h != nil {
			return fmt.Errorf("volume %s is recorded as detached, but VM %s has it open on %s", now.ID, vm, h.name)
		}
	}
	if now.VM == "" && now.Node != "" {
		if h := a.f.hostOf(now.Node); h != nil {
			if vm := h.holder(now.ID); vm != "" {
				return fmt.Errorf("volume %s is recorded as detached, but VM %s has it open on %s", now.ID, vm, h.name)
			}
		}
	}
	return nil
}

// countImageUses returns the number of volumes that use an image. It returns an error if the image has no record of
// one.
func (a *witness) countImageUses() (n int, err error) {
	for id, v := range a.volumes.all {
		if v.Image == nil {
			continue
		}
		if n++; !a.uses["image-use/"+string(v.Image.ID)+"/"+string(id)] {
			return 0, fmt.Errorf("image %s has no record that volume %s uses it", v.Image.ID, id)
		}
	}
	return n, nil
}

// balanceVolumes checks that the records of volumes, VMs and hosts are consistent.
func (a *witness) balanceVolumes() error {
	sums, shared := map[cloud.NodeID]uint64{}, uint64(0)
	add := func(on cloud.NodeID, poolID string, gib uint64) {
		if poolID != "" {
			shared += gib
		} else {
			sums[on] += gib
		}
	}
	if err := a.addSnapshots(add); err != nil {
		return err
	}
	for id, v := range a.volumes.all {
		if v.Node != "" {
			if v.Driver == cloud.DriverManaged {
				add(v.Node, v.PoolID, v.SizeGiB)
			}
			if b := a.volumes.bound[v.Node][id]; b == nil || b.Gone || b.Generation != v.Generation {
				return fmt.Errorf("volume %s of generation %d is on %s, whose wanted state is %+v", id, v.Generation, v.Node, b)
			}
		}
		if v.VM == "" {
			continue
		}
		vm, p := a.vms[v.VM], a.placed[v.Node][v.VM]
		switch {
		case vm != nil:
			if i := vm.FindDisk(v.Disk); i < 0 || vm.Spec.Disks[i].Volume != id || (vm.Node != v.Node || vm.OtherHost() != v.Other) && !v.Ending {
				return fmt.Errorf("volume %s is attached to VM %s, which does not have it", id, v.VM)
			}
		case p == nil || !p.Gone || !slices.Contains(p.Volumes, id):
			return fmt.Errorf("volume %s is attached to VM %s, which is no more", id, v.VM)
		}
	}
	for _, vm := range a.vms {
		for _, id := range vm.Spec.Volumes() {
			if v := a.volumes.all[id]; v == nil || v.VM != vm.ID {
				return fmt.Errorf("VM %s has volume %s, whose record is %+v", vm.ID, id, v)
			}
		}
	}
	for on, all := range a.volumes.bound {
		for id, b := range all {
			if b.Gone {
				if b.Class == "" {
					add(on, b.PoolID, b.HeldGiB)
				}
			} else if v := a.volumes.all[id]; v == nil || on != v.Node && on != v.Other {
				return fmt.Errorf("host %s is to keep volume %s, whose record is %+v", on, id, v)
			}
		}
	}
	for id, n := range a.nodes {
		if got := n.PoolAllocated[cloud.LocalClass]; got != sums[id] || got > poolGiB {
			return fmt.Errorf("node %s has %d GiB of its pool allocated, its volumes add up to %d", id, got, sums[id])
		}
	}
	allocated := uint64(0)
	if p := a.volumes.shared[sharedPoolID]; p != nil {
		allocated = p.AllocatedGiB
	}
	if allocated != shared || allocated > sharedGiB {
		return fmt.Errorf("%d GiB of the shared pool are allocated, its volumes add up to %d", allocated, shared)
	}
	return nil
}

// unsettledVolumes describes a volume whose host has not reached the desired state yet. It returns "" if there is no
// such volume.
func (a *witness) unsettledVolumes() string {
	for _, id := range slices.Sorted(maps.Keys(a.volumes.all)) {
		if v := a.volumes.all[id]; v.VM == "" && !v.Flushed() {
			return fmt.Sprintf("volume %s is not flushed: %+v", id, v)
		} else if (v.Driver == cloud.DriverRBD || v.Source != nil) && !v.Present {
			return fmt.Sprintf("no host has made volume %s: %+v", id, v)
		}
	}
	for on, all := range a.volumes.bound {
		for id, b := range all {
			if b.Gone {
				return fmt.Sprintf("%s has not reported volume %s gone", on, id)
			}
		}
	}
	return ""
}

// leftVolumes is called after all volumes were deleted. It describes a record or an entry on a host that remains of a
// volume, or returns "".
func (a *witness) leftVolumes() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	for id := range a.volumes.all {
		return fmt.Sprintf("volume %s is still there", id)
	}
	for _, h := range a.f.hosts {
		h.mu.Lock()
		left := len(h.volumes)
		h.mu.Unlock()
		if left > 0 {
			return fmt.Sprintf("%s keeps %d volumes", h.name, left)
		}
	}
	for id := range a.snapshots {
		return fmt.Sprintf("snapshot %s is still there", id)
	}
	for _, c := range a.f.allCommon() {
		if n := c.left(); n > 0 {
			return fmt.Sprintf("%d %s are left", n, c.what)
		}
	}
	return a.unsettledVolumes()
}
