package live

import (
	"sync"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// cephClass is the storage class of the driver RBD.
	cephClass = "ceph"
	// sharedClass is the storage class of the shared pool, and the name of the pool. sharedPoolID is the ID of the pool,
	// and sharedGiB its size.
	sharedClass  = "shared"
	sharedPoolID = "0190a000-0000-4000-8000-000000000002"
	sharedGiB    = 25
)

// maxLockTime is the maximum time for which the file system of the shared pool keeps the locks of a process after the
// host has lost power.
const maxLockTime = 45 * time.Second

// commonStorage is simulated storage that all hosts use: the Ceph cluster of the class cephClass, or the pool of the
// class sharedClass. Each volume has a record, which the hosts change atomically as package volume of the agent does.
type commonStorage struct {
	f *fleet
	// what is the name of the volumes in the counters of the fleet: "RBD images" or "shared volumes".
	what string
	// locks is true if the volumes are files, whose locks can outlive a process (see maxLockTime).
	locks bool

	mu      sync.Mutex
	volumes map[cloud.VolumeID]*commonVolume
	// deleted has the volumes whose deletion was assigned to a host. A host with an older desired state must not make them
	// again.
	deleted map[cloud.VolumeID]bool
}

// commonVolume is the RBD image or the file of a volume with its record.
type commonVolume struct {
	// generation and vm are the last attachment for which a host has opened the volume. flushed is the highest
	// generation whose content is complete, and detached is the highest one that a host has ended.
	generation, flushed, detached uint64
	vm                            cloud.VMID
	// host and client are the host and the VM of the process that has the volume open, or nil and "" if there is none.
	// Until the time locked, the volume counts as in use even if no process has it open.
	host   *host
	client cloud.VMID
	// other is the other host of a migration of the VM, whose process has the volume open and does not write, or nil.
	other  *host
	locked time.Time
	copies copies
	origin origin
}

// inUse reports whether a process has the volume open, or the lock of an ended process has not ended yet.
func (i *commonVolume) inUse() bool {
	return i.host != nil || i.other != nil || time.Now().Before(i.locked)
}

func newCommonStorage(f *fleet, what string, locks bool) *commonStorage {
	return &commonStorage{f: f, what: what, locks: locks, volumes: map[cloud.VolumeID]*commonVolume{}, deleted: map[cloud.VolumeID]bool{}}
}

// allCommon returns all storage that several hosts use.
func (f *fleet) allCommon() []*commonStorage { return []*commonStorage{f.ceph, f.shared} }

// commonOf returns the storage of a volume in the pool with this name, or nil if only one host uses the pool. RBD
// images have no pool.
func (f *fleet) commonOf(pool string) *commonStorage {
	switch pool {
	case "":
		return f.ceph
	case sharedClass:
		return f.shared
	}
	return nil
}

// volume returns a volume that is assigned to the host h, and makes it if it does not exist. It returns nil if the
// volume was deleted. The caller must hold c.mu.
func (c *commonStorage) volume(h *host, a *agentv1.AssignedVolume) *commonVolume {
	id := cloud.VolumeID(a.GetVolumeId())
	i := c.volumes[id]
	if i != nil {
		return i
	}
	if c.deleted[id] {
		c.f.count("deleted " + c.what + " not made")
		return nil
	}
	if a.GetMustExist() {
		c.f.fail("%s does not find volume %s among the %s", h.name, id, c.what)
	}
	if a.GetSource() != nil {
		source := c.volumes[cloud.VolumeID(a.GetSource().GetVolumeId())]
		if source == nil {
			source = &commonVolume{}
		}
		c.f.checkSource(h, a, source.copies)
	}
	i = &commonVolume{copies: copies{}, origin: newOrigin(a)}
	c.volumes[id] = i
	c.f.count(c.what + " made")
	return i
}

// open opens a volume for a VM's process on the host h. It returns false if the attachment is older than the recorded
// one or has ended, if the content of an earlier attachment is not complete, or if another process has the volume open.
func (c *commonStorage) open(h *host, vm cloud.VMID, a *agentv1.AssignedVolume) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if a.GetStandby() {
		return false
	}
	i, generation := c.volume(h, a), a.GetAttachmentGeneration()
	if i != nil && a.GetMigrated() && !c.locks && generation > i.generation { // No host has the state of the guest any more.
		i.host, i.client, i.other, i.flushed = nil, "", nil, i.generation
	}
	switch {
	case i == nil, a.GetVmId() != string(vm), generation < i.generation, generation <= i.detached,
		generation == i.generation && i.vm != vm, generation > i.generation && i.flushed < i.generation,
		i.inUse() && (i.host != h || i.client != vm || i.other != nil):
		c.f.count("stale attachments of " + c.what + " refused")
		return false
	}
	c.f.audit.opened(h, cloud.VolumeID(a.GetVolumeId()), vm, generation)
	i.generation, i.vm, i.flushed = generation, vm, min(i.flushed, generation-1)
	i.host, i.client = h, vm
	c.f.count(c.what + " opened")
	return true
}

// close closes the volumes that the process of a VM on the host h has open: the volume only, or all if only is empty.
// If released is true, the host's agent records that their content is complete. Otherwise an agent does this later (see
// settle), because the host may have lost power. The caller must hold h.mu.
func (c *commonStorage) close(h *host, vm cloud.VMID, only cloud.VolumeID, released bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, i := range c.volumes {
		if i.other == h && i.vm == vm && (only == "" || only == id) {
			i.other = nil
			if c.locks && !released {
				i.locked = time.Now().Add(h.drawn(0, maxLockTime))
			}
			continue
		}
		if i.host != h || i.client != vm || only != "" && only != id {
			continue
		}
		i.host, i.client = nil, ""
		switch {
		case released && i.other == nil:
			i.flushed = i.generation
		case c.locks && !released:
			i.locked = time.Now().Add(h.drawn(0, maxLockTime))
		}
	}
}

// settle brings a volume that is assigned to the host h to its desired state: it makes or deletes the volume, ends its
// last attachment, and copies its image. It sets the fields Present, FlushedGeneration and Snapshots of the report o,
// and those about the image. The parameters all and now are those of settleSnapshots. The caller must hold h.mu.
func (c *commonStorage) settle(h *host, a *agentv1.AssignedVolume, all map[cloud.VolumeID]*agentv1.AssignedVolume, now cloud.Time, o *cloud.VolumeObservation) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id := cloud.VolumeID(a.GetVolumeId())
	if a.GetDeleted() {
		c.deleted[id] = true
		if i := c.volumes[id]; i != nil && !i.inUse() {
			delete(c.volumes, id)
			c.f.count(c.what + " deleted")
		}
		o.Present = c.volumes[id] != nil
		return
	}
	if a.GetStandby() {
		o.Present = c.volumes[id] != nil
		return
	}
	i, generation := c.volume(h, a), a.GetAttachmentGeneration()
	switch {
	case i == nil:
		return
	case a.GetMigrated() && a.GetVmId() != "" && generation > i.generation && i.host == h:
		c.takeBack(h, cloud.VMID(a.GetVmId()), a, i)
	case a.GetFence() && i.host != h && (i.host != nil || i.other != nil):
		i.host, i.client, i.other = nil, "", nil // The cluster refuses the requests of the process from now on.
		c.f.count("clients of the Ceph cluster fenced")
	case i.inUse() || generation < i.generation:
	case a.GetVmId() == "":
		i.detached, i.flushed = max(i.detached, generation), max(i.flushed, generation)
	case generation == i.generation:
		i.flushed = generation
	}
	o.Present, o.FlushedGeneration, o.Snapshots = true, i.flushed, h.settleSnapshots(i.copies, a, all, now)
	h.settleFlatten(&i.origin, a, o)
}

// holder returns the VM whose process has a volume open, and the process's host, or "" and nil.
func (c *commonStorage) holder(id cloud.VolumeID) (cloud.VMID, *host) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := c.volumes[id]; i != nil {
		return i.client, i.host
	}
	return "", nil
}

// left returns the number of volumes.
func (c *commonStorage) left() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.volumes)
}
