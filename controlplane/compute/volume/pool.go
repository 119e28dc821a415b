package volume

import (
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// SharedPool is the record of a storage pool that several hosts share, at shared-pool/<pool ID>. It exists while
// volumes take room in the pool.
type SharedPool struct {
	// Name is the name of the pool in the record of the volume that first took room.
	Name string
	// AllocatedGiB is the total size of the volumes and snapshots in the pool, of all hosts together. The room of other
	// pools is counted in cloud.Node.PoolAllocated.
	AllocatedGiB uint64
}

var sharedPools = store.NewTable[SharedPool]("shared-pool")

// space is the storage pool in which a volume or a snapshot takes room. ID is the ID of a shared pool, and empty for a
// pool of one host.
type space struct{ Name, ID string }

func (s space) shared() bool { return s.ID != "" && !mutant.On(mutant.CountSharedPoolTwice) }

// allocated returns the space, in GiB, that is allocated in the pool s of the host n. If the host shared the pool
// before and no longer does, the result includes the space that was allocated while the pool was shared.
func (s space) allocated(r store.Reader, n *cloud.Node) (uint64, error) {
	id, own := s.ID, uint64(0)
	if !s.shared() {
		id, own = n.PoolID(s.Name), n.PoolAllocated[s.Name]
	}
	if id == "" {
		return own, nil
	}
	p, err := sharedPools.Get(r, id)
	if err != nil || p == nil {
		return own, err
	}
	return own + p.AllocatedGiB, nil
}

// add adds gib GiB, which may be negative, to the room that is taken in the pool s of a host. It does nothing if the
// pool is not shared and the host has no record any more.
func (s space) add(tx *store.Tx, host cloud.NodeID, gib int64) error {
	if !s.shared() {
		n, err := node.Nodes.Get(tx, string(host))
		if err != nil || n == nil {
			return err
		}
		n.AllocatePool(s.Name, gib)
		node.Nodes.Put(tx, n, string(host))
		return nil
	}
	p, err := sharedPools.Get(tx, s.ID)
	if err != nil {
		return err
	}
	if p == nil {
		p = &SharedPool{Name: s.Name}
	}
	left := int64(p.AllocatedGiB) + gib
	if left <= 0 {
		sharedPools.Delete(tx, s.ID)
		return nil
	}
	p.AllocatedGiB = uint64(left)
	sharedPools.Put(tx, p, s.ID)
	return nil
}

// allocate takes gib GiB of the volume's pool on a host. If the host has no record, does not serve the pool, or the
// pool has too little room, it returns a fault of the given kind.
func allocate(tx *store.Tx, v *cloud.Volume, host cloud.NodeID, gib uint64, kind fault.Kind) error {
	n, err := node.Nodes.Get(tx, string(host))
	if err != nil {
		return err
	}
	if n == nil {
		return fault.New(fault.FailedPrecondition, "the host of volume %s is no longer in the cluster", v.Name)
	}
	at := space{v.Pool, v.PoolID}
	used, err := at.allocated(tx, n)
	if err != nil {
		return err
	}
	why := n.PoolShortage(v.Pool, gib, used)
	if why == "" && v.PoolID != "" {
		why = n.LacksSharedPool(v.Pool, v.PoolID)
	}
	if why == "" && v.Encrypted {
		why = n.LacksEncryption(v.Pool)
	}
	if why != "" {
		return fault.New(kind, "host %s cannot have volume %s: it %s", n.Name, v.Name, why).WithReason("NO_POOL_FITS")
	}
	return at.add(tx, host, int64(gib))
}
