package live

import (
	"sync"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// cephClass is the storage class of the driver RBD.
const cephClass = "ceph"

// cephCluster is the simulated Ceph cluster of the class cephClass. All hosts use the same images. Each image has a
// record, which the hosts change atomically as package volume of the agent does.
type cephCluster struct {
	f *fleet

	mu     sync.Mutex
	images map[cloud.VolumeID]*rbdImage
	// deleted has the volumes whose images were deleted. A host that makes such an image again, because its desired
	// state is old, would leave an image without a volume. This is a known limitation of the agent, which the
	// simulation leaves out.
	deleted map[cloud.VolumeID]bool
}

// rbdImage is the RBD image of a volume with its record.
type rbdImage struct {
	// generation and vm are the last attachment for which a host has opened the image. flushed is the highest
	// generation whose content is complete, and detached is the highest one that a host has ended.
	generation, flushed, detached uint64
	vm                            cloud.VMID
	// host and client are the host and the VM of the process that has the image open; nil if there is none.
	host   *host
	client cloud.VMID
	copies copies
}

func newCephCluster(f *fleet) *cephCluster {
	return &cephCluster{f: f, images: map[cloud.VolumeID]*rbdImage{}, deleted: map[cloud.VolumeID]bool{}}
}

// isRBD reports whether an assigned volume is an RBD image. The volumes of an assigned VM have no field rbd.
func isRBD(a *agentv1.AssignedVolume) bool { return a.GetPool() == "" }

// image returns the image of a volume that is assigned to the host h, and makes it if it does not exist. It returns nil
// if the volume was deleted. The caller must hold c.mu.
func (c *cephCluster) image(h *host, a *agentv1.AssignedVolume) *rbdImage {
	id := cloud.VolumeID(a.GetVolumeId())
	i := c.images[id]
	if i != nil {
		return i
	}
	if c.deleted[id] {
		c.f.count("late makings of deleted RBD images")
		return nil
	}
	if a.GetMustExist() {
		c.f.fail("%s does not find the RBD image of volume %s", h.name, id)
	}
	if a.GetSource() != nil {
		source := c.images[cloud.VolumeID(a.GetSource().GetVolumeId())]
		if source == nil {
			source = &rbdImage{}
		}
		c.f.checkSource(h, a, source.copies)
	}
	i = &rbdImage{copies: copies{}}
	c.images[id] = i
	c.f.count("RBD images made")
	return i
}

// open opens an image for a VM's process on the host h. It returns false if the attachment is older than the recorded
// one or has ended, if the content of an earlier attachment is not complete, or if another process has the image open.
func (c *cephCluster) open(h *host, vm cloud.VMID, a *agentv1.AssignedVolume) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, generation := c.image(h, a), a.GetAttachmentGeneration()
	switch {
	case i == nil, a.GetVmId() != string(vm), generation < i.generation, generation <= i.detached,
		generation == i.generation && i.vm != vm, generation > i.generation && i.flushed < i.generation,
		i.host != nil && (i.host != h || i.client != vm):
		c.f.count("stale attachments of RBD images refused")
		return false
	}
	c.f.audit.opened(h, cloud.VolumeID(a.GetVolumeId()), vm, generation)
	i.generation, i.vm, i.flushed = generation, vm, min(i.flushed, generation-1)
	i.host, i.client = h, vm
	c.f.count("RBD images opened")
	return true
}

// close closes the images that the process of a VM on the host h has open: that of the volume only, or all if only is
// empty. If released is true, the host's agent records that their content is complete. Otherwise the agent does this
// later (see settle).
func (c *cephCluster) close(h *host, vm cloud.VMID, only cloud.VolumeID, released bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, i := range c.images {
		if i.host != h || i.client != vm || only != "" && only != id {
			continue
		}
		i.host, i.client = nil, ""
		if released {
			i.flushed = i.generation
		}
	}
}

// settle brings the image of a volume that is assigned to the host h to its desired state: it makes or deletes the
// image, and ends its last attachment. The results are whether the image exists, the flushed generation of its record,
// and the states of its snapshots. The other parameters are those of settleSnapshots.
func (c *cephCluster) settle(h *host, a *agentv1.AssignedVolume, all map[cloud.VolumeID]*agentv1.AssignedVolume, now cloud.Time) (present bool, flushed uint64, snapshots []cloud.SnapshotObservation) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id := cloud.VolumeID(a.GetVolumeId())
	if a.GetDeleted() {
		if i := c.images[id]; i != nil && i.host == nil {
			delete(c.images, id)
			c.deleted[id] = true
			c.f.count("RBD images deleted")
		}
		return c.images[id] != nil, 0, nil
	}
	i, generation := c.image(h, a), a.GetAttachmentGeneration()
	switch {
	case i == nil:
		return false, 0, nil
	case a.GetFence() && i.host != h && i.host != nil:
		i.host, i.client = nil, "" // The cluster refuses the requests of the process from now on.
		c.f.count("clients of the Ceph cluster fenced")
		return true, i.flushed, h.settleSnapshots(i.copies, a, all, now)
	case i.host != nil || generation < i.generation:
	case a.GetVmId() == "":
		i.detached, i.flushed = max(i.detached, generation), max(i.flushed, generation)
	case generation == i.generation:
		i.flushed = generation
	}
	return true, i.flushed, h.settleSnapshots(i.copies, a, all, now)
}

// holder returns the VM whose process has an image open, and the process's host, or "" and nil.
func (c *cephCluster) holder(id cloud.VolumeID) (cloud.VMID, *host) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := c.images[id]; i != nil {
		return i.client, i.host
	}
	return "", nil
}

// left returns the number of images.
func (c *cephCluster) left() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.images)
}
