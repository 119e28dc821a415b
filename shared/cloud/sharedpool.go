package cloud

import (
	"fmt"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Movable reports whether VMs on different hosts can have the volume, one after the other. This applies to volumes of
// the driver RBD, and to volumes in a storage pool that hosts share.
func (v *Volume) Movable() bool { return v.Driver == DriverRBD || v.PoolID != "" }

// storagePool returns the host's pool with this name, or nil if the host does not serve such a pool.
func (n *Node) storagePool(name string) *StoragePool {
	for i, p := range n.StoragePools {
		if p.Name == name {
			return &n.StoragePools[i]
		}
	}
	return nil
}

// SharedPoolID returns the ID of a pool of the host if the host shares the pool with other hosts, and "" otherwise.
func (n *Node) SharedPoolID(pool string) string {
	if p := n.storagePool(pool); p != nil && p.Shared {
		return p.ID
	}
	return ""
}

// PoolID returns the ID of the directory of a pool of the host, or "" if the host does not serve the pool.
func (n *Node) PoolID(pool string) string {
	if p := n.storagePool(pool); p != nil {
		return p.ID
	}
	return ""
}

// LacksSharedPool returns the reason why the host cannot have a volume of the shared pool with this name and ID, or ""
// if it can. The text is the predicate of a sentence whose subject is the host.
func (n *Node) LacksSharedPool(pool, id string) string {
	p := n.storagePool(pool)
	switch {
	case p == nil:
		return "does not serve the storage pool " + pool
	case mutant.On(mutant.AnyPoolID):
		return ""
	case p.ID != id:
		return fmt.Sprintf("has another directory as the storage pool %s: the pool ID there is %q, and that of the volume is %q", pool, p.ID, id)
	case !p.Shared:
		return "does not have `shared: true` in its configuration of the storage pool " + pool
	}
	return ""
}
